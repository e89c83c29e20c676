"""The first hour on a machine with a GPU: its hardware, tests by how much they reveal, benchmarks, kills.

    python tests/gpu/first_hour.py --plan        # the steps with their times; needs no GPU
    python tests/gpu/first_hour.py               # `make first-gpu`: three slices of nine minutes at most
    python tests/gpu/first_hour.py --slice 1     # one of them

Each step is a process with a time limit of its own, and a failure stops no other step. `first-gpu/page.md` and
`first-gpu/steps.json` are written after every step, so that they are complete if the machine vanishes. Steps that have
passed are not repeated: delete the folder to begin again. Needs Python and PyTorch, and the packages of `make wheels`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SLICE_S = 540
_OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR)\b")
_ROW = re.compile(r"^\| .* \|$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """slice: 1 to 3. limit_s: seconds after which the step is ended."""

    name: str
    slice: int
    limit_s: int
    about: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """status: passed, failed, out of time. tests: their numbers by outcome. rows: of a table. tail: last lines."""

    status: str
    seconds: float
    tests: dict[str, int]
    rows: list[str]
    tail: list[str]


def tests(file: str, chosen: str = "") -> tuple[str, ...]:
    """Return the command that runs tests of a file: several at once if pytest-xdist is installed."""
    number = min(12, os.cpu_count() or 1)
    several = (f"--numprocesses={number}",) if importlib.util.find_spec("xdist") else ()
    options = ("-vv", "--tb=short", "-p", "no:cacheprovider", *several, *(("-k", chosen) if chosen else ()))
    return (sys.executable, "-m", "pytest", f"tests/gpu/{file}.py", *options)


def bench(*parts: str) -> tuple[str, ...]:
    """Return the command that runs parts of the benchmark."""
    return (sys.executable, "tests/gpu/bench_gpu.py", *(word for part in parts for word in ("--only", part)))


PLAN = (
    Step("machine", 1, 30, "GPU, driver, PyTorch, compiler; an exact product", (sys.executable, __file__, "--machine")),
    Step("numbers", 1, 90, "random numbers, batches, latents: those of a CPU", tests("test_gpu_pieces")),
    Step("losses", 1, 60, "losses: those of a CPU", tests("test_gpu_trainings", "losses_equal_those")),
    Step("waits", 1, 120, "no step waits for the GPU", tests("test_gpu_trainings", "does_not_wait")),
    Step("precision", 1, 120, "bf16, fp16 and TF32: nearly float32", tests("test_gpu_trainings", "lower_precision")),
    Step("processes", 1, 120, "two processes on one GPU", tests("test_gpu_trainings", "two_processes")),
    Step("training", 2, 180, "images a second of DiT, and its share of the peak", bench("train")),
    Step("shares", 2, 60, "where the time of a step goes", bench("shares", "pieces", "noise")),
    Step("sampling", 2, 90, "hours of 50,000 images", bench("sample")),
    Step("codec", 2, 90, "encoding and decoding of latents", bench("codec")),
    Step("checkpoints", 2, 30, "how long a training waits for one", bench("checkpoint")),
    Step("small", 2, 90, "small networks, also as CUDA graphs", bench("small")),
    Step("kills", 3, 300, "killed and resumed: the same bytes", tests("test_gpu_trainings", "killed")),
    Step("compiled", 3, 120, "compiled by block", tests("test_gpu_trainings", "compiled_blocks")),
    Step("graphs", 3, 120, "recorded as CUDA graphs", tests("test_gpu_trainings", "cuda_graphs")),
)


def run(steps: Sequence[Step], output: Path, only: int | None = None) -> dict[str, Result]:
    """Run the steps that have not passed yet, and write the page on all after each. only: the slice to run; unset:
    all."""
    output.mkdir(parents=True, exist_ok=True)
    record = output / "steps.json"
    stored: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    results = {name: Result(**values) for name, values in stored.items()}
    for step in steps:
        if only not in (None, step.slice) or (step.name in results and results[step.name].status == "passed"):
            continue
        print(f"{datetime.now():%H:%M:%S} {step.name}: {step.about}, {step.limit_s} s at most", flush=True)
        results[step.name] = result = take(step, output / f"{step.name}.log")
        write(record, json.dumps({name: asdict(each) for name, each in results.items()}, indent=1))
        write(output / "page.md", page(steps, results))
        print(f"{datetime.now():%H:%M:%S} {step.name}: {result.status} after {result.seconds:.0f} s", flush=True)
    return results


def take(step: Step, log: Path) -> Result:
    """Run one step and end every process that it started."""
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    if "pytest" in step.command:  # as many processes as cores
        environment["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()
    with log.open("w") as written:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=os.environ | environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = "failed" if process.wait(step.limit_s) else "passed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if not line.startswith(("FAILED ", "ERROR "))]  # without the summary
    outcomes = [match[1].lower() for line in lines if (match := _OUTCOME.search(line))]
    counts = {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}
    rows = [row for row in _ROW.findall(text) if not row.startswith(("| |", "| ---"))]
    return Result(status, time.monotonic() - began, counts, list(dict.fromkeys(rows)), text.splitlines()[-30:])


def page(steps: Sequence[Step], results: dict[str, Result]) -> str:
    """Return the results as Markdown: one table, then the relevant output of each step."""
    lines = ["# First hour", "", "| Step | | Seconds | Tests | |", "| --- | --- | ---: | --- | --- |"]
    for step in steps:
        result = results.get(step.name, Result("not run yet", 0.0, {}, [], []))
        counts = ", ".join(f"{number} {outcome}" for outcome, number in result.tests.items())
        lines.append(f"| {step.name} | {result.status} | {result.seconds:.0f} | {counts} | {step.about} |")
    for step in steps:
        if (result := results.get(step.name)) is None:
            continue
        if result.rows:
            lines += ["", f"## {step.name}", "", "| | | | Of what the GPU can do | Goal |"]
            lines += ["| --- | ---: | --- | ---: | ---: |", *result.rows]
        if result.status != "passed" or step.name == "machine":
            lines += ["", f"## {step.name}: {result.status}", "", "```text", *result.tail, "```"]
    return "\n".join([*lines, ""])


def write(path: Path, text: str) -> None:
    """Replace a file atomically, flushed to the disk."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def plan(steps: Sequence[Step]) -> str:
    """Return the steps, a line each, with their time limits."""
    lines = []
    for number in sorted({step.slice for step in steps}):
        mine = [step for step in steps if step.slice == number]
        lines.append(f"slice {number}: {sum(step.limit_s for step in mine)} s at most")
        lines += [f"  {step.name:<12} {step.limit_s:>4} s  {step.about}" for step in mine]
    return "\n".join(lines)


def machine() -> None:
    """Print what this machine has, and check an exact product on each GPU."""
    import torch  # imported here: without a GPU the command ends before

    sys.path.insert(0, str(ROOT / "src"))
    from image_diffusion.core.devices import REQUESTED, check_kernels, driver, has_gpu
    from image_diffusion.training.parallel import preflight
    from image_diffusion.training.parallel.world import World

    os.environ[REQUESTED] = "1"
    print(f"Python {sys.version.split()[0]}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}, driver {driver()}")
    print(f"built for {' '.join(torch.cuda.get_arch_list())}; cuDNN {torch.backends.cudnn.version()}")
    has_gpu()
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        check_kernels(device)
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        name = torch.cuda.get_device_name(device)
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        print(f"GPU {index}: {name}, {capability}, {free:.1f} of {total:.1f} GiB free, bf16 {native}")
        for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if native else [])):
            preflight.check(World(0, 1, device, hosts=("here",)), dtype)
    from image_diffusion.core.random.streams import Streams

    ids = torch.arange(2, device="cuda")
    Streams(0, ids, ids).normal("first", (4,))  # reports if Triton is missing or finds no compiler
    for name in ("diffusers", "pydantic", "numpy", "scipy", "sklearn", "torchvision", "pytest", "xdist", "snakemake"):
        print(f"{name}: {'yes' if importlib.util.find_spec(name) else 'MISSING'}")


def has_device() -> bool:
    """True if the system shows a GPU: NVIDIA's, one of Windows below Linux, or AMD's."""
    devices = Path("/dev")
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists() or (devices / "kfd").exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="print the steps and end")
    parser.add_argument("--slice", type=int, choices=[1, 2, 3], help="run the steps of one slice (default: all)")
    parser.add_argument("--output", type=Path, default=ROOT / "first-gpu", help="folder of the page (first-gpu)")
    parser.add_argument("--machine", action="store_true", help="print what this machine has, which the first step does")
    options = parser.parse_args()
    if options.plan:
        print(plan(PLAN))
        return
    if not has_device():
        parser.exit(1, "There is no GPU here (no /dev/nvidia0): nothing was run. --plan prints the steps.\n")
    if options.machine:
        machine()
        return
    results = run(PLAN, options.output, options.slice)
    print(f"{options.output / 'page.md'}")
    sys.exit(any(result.status != "passed" for result in results.values()))


if __name__ == "__main__":
    main()
