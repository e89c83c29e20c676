"""One tool's plan of sixteen finished jobs: what `make peers` runs, each in a process of its own.

    python tests/bench/peers/planning.py dvc FOLDER

Prints one line of JSON: the CPU seconds, of the command and all it starts, that finds nothing to do, and that finds
the jobs behind an edited number. FOLDER keeps the finished graph; what is absent is made first, and not measured.

`ours` plans the demo, whose trainings are cut to 20 steps here: plans do not depend on that. The peers plan the demo's
graph with jobs that copy a small file.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GRAPH: dict[str, list[str]] = {
    "crop": [],
    "datasheet": ["crop"],
    "detect": ["crop"],
    "reference": ["crop", "detect"],
    "codec_train": ["crop"],
    "encode": ["codec_train", "crop"],
    "train": ["codec_train", "encode"],
    "sample": ["codec_train", "train"],
    "evaluate": ["crop", "detect", "reference", "sample", "train"],
    "codec_evaluate": ["codec_train", "crop", "detect"],
    "report": ["datasheet", "evaluate", "sample", "train"],
    "codec_report": ["codec_evaluate", "codec_train", "datasheet"],
    "track": ["datasheet", "evaluate", "sample", "train"],
    "codec_track": ["codec_evaluate", "codec_train", "datasheet"],
    "summary": ["codec_evaluate", "codec_train", "evaluate", "sample", "train"],
    "all": [
        "codec_evaluate",
        "codec_report",
        "codec_track",
        "codec_train",
        "crop",
        "detect",
        "encode",
        "evaluate",
        "reference",
        "report",
        "sample",
        "summary",
        "track",
        "train",
    ],
}
"""The jobs of the demo, each with those that it reads."""
EDITED = "sample"
"""The job whose number is edited."""


@dataclass(frozen=True)
class Tool:
    """make: runs all jobs in a folder. nothing: the command where nothing is to do. edited: that after a number was
    edited, which stands in a file behind some words."""

    make: Callable[[Path], None]
    nothing: list[str]
    edited: list[str]
    file: str
    words: str


def run(command: list[str], folder: Path) -> float:
    """Run a command, and return its CPU seconds and those of what it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    quiet = {"DO_NOT_TRACK": "1", "DVC_NO_ANALYTICS": "1", "ZENML_ANALYTICS_OPT_IN": "false", "USERNAME": "someone"}
    homes = {"ZENML_CONFIG_PATH": str(folder / ".zen-config"), "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder)}
    environment = {**os.environ, **quiet, **homes, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def replaced(path: Path, pattern: str, replacement: str) -> None:
    """Edit a file: every match, of which there must be one."""
    text, count = re.subn(pattern, replacement, path.read_text())
    assert count, (path, pattern)
    path.write_text(text)


def other_number(text: str, words: str) -> str:
    """A text with another number behind some words."""
    edited, count = re.subn(rf"(?<={words})\d+", lambda match: str(int(match.group()) + 1), text)
    assert count == 1, (words, text)
    return edited


# ---- The tools


def ours() -> Tool:
    snakemake = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "1"]

    def make(folder: Path) -> None:
        shutil.copytree(ROOT / "config", folder / "config")
        for name in ("demo", "demo_codec"):
            path = folder / "config" / "experiments" / f"{name}.yaml"
            replaced(path, r"(?m)^  steps: \d+", "  steps: 20")
            replaced(path, r"(?m)^(  \w+_every_steps|  checkpoint: \{every_steps): \d+", r"\1: 10")
        run(snakemake, folder)

    return Tool(make, snakemake, [*snakemake, "--dry-run"], "config/experiments/demo.yaml", "num_samples: (?=3)")


def dvc() -> Tool:
    def make(folder: Path) -> None:
        folder.mkdir()
        run(["dvc", "init", "--no-scm"], folder)
        lines = ["stages:"]
        for job, needed in GRAPH.items():
            lines += [f"  {job}:", f"    cmd: cat /dev/null {' '.join(f'{each}.txt' for each in needed)} > {job}.txt"]
            lines += ["    params: [number]"] if job == EDITED else []
            lines += ["    deps:", *(f"      - {each}.txt" for each in needed)] if needed else []
            lines += ["    outs:", f"      - {job}.txt"]
        (folder / "dvc.yaml").write_text("\n".join(lines) + "\n")
        (folder / "params.yaml").write_text("number: 300\n")
        run(["dvc", "repro"], folder)

    return Tool(make, ["dvc", "repro"], ["dvc", "repro", "--dry"], "params.yaml", "number: ")


def flow(text: str, *arguments: str, before: Sequence[str] = ()) -> Tool:
    """A tool whose graph is a script. arguments: of the script. before: a command that its folder needs."""
    command = ["python", "flow.py", *arguments]

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "flow.py").write_text(text)
        if before:
            run([*before], folder)
        run(command, folder)

    return Tool(make, command, command, "flow.py", "NUMBER = ")


def kedro() -> Tool:
    nodes = []
    for job, needed in GRAPH.items():
        inputs = [*needed, *(["params:number"] if job == EDITED else [])]
        nodes.append(f"node(lambda *values: {job!r}, {inputs or None!r}, {job!r}, name='make_{job}'),")
    text = f"""
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import node, pipeline
from kedro.runner import SequentialRunner
from kedro_datasets.text import TextDataset
NUMBER = 300
catalog = DataCatalog({{name: TextDataset(filepath=name + '.txt') for name in {list(GRAPH)!r}}})
catalog['params:number'] = MemoryDataset(NUMBER)
nodes = pipeline([{" ".join(nodes)}])
SequentialRunner().run(nodes, catalog, only_missing_outputs=True)
"""
    return flow(text)


def metaflow() -> Tool:
    order = list(GRAPH)
    steps = []
    for number, job in enumerate(order):
        following = f"self.next(self.{order[number + 1]})" if number + 1 < len(order) else "self.next(self.end)"
        steps.append(f"    @step\n    def {job}(self):\n        self.made_{job} = {job!r}\n        {following}\n")
    text = f"""
from metaflow import FlowSpec, step
NUMBER = 300
class Demo(FlowSpec):
    @step
    def start(self):
        self.next(self.{order[0]})
{"".join(steps)}
    @step
    def end(self):
        pass
if __name__ == "__main__":
    Demo()
"""
    return flow(text, "run")


def zenml() -> Tool:
    steps = []
    calls = []
    for job, needed in GRAPH.items():
        inputs = [*needed, *(["number"] if job == EDITED else [])]
        typed = ", ".join(f"{each}: {'int' if each == 'number' else 'str'}" for each in inputs)
        steps.append(f"@step\ndef {job}_step({typed}) -> str:\n    return {job!r}\n")
        values = ", ".join(f"{each}=NUMBER" if each == "number" else f"{each}=made[{each!r}]" for each in inputs)
        calls.append(f"    made[{job!r}] = {job}_step({values})\n")
    text = f"""
from zenml import pipeline, step
NUMBER = 300
{"".join(steps)}
@pipeline(enable_cache=True)
def demo():
    made = {{}}
{"".join(calls)}
if __name__ == "__main__":
    demo()
"""
    return flow(text, before=["zenml", "init"])


TOOLS = {each.__name__: each for each in (ours, dvc, kedro, metaflow, zenml)}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2]) / f"plan-{sys.argv[1]}"
    tool = TOOLS[name]()
    if not folder.exists():
        tool.make(folder)
    run(tool.nothing, folder)  # sees that the edit of the round before is gone
    nothing_s = run(tool.nothing, folder)
    file = folder / tool.file
    text = file.read_text()
    file.write_text(other_number(text, tool.words))
    edit_s = run(tool.edited, folder)
    file.write_text(text)
    print(json.dumps({"nothing_cpu_s": nothing_s, "edit_cpu_s": edit_s}))


if __name__ == "__main__":
    main()
