"""A simulated week of a busy cluster: whether everything ends, and the GPU time lost to failing nodes.

    python tests/bench/bench_week.py
    python tests/bench/bench_week.py --experiments 10 --nodes 4 --minutes 1

Snakemake, its plugin for Slurm, the profile and the rules are the real ones. Slurm is played: `sbatch`, `squeue`,
`sacct` and `scancel` speak to this process, which gives jobs to nodes first come, first served, and lets nodes die, at
random times, for some hours. A job computes nothing: it lasts as long as its stage would, writes down how it ends as
`workflow/scripts/logged` does, and leaves empty outputs. A stage that goes on where it was (`GOES_ON`) loses what it
did since it last saved; the others begin anew. Each start costs three minutes. A clock that runs as fast as the week
fits into --minutes drives both: what Snakemake sleeps is shortened by as much, so that what it computes counts a
thousandfold, as time in which GPUs wait.

Lost is what was computed twice and what starting again took, of all hours that GPUs were held.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
HOURS = {"crop": 1.0, "datasheet": 0.5, "detect": 0.3, "reference": 0.3, "sample": 3.0, "evaluate": 0.7}
"""Hours of computation of a stage, on one GPU or none. Training: drawn, from 5 hours to 100."""
GOES_ON = {"crop": 0.02, "train": 0.25, "sample": 0.02, "evaluate": 0.02, "reference": 0.02}
"""Stages that resume, and the hours between their saves."""
START_H, REPAIR_H, LIMIT_H, WARNED_H = 0.05, 6.0, 24.0, 120 / 3600
GPUS_OF_A_NODE = 2

SITE = {"scontrol": "MinJobAge = 300 sec\n", "sacctmgr": "ours\n", "sinfo": "PARTITION\nours\n"}
"""Answers of the commands that query the site, for any arguments."""

CLIENT = """
import socket, sys, os
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.environ["PLAYED_SLURM"])
    server.sendall("\\0".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode())
    server.shutdown(socket.SHUT_WR)
    code, _, said = b"".join(iter(lambda: server.recv(65536), b"")).decode().partition("\\n")
sys.stdout.write(said)
sys.exit(int(code))
"""
SHORTENED = """
import asyncio, time
def shortened(sleep):
    return lambda seconds, *others: sleep(seconds / {speed}, *others)
asyncio.sleep, time.sleep = shortened(asyncio.sleep), shortened(time.sleep)
"""
EXPERIMENT = {
    "system": {
        "type": "dit",
        "network": {"depth": 1, "width": 32, "num_heads": 2, "patch": 4},
        "objective": {"label_drop_probability": 0},
    },
    "train": {"steps": 8, "global_batch": 8, "grid_every_steps": None},
    "sample": {"num_samples": 16, "sampler": {"type": "ddim", "num_steps": 2}},
}


@dataclass
class Work:
    """A stage. hours: of its computation. saved: the part that is kept."""

    rule: str
    hours: float
    outputs: list[Path]
    log: Path
    saved: float = 0.0


@dataclass
class Job:
    """A submitted job. Times in hours since the week began."""

    number: int
    comment: str
    name: str
    gpus: int
    work: Work
    shunned: set[str]
    state: str = "PENDING"
    node: str | None = None
    began: float = 0.0

    @property
    def ends(self) -> float:
        """Return the end of the job, unless something happens."""
        return self.began + min(LIMIT_H, START_H + self.work.hours - self.work.saved)


@dataclass
class Node:
    """free: GPUs. back: time of its repair."""

    name: str
    free: int = GPUS_OF_A_NODE
    back: float = 0.0


@dataclass
class Told:
    """Totals, in hours of GPUs or times."""

    useful: float = 0.0
    again: float = 0.0
    starting_again: float = 0.0
    deaths: int = 0
    ends: Counter[str] = field(default_factory=Counter)


class Slurm:
    """The queue and the nodes. All changes happen in `advance`, under a lock, at the time of the caller."""

    def __init__(self, works: dict[str, Work], num_nodes: int, die_daily: float, seed: int, now: Callable[[], float]):
        self.works, self.now = works, now
        self.nodes = {f"n{i}": Node(f"n{i}") for i in range(num_nodes)}
        self.jobs: dict[int, Job] = {}
        self.told = Told()
        self._chance, self._rate = random.Random(seed), die_daily * num_nodes / 24
        self._next_death = self._chance.expovariate(self._rate) if self._rate else float("inf")
        self._lock = threading.Lock()
        self._begun: set[str] = set()

    def answer(self, command: str, arguments: list[str]) -> str:
        """Return the output of a command."""
        if command in SITE:
            return SITE[command]
        with self._lock:
            self._advance(self.now())
            if command == "sbatch":
                return self._send(arguments)
            if command == "scancel":
                for job in (self.jobs[int(each)] for each in arguments if each.isdigit()):
                    self._end(job, "CANCELLED", self.now())
            if command == "squeue" and "--me" not in arguments:
                return "".join(f"{job.number}|{job.state}\n" for job in self.jobs.values())
            if command == "sacct" and "-j" in arguments:
                job = self.jobs[int(arguments[arguments.index("-j") + 1])]
                if "--parsable2" in arguments:
                    return f"{job.state}|1:0||{job.node}\n"
                return f"{job.node}\n"
        return ""

    def _send(self, arguments: list[str]) -> str:
        given = dict(zip(arguments, [*arguments[1:], ""], strict=True))
        joined = " ".join(arguments)
        gpus = re.search(r"gpu:(?:\w+:)?(\d+)", joined)
        shunned = re.search(r"--exclude=(\S+)", joined)
        job = Job(
            number=len(self.jobs) + 1,
            comment=given["--comment"],
            name=given["--job-name"],
            gpus=int(gpus[1]) if gpus else 0,
            work=self.works[given["--comment"]],
            shunned=set(shunned[1].split(",")) if shunned else set(),
        )
        self.jobs[job.number] = job
        self._place(self.now())
        return f"{job.number}\n"

    def _advance(self, now: float) -> None:
        """Process all events before now, in order."""
        while True:
            running = [job for job in self.jobs.values() if job.state == "RUNNING"]
            first = min(running, key=lambda job: job.ends, default=None)
            repaired = min((node.back for node in self.nodes.values() if node.back > 0), default=float("inf"))
            at = min(first.ends if first else float("inf"), self._next_death, repaired)
            if at > now:
                return
            if at == self._next_death:
                self._next_death += self._chance.expovariate(self._rate)
                self._kill(self._chance.choice(list(self.nodes.values())), at)
            elif first is not None and at == first.ends:
                is_done = START_H + first.work.hours - first.work.saved <= LIMIT_H
                self._end(first, "COMPLETED" if is_done else "TIMEOUT", at)
            for node in self.nodes.values():
                if 0 < node.back <= at:
                    node.back, node.free = 0.0, GPUS_OF_A_NODE
            self._place(at)

    def _kill(self, node: Node, at: float) -> None:
        self.told.deaths += node.back == 0
        for job in [job for job in self.jobs.values() if job.state == "RUNNING" and job.node == node.name]:
            self._end(job, "NODE_FAIL", at)
        node.back, node.free = at + REPAIR_H, 0

    def _place(self, at: float) -> None:
        for job in self.jobs.values():
            if job.state != "PENDING":
                continue
            fitting = [
                node for node in self.nodes.values() if not node.back and node.free >= job.gpus
                and node.name not in job.shunned
            ]  # fmt: skip
            if fitting:
                node = min(fitting, key=lambda node: node.free)
                node.free -= job.gpus
                job.state, job.node, job.began = "RUNNING", node.name, at
                job.work.log.parent.mkdir(parents=True, exist_ok=True)
                job.work.log.with_name(job.work.log.name + ".attempt").write_text(f"{job.number} {node.name}\n")

    def _end(self, job: Job, state: str, at: float) -> None:
        """End a job: record the saved work and the wasted time of its GPUs."""
        if job.state == "RUNNING":
            work, node = job.work, self.nodes[str(job.node)]
            node.free += job.gpus
            held = at - job.began
            done = max(0.0, held - START_H)
            note = work.log.with_name(work.log.name + ".attempt")
            if state == "COMPLETED":
                kept = work.hours - work.saved
                note.unlink(missing_ok=True)
                for path in work.outputs:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.touch() if path.suffix else path.mkdir(exist_ok=True)
            elif state == "TIMEOUT" and work.rule == "train":
                kept = done - WARNED_H  # it got a warning and has saved
                with note.open("a") as file:
                    file.write('["stopped", "It is saved."]\n')
            else:
                every = GOES_ON.get(work.rule)
                kept = 0.0 if every is None else (work.saved + done) // every * every - work.saved
            work.saved += max(0.0, kept)
            self.told.useful += job.gpus * max(0.0, kept)
            self.told.again += job.gpus * (done - max(0.0, kept))
            started_again = job.comment in self._begun
            self._begun.add(job.comment)
            self.told.starting_again += job.gpus * min(held, START_H) * started_again
            self.told.useful += job.gpus * min(held, START_H) * (not started_again)
        job.state = state
        self.told.ends[state] += 1


@contextmanager
def listening(slurm: Slurm, address: Path) -> Iterator[None]:
    """Answer the commands of `CLIENT` in the background."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            command, *arguments = self.rfile.read().decode().split("\0")
            self.wfile.write(f"0\n{slurm.answer(command, arguments)}".encode())

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True
        request_queue_size = 128

    with Server(str(address), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def make_project(folder: Path, names: list[str], chance: random.Random) -> dict[str, float]:
    """Write a project of these experiments, each with its own data set. Return the training hours of each."""
    shutil.copytree(ROOT / "config", folder / "config", ignore=shutil.ignore_patterns("*.yaml"))
    settings = (ROOT / "config/config.yaml").read_text()
    settings = re.sub(r"(?m)^experiments:.*$", f"experiments: [{', '.join(names)}]", settings)
    settings = re.sub(r"(?m)^    # (slurm_partition|slurm_account): .*$", r"    \1: ours", settings)
    (folder / "config/config.yaml").write_text(re.sub(r"(?m)^  every_s:.*$", "  every_s:", settings))
    for name in ("Snakefile", "workflow", "src", "envs", "slurm"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "config/experiments").mkdir(exist_ok=True)
    hours = {}
    for name in names:
        gpus = chance.choice([1, 1, 2])
        data = {"name": name, "source": {"type": "digits"}, "resolution": 16}
        resources = {"processes_per_node": gpus, "gpus_per_node": gpus, "runtime_min": int(LIMIT_H * 60)}
        experiment = {"data": data, **EXPERIMENT, "resources": resources}
        (folder / f"config/experiments/{name}.yaml").write_text(yaml.safe_dump(experiment))
        hours[name] = 5.0 * 20.0 ** chance.random()
    return hours


def planned(folder: Path, snakemake: list[str], targets: list[str], hours: dict[str, float]) -> dict[str, Work]:
    """Return the planned work from a dry run, by the comment that the plugin gives a job."""
    done = subprocess.run([*snakemake, "--dry-run", *targets], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    works = {}
    for block in re.split(r"(?m)^(?=(?:local)?rule )", done.stdout):
        rule = re.match(r"rule (\w+):", block)
        facts = dict(re.findall(r"(?m)^    (output|log|benchmark|wildcards): (.*)$", block))
        if rule is None or "output" not in facts:
            continue
        wildcards = [each.split("=")[1] for each in facts["wildcards"].split(", ")]
        takes = hours[wildcards[0]] if rule[1] == "train" else HOURS[rule[1]]
        outputs = [folder / path for path in (*facts["output"].split(", "), facts["benchmark"])]
        comment = f"rule_{rule[1]}_wildcards_{'_'.join(wildcards)}"
        works[comment] = Work(rule[1], takes, outputs, folder / facts["log"])
    return works


def main() -> None:
    """Simulate the week and print the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=25, help=f"of {GPUS_OF_A_NODE} GPUs each")
    parser.add_argument("--die-daily", type=float, default=0.05, help="share of the nodes")
    parser.add_argument("--minutes", type=float, default=15.0, help="what the week is played in")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    speed = 7 * 24 * 60 / asked.minutes
    names = [f"e{number}" for number in range(asked.experiments)]
    targets = [f"results/{name}/metrics.json" for name in names]
    targets += [f"results/datasets/{name}-16/datasheet/datasheet.json" for name in names]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "project")
        folder.mkdir()
        hours = make_project(folder, names, random.Random(asked.seed))
        snakemake = [sys.executable, "-m", "snakemake", "--cores", "2", "--profile", "slurm"]
        works = planned(folder, snakemake, targets, hours)
        commands = Path(place, "bin")
        commands.mkdir()
        for name in ("sbatch", "squeue", "sacct", "scancel", *SITE):
            (commands / name).write_text(f"#!{sys.executable} -SE\n{CLIENT}")
            (commands / name).chmod(0o755)
        (commands / "sitecustomize.py").write_text(SHORTENED.format(speed=speed))
        environment = {
            **os.environ,
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(commands), str(ROOT / "src")]),
            "PLAYED_SLURM": str(Path(place, "slurm")),
        }
        began = time.monotonic()
        slurm = Slurm(
            works, asked.nodes, asked.die_daily, asked.seed, lambda: (time.monotonic() - began) * speed / 3600
        )
        with listening(slurm, Path(place, "slurm")), Path(place, "printed").open("w") as printed:
            command = [*snakemake, *targets]
            done = subprocess.run(command, cwd=folder, env=environment, stdout=printed, stderr=printed, check=False)
        took = slurm.now()
        ended = sum((folder / target).exists() for target in targets[: len(names)])
        if done.returncode:
            print(Path(place, "printed").read_text()[-5000:])
    told = slurm.told
    held = told.useful + told.again + told.starting_again
    lost = told.again + told.starting_again
    print(f"{len(names)} experiments, {asked.nodes * GPUS_OF_A_NODE} GPUs; Snakemake ended with {done.returncode}")
    for name, value in {
        "experiments that ended": f"{ended}",
        "days": f"{took / 24:.1f}",
        "jobs sent": f"{len(slurm.jobs)} for {len(works)} stages",
        "how they ended": ", ".join(f"{state} {number}" for state, number in told.ends.most_common()),
        "nodes that died": f"{told.deaths}",
        "GPU-hours held": f"{held:.0f}",
        "of them lost": f"{lost:.1f} ({lost / held:.2%}): {told.again:.1f} computed twice, "
        f"{told.starting_again:.1f} starting again",
    }.items():
        print(f"  {name:<24}{value}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
