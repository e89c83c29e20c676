"""Experiments become plans: `configure` is run when something has changed, and only then, since it imports torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from image_diffusion.core.files import digest, is_ahead, read_json, sha256_file, write_json
from image_diffusion.core.inherited import read_inherited
from image_diffusion.workflow.code import package_digest, stage_digests
from image_diffusion.workflow.environment import package_beside, with_package
from image_diffusion.workflow.ledgers import ledger_file
from image_diffusion.workflow.plans import Plans, plan_file
from image_diffusion.workflow.settings import check_settings

CONFIG = Path("config", "config.yaml")
EXPERIMENTS = Path("config", "experiments")
LEDGERS = Path("config", "ledgers")
NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]*")
"""What an experiment may be called."""


def wanted(config: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """What Snakemake is to make, as settings: the `experiments` that its command line names as targets, or else the
    ledgers of the setting `ledger`, or else the setting `experiments`. Each of these is a list of names or one name.

    arguments: of the command line; one that is the name of a file in config/experiments is a target.
    """
    named = [each for each in arguments if NAME.fullmatch(each) and (EXPERIMENTS / f"{each}.yaml").is_file()]
    listed, ledgers = _several(config.get("experiments")), _several(config.get("ledger"))
    if named or not ledgers:
        return {"experiments": list(dict.fromkeys(named)) or listed, "ledger": []}
    return {"experiments": [], "ledger": ledgers}


def _several(names: Any) -> Any:
    return [names] if isinstance(names, str) else names


def resolve(root: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Have the experiments checked and written out stage by stage; the digest of each stage's code.

    root: the folder of the workflow. config: its configuration. The experiments are files of the folder Snakemake runs
    in. What was found last time is kept in results/.resolved.json, with the sha256 of every file that was read and
    written: what has changed, is damaged or is missing is made anew. Raises ValueError for the first mistake.
    """
    results, source = Path(str(config.get("results", "results"))), package_beside(root)
    known = _read(results)
    plain = json.loads(json.dumps(config, default=str))  # YAML knows dates
    now: dict[str, Any] = {"config": digest(plain), "package": package_digest(source)}
    if known.get("config") != now["config"]:
        schema = json.loads((root / "workflow" / "schemas" / "config.schema.json").read_text())
        check_settings(config, schema, CONFIG, EXPERIMENTS, LEDGERS)
    same_package = known.get("package") == now["package"]
    now["code"] = known["code"] if same_package else stage_digests(source)
    now["experiments"], now["ledgers"] = config["experiments"], config.get("ledger") or []
    asked = [now["experiments"], now["ledgers"]]
    if same_package and [known["experiments"], known["ledgers"]] == asked and _intact(known["files"]):
        now["files"] = known["files"]
    else:
        experiments = [EXPERIMENTS / f"{name}.yaml" for name in now["experiments"]]
        configure(experiments, results, source, [LEDGERS / f"{name}.yaml" for name in now["ledgers"]])
        now["files"] = {str(path): sha256_file(path) for path in read_and_written(results, *asked)}
    if now != known:
        write_json(_cache(results), now)
    return dict(now["code"])


def resolved(results: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """What `resolve` found where Snakemake was started, and for which experiments and ledgers, as `wanted` has them:
    for a job on another machine."""
    known = read_json(_cache(results))
    return dict(known["code"]), {"experiments": list(known["experiments"]), "ledger": list(known["ledgers"])}


def configure(experiments: list[Path], results: Path, source: Path, ledgers: Sequence[Path] = ()) -> None:
    """Run `configure` of the package in a folder. Raises ValueError with what it says."""
    given = ["--experiments", *map(str, experiments), "--results", str(results)]
    given += ["--ledgers", *map(str, ledgers)]
    command = [sys.executable, "-m", "image_diffusion.configure", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=with_package(source))
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("error: "))


def read_and_written(results: Path, experiments: list[str], ledgers: list[str]) -> list[Path]:
    """The files that `configure` read and wrote: those of the experiments and of all that they build on."""
    known = Plans.read(results, experiments, ledgers)
    plans, runs = known.by_name, {run for ledger in known.ledgers.values() for run in ledger.runs}
    names = {*(plans.keys() - runs), *(name for ledger in known.ledgers.values() for name in ledger.experiments)}
    written = [read_inherited(EXPERIMENTS / f"{name}.yaml")[1] for name in names]
    found = {path for files in written for path in files} | {plan_file(results, name) for name in plans}
    found |= {LEDGERS / f"{name}.yaml" for name in ledgers}
    found |= {ledger_file(results, name) for name in known.ledgers}
    for plan in plans.values():
        points = {Path(path) for axis in plan.sweep.values() for path in axis.values()}
        found |= {*map(Path, plan.configs.values()), *map(Path, plan.references.values())}
        found |= {*points, *(path.with_name("evaluate.yaml") for path in points)}
    return sorted(found)


def _cache(results: Path) -> Path:
    return results / ".resolved.json"


def _read(results: Path) -> dict[str, Any]:
    """What was found last time; nothing where that cannot be read."""
    try:
        known = read_json(_cache(results))
    except ValueError:
        return {}
    complete = (
        isinstance(known, dict) and {"config", "package", "code", "experiments", "ledgers", "files"} <= known.keys()
    )
    return known if complete else {}


def _intact(files: Mapping[str, str]) -> bool:
    """Whether all files are as they were, and none is from the future: that would be newer than what is made of it."""
    paths = {Path(path): sha256 for path, sha256 in files.items()}
    return all(path.is_file() and not is_ahead(path) and sha256_file(path) == sha256 for path, sha256 in paths.items())
