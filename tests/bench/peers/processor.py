"""Name of this machine's processor, for pages of measurements."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def processor() -> str:
    """The processor's name, with the cores that this process may use."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    name = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    return f"{len(os.sched_getaffinity(0))} cores of {name.group(1) if name else platform.processor()}"
