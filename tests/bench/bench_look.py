"""Cost of the workflow's scan of a folder of many files: CPU seconds and peak memory, each in a separate process.

    python tests/bench/bench_look.py --folder /dev/shm
    PYTHONPATH=../another-checkout/src python tests/bench/bench_look.py --folder /dev/shm

Files of a few bytes are created in the folder and removed. The baseline is a bare scan: `os.scandir` and a stat.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LOOK = """
import json, resource, sys
from pathlib import Path
from image_diffusion.data.sources.changes import refresh
from image_diffusion.data.sources.folder import Folder
def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
before = cpu_s()
refresh(Folder(path=sys.argv[1]), Path(sys.argv[2]))
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
print(json.dumps({"cpu_s": round(cpu_s() - before, 1), "peak_mb": peak // 1024}))
"""
BARE = """
import json, os, resource, sys
for folder in os.scandir(sys.argv[1]):
    descriptor = os.open(folder.path, os.O_RDONLY)
    for entry in os.scandir(descriptor):
        entry.stat()
    os.close(descriptor)
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"cpu_s": round(usage.ru_utime + usage.ru_stime, 1)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where files are made; unset: the system's for temporary files")
    parser.add_argument("--folders", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--files", type=int, default=1000, help="how many in each (1000)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        root, note = Path(temporary, "images"), Path(temporary, "source.json")
        for number in range(given.folders):
            folder = root / f"class_{number:04d}"
            folder.mkdir(parents=True)
            for each in range(given.files):
                with open(f"{folder}/image_{each:06d}.jpg", "wb") as file:  # noqa: PTH123 - a million of them
                    file.write(b"%d" % each)
        first = root / "class_0000/image_000000.jpg"
        steps = {
            "a bare look": (BARE, lambda: None),
            "the first": (LOOK, lambda: None),
            "nothing changed": (LOOK, lambda: None),
            "nothing changed, again": (LOOK, lambda: None),
            "one file edited where it lies": (LOOK, lambda: first.write_bytes(b"other")),
        }
        for name, (code, change) in steps.items():
            change()
            command = [sys.executable, "-c", code, str(root), str(note)]
            done = subprocess.run(command, env=os.environ, check=True, capture_output=True, text=True)
            print(json.dumps({"look": name} | json.loads(done.stdout)), flush=True)


if __name__ == "__main__":
    main()
