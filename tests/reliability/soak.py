"""Hours of faults without supervision: after each the same command runs again, and ends with the same bytes.

    python tests/reliability/soak.py --seed 1 --minutes 120      (make soak SEED=1 MINUTES=120)

In rounds, each with its own random draws: the configuration or the images are edited; files under `results` and
artifacts in `mlruns` are damaged, zeroed, emptied or removed, or the whole store is; a manifest names a file outside
its folder, as an attacker's would, and that file must stay untouched; the same command is started again and again while
its processes are killed or stopped for a while, the disk fills up or the clock is wrong. Then nothing disturbs any
more: the command ends well and all reproducible results are, byte for byte, those of an undisturbed run in a separate
folder, which is done once for each configuration.

A fault is *healed* if that holds without a message; *told* if an undisturbed command first ended with a clear line. It
is *silent* if a command ends well with other results: that stops the soak and keeps the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from soak_project import (
    EDITS,
    EXPERIMENTS,
    LOGGED,
    NEEDS,
    ROOT,
    TOLD,
    UNKNOWN,
    Choice,
    damaged_artifacts,
    found,
    remove,
    sent_files,
    write_project,
)

from image_diffusion.core.files.atomic import digest
from image_diffusion.workflow.code_digest import package_digest
from warm import CLOCK, Warm

MADE_BY = {
    "configure": ".resolved.json",
    "crop": "datasets/*/crops/manifest.json",
    "detect": "datasets/*/detector/detector.json",
    "reference": "datasets/*/references/*/reference.json",
    "encode": "datasets/*/*[er]/manifest.json",
    "embed": "datasets/*/pairs-*/manifest.json",
    "launch_agent": "*/train/model.json",
    "train": "*/train/weights.safetensors",
    "sample": "*/samples/samples.json",
    "evaluate": "*/metrics.json",
    "export": "*/diffusers/*.json",
    "track": "*/tracked.json",
    "report": "*/report/index.html",
    "summary": "summary.html",
}
"""Outputs of each stage, under results."""
STAGES = list(MADE_BY)
CALM = 3
"""Number of undisturbed commands within which a round must end well."""
LONGEST_S = 1200.0
STOP_S = 10.0
"""Mean seconds for which a process is stopped."""
STOPPED_S = 90.0
"""Longest time in seconds for which a process is stopped."""
PATIENCE_S = 60.0
"""Least time in seconds to wait for a wanted stage before killing any running one."""
PATIENCE = 1.5
"""The same as a multiple of the longest undisturbed command: the last stages come after all others."""
CLEAR = re.compile(r"^(\[default\d+\]:)?(error|stopped): |No space left on device", re.MULTILINE)
DAMAGE = {
    "flip": "flipped bit",
    "cut": "cut file",
    "removal": "removed file",
    "zeros": "zeroed file",
    "emptying": "emptied file",
}
CANARY = "this file is nobody's\n"
OUTPUTS = re.compile(r"/(samples|evaluation|diffusers)/")
"""Folders that contain only files that the configuration asks for."""


@dataclass
class Fault:
    """One fault. number: of the round. kind: of fault. where: the file or process, and details."""

    number: int
    kind: str
    where: str
    told: bool = False


@dataclass
class Tally:
    """Outcomes of the faults, by kind; and the number of kills of each stage."""

    injected: Counter[str] = field(default_factory=Counter)
    healed: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    commands: int = 0

    def table(self) -> str:
        lines = [f"{'Fault':<28}{'injected':>10}{'healed':>10}{'told':>10}{'silent':>10}"]
        for kind in sorted(self.injected):
            counts = (self.injected[kind], self.healed[kind], self.told[kind], self.silent[kind])
            lines.append(f"{kind:<28}" + "".join(f"{count:>10,}" for count in counts))
        sums = (sum(each.values()) for each in (self.injected, self.healed, self.told, self.silent))
        lines.append(f"{'all':<28}" + "".join(f"{count:>10,}" for count in sums))
        lines.append("")
        lines.append("Killed: " + ", ".join(f"{name} {self.kills[name]:,}" for name in ["snakemake", *STAGES]))
        lines.append(f"{self.rounds:,} rounds, {self.commands:,} commands")
        return "\n".join(lines)


class WrongError(Exception):
    """A violated guarantee."""


def listed(folder: Path, pattern: str) -> list[Path]:
    """Return the paths that match the pattern in the folder, sorted. Unlike pathlib's, the walk tolerates folders that
    are removed meanwhile, as processes that survived a kill may do."""
    found_here = glob(pattern, root_dir=folder, recursive=True, include_hidden=True)  # noqa: PTH207
    return sorted(folder / each for each in found_here)


def with_needed(names: list[str]) -> list[str]:
    """Return the experiments and those whose codecs they use."""
    return sorted({*names, *(each for name in names for each in NEEDS.get(name, []))})


class Soak:
    """The rounds of one seed."""

    def __init__(self, work: Path, warm: Warm, seed: int, names: list[str], stop_s: float = STOP_S) -> None:
        """names: the experiments to choose from. stop_s: the mean seconds for which a process is stopped."""
        self.work, self.warm, self.seed, self.names, self.stop_s = work, warm, seed, names, stop_s
        self.disk = Disk(work / "disk")
        self.project = self.disk.folder / "project"
        self.canary = self.disk.folder / "canary.txt"
        self.canary.write_text(CANARY)
        told = Path(__file__).with_name("soak_project.py").read_text()
        self.references = work / "references" / digest([package_digest(ROOT / "src"), told])[:12]
        self.tally = Tally()
        self.open: list[Fault] = []
        self.scarred: set[str] = set()
        """Experiments whose journal was damaged: this is told when their run resumes, rounds later."""
        self.without_receipts: set[str] = set()
        """Experiments whose receipts of the journal were damaged: the other record of its completeness."""
        self.lengths: dict[str, float] = {}
        """Running seconds by stage, as observed."""
        self.undisturbed_s = 0.0
        """Seconds of the longest undisturbed command."""
        self.log = (work / "faults.jsonl").open("a", buffering=1)
        self.choice = Choice(0, dict.fromkeys(with_needed(names), 0))

    # ---- References

    def expected(self, names: list[str]) -> dict[str, str]:
        """Return the results of an undisturbed run of the experiments and of those that they need."""
        kept = {name: self.references / f"{name} {self.choice.only(name)}.json" for name in with_needed(names)}
        if missing := [name for name, path in kept.items() if not path.exists()]:
            folder = self.disk.folder / "reference"
            remove(folder)
            write_project(folder, self.choice, missing)
            status, said = self.command(folder)
            if status != 0:
                raise WrongError(f"An undisturbed run of {missing} ({self.choice}) ended with {status}:\n{said}")
            self.references.mkdir(parents=True, exist_ok=True)
            for name in missing:
                kept[name].write_text(json.dumps(found(folder, name)))
        return {key: value for path in kept.values() for key, value in json.loads(path.read_text()).items()}

    # ---- Rounds

    def round(self, number: int, is_enough: Callable[[Tally], bool]) -> None:
        """Run one round, undisturbed from the moment at which it is enough. The same seed and number draw the same,
        independently of earlier rounds."""
        draw = random.Random(f"{self.seed} {number}")
        names = sorted(draw.sample(self.names, min(len(self.names), draw.choice([1, 2, 3, 4, 7]))))
        self._edit(draw, number, names)
        disturbed = draw.randint(4, 16)
        for turn in range(disturbed):
            if is_enough(self.tally):
                break
            if turn and draw.random() < 0.15:
                self._edit(draw, number, names)
            for _ in range(draw.choice([0, 0, 0, 1, 2, 4])):
                self._damage(draw, number, names)
            if draw.random() < 0.1:
                self._damage_artifact(draw, number, names)
            if draw.random() < 0.05:
                self._lose_store(draw, number, names)
            if draw.random() < 0.15:
                self._forge_name(draw, number, names)
            self._disturbed_command(draw, number, self._asked_for(draw, number))
        for _ in range(draw.choice([0, 1, 2, 4])):
            self._damage(draw, number, names)
        for _ in range(draw.choice([0, 0, 1, 3])):
            self._damage_artifact(draw, number, names)
        if draw.random() < 0.2:
            self._lose_store(draw, number, names)
        self._calm(number, names, self.expected(names))
        self.tally.rounds += 1

    def _calm(self, number: int, names: list[str], expected: dict[str, str]) -> None:
        """Run the same command until it ends well, and then compare the results."""
        for _ in range(CALM):
            status, said = self.command(self.project)
            if status == 0:
                break
            self._told(said)
        else:
            raise WrongError(f"Round {number}: the same command does not go on.\n{said[-4000:]}")
        self._check_canary()
        made = {key: value for name in with_needed(names) for key, value in found(self.project, name).items()}
        spoilt = [path for name in names for path in damaged_artifacts(self.project, name)]
        wrong = sorted(path for path, sha256 in expected.items() if made.get(path) != sha256)
        wrong = self._without_told(wrong, made, said)
        wrong += spoilt
        extra = sorted(path for path in made.keys() - expected.keys() if OUTPUTS.search(path))
        if wrong or extra:
            for fault in self.open:
                self.tally.silent[fault.kind] += 1
            told = "\n".join(f"  {fault.kind}: {fault.where}" for fault in self.open)
            raise WrongError(
                f"Round {number} ended well, with other results ({', '.join(names)}; {self.choice}):\n"
                f"differ: {wrong}\nof nobody: {extra}\nafter\n{told}\n{said[-3000:]}"
            )
        for fault in self.open:
            (self.tally.told if fault.told else self.tally.healed)[fault.kind] += 1
        self.open.clear()

    def set_aside(self, number: int) -> Path:
        """Move the project, with its undisturbed run, to another place, and begin from nothing."""
        kept = self.work / f"wrong-{self.seed}-{number}"
        remove(kept)
        self.disk.empty()
        for folder in (self.project, self.disk.folder / "reference"):
            if folder.exists():
                shutil.copytree(folder, kept / folder.name, symlinks=True)
        remove(self.project)
        self.open.clear()
        self.scarred.clear()
        self.without_receipts.clear()
        return kept

    def _without_told(self, wrong: list[str], made: dict[str, str], said: str) -> list[str]:
        """Return the wrong paths without those of experiments whose damaged journal or previews were reported: a user
        starts these anew."""
        for name in with_needed(self.names):
            journals = f"results/{name}/journal/", f"results/{name}/.journal/"
            hit = [fault for fault in self.open if fault.where.startswith(journals)]
            logged = [made.get(f"{name}: what {stage} logged", "") for stage in LOGGED]
            no_journal = name in self.without_receipts and any(
                each == "nothing" or each.startswith(UNKNOWN) for each in logged
            )
            told = any(made.get(f"{name}: what {stage} logged", "").startswith(TOLD) for stage in LOGGED)
            previews = f"results/{name}/train/previews/"
            listing = rf"{re.escape(previews)}\S+/listing\.json is damaged"
            if f"the previews in {previews}" in said or re.search(listing, said):
                drawn = [fault for fault in self.open if fault.where.startswith(previews)]
                hit, told = hit + drawn, told or bool(drawn)
                wrong = [path for path in wrong if not path.startswith(f"{name}/") or not drawn]
            if (hit or name in self.scarred) and (told or no_journal):
                wrong = [path for path in wrong if not path.startswith(f"{name}: ")]
                remove(self.project / "results" / name)
                self.scarred.discard(name)
                self.without_receipts.discard(name)
                for fault in hit:
                    fault.told = True
        return wrong

    def _told(self, said: str) -> None:
        """Check that an undisturbed command that failed ended with a clear message."""
        if not CLEAR.search(said):
            raise WrongError(f"No clear line:\n{said[-6000:]}")
        clear = next(line for line in said.splitlines() if CLEAR.search(line))
        self.note("told", clear)
        for fault in self.open:
            fault.told = True

    def _inject(self, number: int, kind: str, where: str) -> None:
        self.open.append(Fault(number, kind, where))
        if (parts := Path(where).parts)[2:3] in (("journal",), (".journal",)):
            self.scarred.add(parts[1])
            if parts[2] == ".journal":
                self.without_receipts.add(parts[1])
        self.tally.injected[kind] += 1
        self.note(kind, where, number)

    def note(self, kind: str, where: str, number: int | None = None) -> None:
        line = {"at": round(time.time(), 2), "seed": self.seed, "round": number, "kind": kind, "where": where}
        self.log.write(json.dumps(line) + "\n")

    # ---- Edits and damage

    def _edit(self, draw: random.Random, number: int, names: list[str]) -> None:
        """Change the configuration or the images, with some probability."""
        edits = dict(self.choice.edits)
        images = self.choice.images
        for name in with_needed(names):
            if draw.random() < 0.2:
                edits[name] = draw.randrange(len(EDITS))
        if draw.random() < 0.1:
            images = draw.randrange(4)
        changed = Choice(images, edits)
        what = [f"experiment {name}" for name in edits if edits[name] != self.choice.edits[name]]
        what += ["images"] * (images != self.choice.images)
        self.choice = changed
        write_project(self.project, changed, names)
        for each in what:
            self._inject(number, f"edit: {'images' if each == 'images' else 'configuration'}", f"{each}: {changed}")

    def _damage(self, draw: random.Random, number: int, names: list[str]) -> None:
        """Flip a bit of a file, cut, zero, empty or remove it; half of the time restore its modification time."""
        results = self.project / "results"
        used = {*with_needed(names), "datasets", "summary.html", ".resolved.json"}
        files = [path for path in listed(results, "**") if path.relative_to(results).parts[0] in used]
        files = [path for path in files if path.is_file()]
        if not files:
            return
        # A folder with many files is not hit more often than one with few.
        folder = draw.choice(sorted({path.parent for path in files}))
        path = draw.choice([each for each in files if each.parent == folder])
        with suppress(FileNotFoundError):  # removed by a process that survived a kill
            self._damage_file(draw, number, path)

    def _damage_artifact(self, draw: random.Random, number: int, names: list[str]) -> None:
        """Damage an artifact in MLflow of the made experiments."""
        files = sorted({path for name in names for path in sent_files(self.project, name) if path.is_file()})
        if files:
            with suppress(FileNotFoundError):
                self._damage_file(draw, number, draw.choice(files))

    def _forge_name(self, draw: random.Random, number: int, names: list[str]) -> None:
        """Replace in a JSON file the name of a file next to it by the canary, outside its folder."""
        results = self.project / "results"
        used = {*with_needed(names), "datasets"}
        manifests = [path for path in listed(results, "**/*.json") if path.relative_to(results).parts[0] in used]
        forged: list[tuple[Path, str, str]] = []
        for path in manifests:
            with suppress(OSError, ValueError):
                text = path.read_text()
                beside = [each.name for each in path.parent.iterdir() if f'"{each.name}"' in text]
                outside = [str(self.canary), os.path.relpath(self.canary, path.parent)]
                forged += [(path, name, draw.choice(outside)) for name in sorted(beside)]
        if not forged:
            return
        path, name, outside_name = draw.choice(forged)
        with suppress(FileNotFoundError):
            path.write_text(path.read_text().replace(f'"{name}"', json.dumps(outside_name)))
            self._inject(number, "forged name", f"{path.relative_to(self.project)}: {outside_name} in place of {name}")

    def _check_canary(self) -> None:
        if not self.canary.is_file() or self.canary.read_text() != CANARY:
            raise WrongError(f"{self.canary}, outside the project, was written to or removed.")

    def _lose_store(self, draw: random.Random, number: int, names: list[str]) -> None:
        """Remove MLflow's store, and half of the time damage a journal that must fill the new one."""
        if not (self.project / "mlflow.db").exists():
            return
        for each in ("mlflow.db", "mlruns"):
            remove(self.project / each)
        self._inject(number, "lost store", "mlflow.db")
        journals = [path for name in names for path in listed(self.project / "results" / name, "journal/*/*.jsonl")]
        if journals and draw.random() < 0.5:
            with suppress(FileNotFoundError):
                self._damage_file(draw, number, draw.choice(journals))

    def _damage_file(self, draw: random.Random, number: int, path: Path) -> None:
        before = path.stat()
        kind = draw.choice(["flip", "flip", "flip", "cut", "removal", "zeros", "emptying"])
        where = str(path.relative_to(self.project))
        if kind == "flip" and before.st_size:
            bit = draw.randrange(8 * before.st_size)
            with path.open("r+b") as file:
                file.seek(bit // 8)
                if not (byte := file.read(1)):  # shorter by now
                    return
                file.seek(bit // 8)
                file.write(bytes([byte[0] ^ (1 << bit % 8)]))
            where += f", bit {bit} of {8 * before.st_size}"
        elif kind == "cut" and before.st_size:
            os.truncate(path, size := draw.randrange(before.st_size))
            where += f", to {size} of {before.st_size} bytes"
        elif kind in ("zeros", "emptying") and before.st_size:  # as a power cut leaves data that was not flushed
            path.write_bytes(bytes(before.st_size if kind == "zeros" else 0))
        else:
            kind = "removal"
            path.unlink()
        if path.exists() and draw.random() < 0.5:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            where += ", as if untouched"
        self._inject(number, DAMAGE[kind], where)

    def _asked_for(self, draw: random.Random, number: int) -> list[str]:
        """Remove outputs of some of the least killed stages, so that they will run. Return these stages."""
        asked = []
        for stage in sorted(MADE_BY, key=lambda name: self.tally.kills[name])[: draw.randint(1, 3)]:
            if files := listed(self.project / "results", MADE_BY[stage]):
                path = draw.choice(files)
                path.unlink(missing_ok=True)
                self._inject(number, "removed file", str(path.relative_to(self.project)))
                asked.append(stage)
        return asked

    # ---- Commands

    def command(self, folder: Path) -> tuple[int, str]:
        """Run the command undisturbed. Return its status and its output."""
        began_at = time.monotonic()
        with self._started(folder, {}) as (running, output):
            self._watch(running)
        self.undisturbed_s = max(self.undisturbed_s, time.monotonic() - began_at)
        return running.returncode, output.read_text(errors="replace")

    @contextmanager
    def _started(self, folder: Path, settings: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        self.tally.commands += 1
        output = self.work / "said.txt"
        line = [str(self.warm.python), "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "1"]
        outside = ("SNAKEMAKE_", "SLURM_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
        environment |= {"OMP_NUM_THREADS": "1", **settings}
        with output.open("wb") as log:
            running = subprocess.Popen(
                [*line, "--keep-going"],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
            try:
                yield running, output
            finally:
                if running.poll() is None:
                    os.killpg(running.pid, signal.SIGKILL)
                    running.wait()

    def _watch(self, running: subprocess.Popen[bytes]) -> None:
        """Wait for the end, and record how long stages take."""
        began: dict[tuple[int, str], float] = {}
        until = time.monotonic() + LONGEST_S
        while running.poll() is None:
            self._seen(began)
            if time.monotonic() > until:
                raise WrongError(f"A command runs for more than {LONGEST_S:.0f} s.")
            time.sleep(0.03)

    def _seen(self, began: dict[tuple[int, str], float]) -> list[tuple[int, str]]:
        """Return the running processes; record the durations of those that have ended."""
        now, present = time.monotonic(), self.warm.running()
        for each in present:
            began.setdefault(each, now)
        for gone in began.keys() - {*present}:
            length = now - began.pop(gone)
            self.lengths[gone[1]] = 0.7 * self.lengths.get(gone[1], length) + 0.3 * length
        return present

    def _stop(self, draw: random.Random, number: int, pid: int, name: str, began: dict[tuple[int, str], float]) -> None:
        """Stop a process for a while, as a laptop's lid, a debugger or a starved machine does, and continue it. began:
        start of each process, moved by this time, so that the durations of stages exclude the stop."""
        seconds = min(draw.expovariate(1 / self.stop_s), STOPPED_S)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._inject(number, "stopped process", f"{name}, {seconds:.1f} s")
            try:
                time.sleep(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
            for each in began:
                began[each] += seconds

    def _disturbed_command(self, draw: random.Random, number: int, wanted: list[str]) -> None:
        """Run the same command while faults hit it and its processes. wanted: the stages to kill first."""
        settings: dict[str, str] = {}
        shift = draw.choice([-86400, -3600, -30, 30, 3600, 86400]) if draw.random() < 0.1 else 0
        if shift:
            settings[CLOCK] = str(shift)
            self._inject(number, "clock jump", f"{shift} s")
        full = draw.random() < 0.1 and self.disk.fill(draw.randint(0, 600_000))
        if full:
            self._inject(number, "full disk", f"{self.disk.free()} bytes left")
        began_at = time.time()
        with self._started(self.project, settings) as (running, output):
            self._strike(draw, number, running, wanted)
        self.disk.empty()
        if "No space left" in output.read_text(errors="replace"):
            for fault in self.open:
                fault.told = fault.told or fault.kind in ("full disk", "small disk in a stage")
        if shift:
            _shift_times(self.project, began_at, shift)

    def _strike(self, draw: random.Random, number: int, running: subprocess.Popen[bytes], wanted: list[str]) -> None:
        """Kill at random moments: all processes, Snakemake alone, a stage, a rank; first the wanted stages."""
        began: dict[tuple[int, str], float] = {}
        patience, patience_s = draw.randint(1, 12), max(PATIENCE_S, PATIENCE * self.undisturbed_s)
        while running.poll() is None and patience:
            # A moment of a wanted stage, or of any running one after a while.
            until, seen = time.monotonic() + (patience_s if wanted else draw.expovariate(2)), list[str]()
            while running.poll() is None and time.monotonic() < until and not seen:
                time.sleep(0.01)
                seen = [name for _, name in self._seen(began) if name in wanted]
            aim = seen[0] if seen else next((name for _, name in reversed(self._seen(began)) if name in STAGES), None)
            if aim is None and draw.random() < 0.97:  # there is more to kill when a stage has begun
                continue
            time.sleep(draw.random() ** 2 * self.lengths.get(aim or "", 0.5))
            wanted = [name for name in wanted if name != aim]
            present = [each for each in self.warm.running() if each[1] != "follow"]
            victims = [each for each in present if aim is None or each[1] == aim]
            if not victims or running.poll() is not None:
                continue
            patience -= 1
            pid, name = draw.choice(victims)
            kind = draw.choices(["a process", "group", "Snakemake", "stopped", "small disk"], [8, 1, 1, 1, 1])[0]
            if kind == "small disk":
                if self.disk.fill(draw.randint(0, 200_000)):
                    self._inject(number, "small disk in a stage", f"{name}, {self.disk.free()} bytes left")
                continue
            if kind == "stopped":
                self._stop(draw, number, pid, name, began)
                continue
            with suppress(ProcessLookupError):
                if kind == "group":
                    os.killpg(running.pid, signal.SIGKILL)
                elif kind == "Snakemake" or name == "snakemake":
                    kind, snakes = "Snakemake", [each for each, called in present if called == "snakemake"]
                    os.kill(snakes[0] if snakes else running.pid, signal.SIGKILL)
                else:
                    kind = "a rank" if name == "train" else "a stage"
                    os.kill(pid, signal.SIGKILL)
                self.tally.kills["snakemake" if kind == "Snakemake" else name] += 1
                self._inject(number, f"kill: {kind}", name)
            if kind in ("group", "Snakemake"):
                with suppress(subprocess.TimeoutExpired):
                    running.wait(5)
                if draw.random() < 0.5:
                    time.sleep(draw.uniform(0, 0.5))
                return
        self._watch(running)


class Disk:
    """A file system in memory, which can be full. Without permission to mount, it is a plain folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._is_mounted = self._mount("mount", "-t", "tmpfs", "-o", "size=2g", "soak", str(folder))

    def fill(self, left: int) -> bool:
        """Leave this many bytes free. Return whether that was possible."""
        if not self._is_mounted:
            return False
        usage = shutil.disk_usage(self.folder)
        return self._mount("mount", "-o", f"remount,size={usage.used + left}", str(self.folder))

    def empty(self) -> None:
        self._mount("mount", "-o", "remount,size=2g", str(self.folder))

    def free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def close(self) -> None:
        if self._is_mounted:
            self._mount("umount", str(self.folder))

    @staticmethod
    def _mount(*command: str) -> bool:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _shift_times(folder: Path, since: float, by_s: float) -> None:
    """Shift the times of files written since then, as a wrong clock would."""
    for path in listed(folder, "**"):
        with suppress(OSError):
            stat = path.lstat()
            if (
                stat.st_mtime >= since
                and not path.is_symlink()
                and "images" not in path.parts
                and path.parts[-2] != "config"
            ):
                os.utime(path, (stat.st_atime, stat.st_mtime + by_s))


def tell(text: str) -> None:
    print(text, flush=True)


def soak(
    work: Path,
    warm: Warm,
    seed: int,
    names: list[str],
    is_enough: Callable[[Tally], bool],
    stop_s: float = STOP_S,
    keeps_going: bool = False,
) -> Tally:
    """Run rounds until it is enough. A silent fault or an unclear message raises WrongError and is kept; with
    keeps_going it is set aside, and the next round begins from nothing."""
    subprocess.run(["umount", str(work / "disk")], capture_output=True, check=False)  # of a killed run
    for each in ("disk", "faults.jsonl"):
        remove(work / each)
    work.mkdir(parents=True, exist_ok=True)
    tell(f"Seed {seed}, in {work}; every fault is in {work / 'faults.jsonl'}")
    run = Soak(work, warm, seed, names, stop_s)
    number = 0
    try:
        while not is_enough(run.tally):
            try:
                run.round(number, is_enough)
            except WrongError as wrong:
                kept = run.set_aside(number)
                tell(f"\n{run.tally.table()}\n\n{wrong}\n\nKept: {kept}. Again: make soak SEED={seed}")
                if not keeps_going:
                    raise
            number += 1
            if number % 10 == 0:
                tell(f"\n{time.strftime('%H:%M:%S')}\n{run.tally.table()}")
    finally:
        warm.end_all()
        run.disk.close()
    tell(f"\n{run.tally.table()}")
    return run.tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="what all draws follow from (0)")
    parser.add_argument("--minutes", type=float, default=120, help="start no round after so long (120)")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir(), "soak"),
        help="a folder to work in; references of this code stay",
    )
    parser.add_argument("--systems", nargs="+", default=list(EXPERIMENTS), choices=EXPERIMENTS, help="some of them")
    parser.add_argument("--keep-going", action="store_true", help="set aside what is wrong, and go on from nothing")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    try:
        work, go_on = arguments.work.resolve(), arguments.keep_going
        with Warm(work / "warm", ROOT / "src") as warm:
            soak(work, warm, arguments.seed, arguments.systems, lambda _: time.monotonic() > until, keeps_going=go_on)
    except WrongError:
        sys.exit(1)


if __name__ == "__main__":
    main()
