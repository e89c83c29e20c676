"""What a process has used so far: read by the scripts beside this one, in any environment."""

from __future__ import annotations

import resource


def cpu_seconds() -> float:
    """User and system time of this process, its threads and the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def peak_mib() -> float:
    """The largest memory of this process, pages of mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
