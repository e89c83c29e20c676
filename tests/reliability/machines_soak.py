"""Hours of machines that are killed, with one bucket: each successor has an empty disk and ends with the same bytes.

    python tests/reliability/machines_soak.py --seed 1 --kills 200 --faults 1000      (make soak-machines SEED=1)

In rounds, each with an empty store: a machine with only the project gets the command; it is killed at a random instant,
with its disk, and another one gets the same command, until one ends well. Half of the rounds reach the store through a
proxy that breaks requests. At the end all reproducible results are, byte for byte, those of an undisturbed machine
without a mirror.

A fault is *healed* if that holds without a message; *told* if a command that nobody killed first ended with a clear
line. It is *silent* if a command ends well with other results: that stops the soak.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import yaml
from soak import CLEAR, STAGES, WrongError, with_needed
from soak_project import EXPERIMENTS, LOGGED, ROOT, TOLD, Choice, write_project

from bucket import BUCKET, Bucket
from faulty_store import KINDS, FaultyStore
from machines import Machine, Running
from warm import Warm

LONGEST_S = 600.0
"""Longest duration of a command in seconds."""
EVERY_S = 0.3
SILENCE_S = 2.0
RATE = 0.15
"""Share of requests that get a fault, in rounds with faults."""
MOST_KILLS = 8
"""Largest number of machines killed in a round."""
AIMLESS = 0.5
"""Share of kills at a random time; the others wait for the stage that was killed least."""
CALM = 3
"""Number of undisturbed commands within which a round must end well."""
ROTTEN = "rotten object"
"""A fault that loses every copy of a journal, or makes the mirror unreadable: neither heals, and both are told."""
HEALED = tuple(kind for kind in KINDS if kind != ROTTEN)


class Machines:
    """A project for a series of machines: each has only the configuration and the images."""

    def __init__(self, warm: Warm, work: Path, names: list[str]) -> None:
        """work: an empty folder. names: of the experiments."""
        self.warm, self.work, self.names = warm, work, names
        self._begun = 0

    def new(self, mirror: str | None = None) -> Machine:
        """Return a machine with the project on its disk, with a new name and folder. mirror: the URL."""
        self._begun += 1
        machine = Machine(self.warm, self.work / f"machine-{self._begun}", f"machine-{self._begun}")
        project = machine.folder / "project"
        write_project(project, Choice(0, dict.fromkeys(with_needed(self.names), 0)), self.names)
        if mirror is not None:
            config = project / "config" / "config.yaml"
            section = {"url": mirror, "every_s": EVERY_S, "silence_s": SILENCE_S}
            config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "mirror": section}))
        return machine

    def command(self, machine: Machine, **settings: str) -> Running:
        """Start the command. settings: environment variables."""
        line = ["-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "1", "--keep-going"]
        return machine.start(line, "project", **settings)

    def found(self, machine: Machine) -> dict[str, str]:
        """Return the sha256 of all reproducible results, read on the machine."""
        reader = str(Path(__file__).with_name("soak_project.py"))
        running = machine.start([reader, *with_needed(self.names)], "project")
        if running.wait(LONGEST_S) != 0:
            raise WrongError(f"The results on {machine.name} cannot be read:\n{running.said()}")
        made: dict[str, str] = json.loads(running.said().splitlines()[-1])
        return made

    def undisturbed(self) -> tuple[dict[str, str], float]:
        """Return the results of a machine without a mirror, and the seconds of its command."""
        began = time.monotonic()
        with self.new() as machine:
            running = self.command(machine)
            if running.wait(LONGEST_S) != 0:
                raise WrongError(f"An undisturbed command ended with {running.wait(0)}:\n{running.said()}")
            seconds = time.monotonic() - began
            return self.found(machine), seconds


@dataclass
class Trainings:
    """Progress of trainings, by experiment. ids: of all attempts so far. sent: the newest step in the mirror."""

    ids: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)

    def check(self, results: Path) -> None:
        """Raise WrongError if a new attempt in these results repeated steps that the mirror had before it."""
        for path in sorted(results.glob("*/journal/train/attempt-*.jsonl")):
            line, is_whole, _ = path.read_text(errors="replace").partition("\n")
            if not is_whole:  # it is starting
                continue
            header = json.loads(line)
            began, sent = header["resume_step"] or 0, self.sent.get(path.parts[-4], 0)
            if header["id"] not in self.ids and began < sent:
                raise WrongError(f"{path} begins after step {began}; the mirror has step {sent}.")
            self.ids.add(header["id"])

    def look(self, store: Bucket, prefix: str) -> None:
        """Read from the bucket which steps the newest snapshot contains."""
        for name in names_in_snapshot(store, prefix):
            if parts := re.fullmatch(r"results/([^/]+)/train/state/.*step-(\d+)/checkpoint\.json", name):
                self.sent[parts[1]] = max(self.sent.get(parts[1], 0), int(parts[2]))


def names_in_snapshot(store: Bucket, prefix: str) -> list[str]:
    """Return the names of the files in the newest head of a mirror, read in its stored format."""
    listed = store.call("list_objects_v2", Prefix=f"{prefix}/heads/").get("Contents", [])
    if not listed:
        return []
    newest = max(each["Key"] for each in listed)
    chunks = json.loads(store.call("get_object", Key=newest)["Body"])["snapshot"]
    data = b"".join(store.call("get_object", Key=f"{prefix}/blobs/{chunk}")["Body"] for chunk in chunks)
    return list(json.loads(gzip.decompress(data))) if data else []


class Tally:
    """Outcomes of the faults, by kind."""

    def __init__(self) -> None:
        self.injected, self.healed, self.told, self.silent = (Counter[str]() for _ in range(4))
        self.kills: Counter[str] = Counter()
        self.rounds = self.machines = 0

    def close(self, faults: Counter[str], end: Counter[str]) -> None:
        """Record the outcome of a round's faults. end: one of `healed`, `told` and `silent`."""
        self.injected.update(faults)
        end.update(faults)

    def table(self) -> str:
        columns = (self.injected, self.healed, self.told, self.silent)
        lines = [f"{'Fault':<28}{'injected':>10}{'healed':>10}{'told':>10}{'silent':>10}"]
        lines += [
            f"{kind:<28}" + "".join(f"{column[kind]:>10,}" for column in columns) for kind in sorted(self.injected)
        ]
        lines.append(f"{'all':<28}" + "".join(f"{column.total():>10,}" for column in columns))
        killed = [name for name in ["snakemake", *STAGES] if self.kills[name]]
        lines += ["", "Running when killed: " + ", ".join(f"{name} {self.kills[name]:,}" for name in killed)]
        lines.append(f"{self.rounds:,} rounds, {self.machines:,} machines, {self.kills.total():,} killed")
        return "\n".join(lines)


class MachinesSoak:
    """The rounds of one seed."""

    def __init__(self, machines: Machines, store: Bucket, seed: int) -> None:
        self.machines, self.store, self.seed = machines, store, seed
        self.tally = Tally()
        self.expected, self.length_s = machines.undisturbed()

    def round(
        self, number: int, is_enough: Callable[[Tally], bool], rate: float = 0.0, kinds: Sequence[str] = HEALED
    ) -> None:
        """Kill some machines until it is enough, then let another one end well.
        rate: of the store's faults. kinds: of the faults."""
        draw = random.Random(f"{self.seed} {number}")
        prefix = f"seed-{self.seed}/round-{number}"
        faults, trainings, is_told = Counter[str](), Trainings(), False
        kills, calm = draw.randint(1, MOST_KILLS), CALM
        with FaultyStore(self.store, seed=draw.randrange(1 << 30), rate=rate, kinds=kinds) as proxy:
            while calm:
                with self.machines.new(f"s3://{BUCKET}/{prefix}") as machine:
                    self.tally.machines += 1
                    running = self.machines.command(machine, **proxy.settings)
                    is_calm = not kills or is_enough(self.tally)
                    killed = None if is_calm else self._wait(draw, machine, running)
                    if killed is not None:
                        machine.stop()  # it sends nothing while the bucket is read
                    else:
                        running.wait(LONGEST_S)
                    if not rate:
                        trainings.check(machine.folder / "project" / "results")
                        trainings.look(self.store, prefix)
                    if killed is not None:
                        kills -= 1
                        self.tally.kills[killed] += 1
                        faults["killed machine"] += 1
                        continue
                    said = running.said()
                    if running.poll() == 0:
                        self._compare(number, self.machines.found(machine), faults + proxy.counts, said, is_told)
                        return
                    if not CLEAR.search(said):
                        raise WrongError(f"Round {number}: no clear line, status {running.poll()}:\n{said[-6000:]}")
                    is_told, calm = True, calm - 1
                    proxy.rate = rate if calm > 1 else 0.0
            if proxy.counts[ROTTEN]:
                self.tally.rounds += 1
                self.tally.close(faults + proxy.counts, self.tally.told)
                return
        raise WrongError(f"Round {number}: the same command does not end well.\n{said[-4000:]}")

    def _wait(self, draw: random.Random, machine: Machine, running: Running) -> str | None:
        """Wait for a random instant. Return the name of the running stage, or None if the command has ended before."""
        wanted = None
        until = time.monotonic() + draw.expovariate(2 / self.length_s)
        if draw.random() > AIMLESS:
            wanted = min(draw.sample(STAGES, len(STAGES)), key=lambda name: self.tally.kills[name])
            until = time.monotonic() + self.length_s + SILENCE_S
        while time.monotonic() < until and running.poll() is None and wanted not in machine.running():
            time.sleep(0.01)
        if wanted is not None:
            time.sleep(draw.random() ** 2)
        present = machine.running()
        if running.poll() is not None:
            return None
        return next((name for name in reversed(present) if name in STAGES), "snakemake")

    def _compare(self, number: int, made: dict[str, str], faults: Counter[str], said: str, is_told: bool) -> None:
        wrong = {key: (value, made.get(key)) for key, value in self.expected.items() if made.get(key) != value}
        extra = sorted(made.keys() - self.expected.keys())
        if faults[ROTTEN]:
            told = [f"{name}: " for name in self.machines.names for stage in LOGGED if _tells(made, name, stage)]
            # Only a training draws its previews: a message says that one is missing.
            told += [each.removeprefix("results/") for each in re.findall(r"the previews in (\S+) have changed", said)]
            wrong = {key: values for key, values in wrong.items() if not key.startswith(tuple(told))}
            is_told = is_told or bool(told)
        self.tally.rounds += 1
        if wrong or extra:
            self.tally.close(faults, self.tally.silent)
            raise WrongError(f"Round {number} ended well, with other results:\n{wrong}\nof nobody: {extra}\n{said}")
        self.tally.close(faults, self.tally.told if is_told else self.tally.healed)


def _tells(made: dict[str, str], name: str, stage: str) -> bool:
    """Return True if the journal of a stage says that it is incomplete."""
    return made.get(f"{name}: what {stage} logged", "").startswith(TOLD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="what all draws follow from (0)")
    parser.add_argument("--kills", type=int, default=200, help="machines to kill at least (200)")
    parser.add_argument("--faults", type=int, default=1000, help="faults of the store at least (1000)")
    parser.add_argument("--systems", nargs="+", default=["dit", "latent", "prior"], choices=EXPERIMENTS)
    given = parser.parse_args()

    def is_enough(tally: Tally) -> bool:
        return tally.kills.total() >= given.kills

    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-machines-")))
        warm = stack.enter_context(Warm(work / "warm", ROOT / "src"))
        store = stack.enter_context(Bucket(work / "store"))
        soak = MachinesSoak(Machines(warm, work / "machines", given.systems), store, given.seed)
        print(f"Seed {given.seed}; an undisturbed command takes {soak.length_s:.0f} s", flush=True)
        number = 0
        try:
            while not is_enough(soak.tally) or sum_of_faults(soak.tally) < given.faults:
                soak.round(number, is_enough, RATE * (number % 2), HEALED if number % 4 == 1 else tuple(KINDS))
                number += 1
                print(f"\n{time.strftime('%H:%M:%S')}\n{soak.tally.table()}", flush=True)
        except WrongError as wrong:
            print(f"\n{soak.tally.table()}\n\n{wrong}\n\nAgain: make soak-machines SEED={given.seed}", flush=True)
            sys.exit(1)


def sum_of_faults(tally: Tally) -> int:
    """Return the number of faults of the store."""
    return tally.injected.total() - tally.injected["killed machine"]


if __name__ == "__main__":
    main()
