"""Check the settings of the workflow and resolve experiments to plans. `configure`, which imports torch, runs only if
something has changed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from image_diffusion.core.config.base import read_inherited, read_yaml
from image_diffusion.core.config.errors import nearest
from image_diffusion.core.files.atomic import code_below, digest, is_in_future, read_json, sha256_file, write_json
from image_diffusion.workflow.code_digest import package_digest, scripts_digest, stage_digests
from image_diffusion.workflow.environment import package_beside, with_package
from image_diffusion.workflow.plans import Plans, plan_file, study_file

RENAMED = {
    "ledger": "ledger is called study now. Move config/ledgers to config/studies, call the rows of its files variants, "
    "and start snakemake --config study=NAME."
}
"""Messages on settings of earlier versions."""


def check_settings(
    settings: Mapping[str, Any], schema: Mapping[str, Any], file: Path, experiments: Path, studies: Path
) -> None:
    """Raise ValueError for the first invalid setting.

    settings: as read by Snakemake. schema: their JSON Schema. file: their file, which is checked for duplicate keys.
    experiments, studies: the folders of the named experiments and studies.
    """
    import jsonschema  # takes a tenth of a second, so only for unchecked settings

    if file.is_file():
        read_yaml(file)
    for problem in jsonschema.Draft202012Validator(schema).iter_errors(settings):
        raise ValueError(f"{file}: {_sentence(problem)}")
    requested = {experiments: settings["experiments"], studies: settings.get("study") or []}
    if not any(requested.values()):
        raise ValueError(f"{file}: experiments: [] should be non-empty.")
    for folder, names in requested.items():
        existing = sorted(path.stem for path in folder.glob("*.yaml"))
        for name in names:
            if name not in existing:
                close = nearest(name, existing)
                advice = f" Did you mean {close}?" if close else ""
                alternatives = f" Known: {', '.join(existing)}." if existing else ""
                raise ValueError(f"{folder / name}.yaml does not exist.{advice}{alternatives}")


def _sentence(problem: Any) -> str:
    key, value = ".".join(map(str, problem.absolute_path)), problem.instance
    match problem.validator:
        case "additionalProperties":
            keys = sorted(problem.schema["properties"])
            name = next(name for name in value if name not in keys)
            if name in RENAMED:
                return RENAMED[name]
            close, prefix = nearest(name, keys), f"{key}." if key else ""
            advice = f"Did you mean {prefix}{close}?" if close else f"Known: {', '.join(keys)}."
            return f"{prefix}{name} is not a known key. {advice}"
        case "pattern" | "maxLength" if "description" in problem.schema:
            return f"{key}: '{value}' is not valid. {problem.schema['description']}"
        case _:
            return f"{key}: {problem.message}." if key else f"{problem.message}."


CONFIG = Path("config", "config.yaml")
EXPERIMENTS = Path("config", "experiments")
STUDIES = Path("config", "studies")
NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Pattern of valid experiment names."""


def requested(config: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the experiments and studies to make, as settings: the experiments that are targets on the command line, or
    else the studies of the setting `study`, or else the setting `experiments`. Both settings are a list of names or one
    name. Experiments with a result file on the command line are added.

    arguments: of the command line; the name of a file in config/experiments is a target.
    """
    named = list(dict.fromkeys(filter(_is_experiment, arguments)))
    listed, studies = _several(config.get("experiments")), _several(config.get("study"))
    names = named or ([] if studies else listed)
    if isinstance(names, list):
        names = names + [name for name in _with_files(arguments, config) if name not in names]
    return {"experiments": names, "study": [] if named or not studies else studies}


def _with_files(arguments: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """Return the experiments with a result file among the arguments."""
    results = Path(str(config.get("results", "results")))
    paths = [path.relative_to(results).parts for path in map(Path, arguments) if path.is_relative_to(results)]
    return list(dict.fromkeys(path[0] for path in paths if len(path) > 1 and _is_experiment(path[0])))


def _is_experiment(name: str) -> bool:
    return NAME.fullmatch(name) is not None and (EXPERIMENTS / f"{name}.yaml").is_file()


def _several(names: Any) -> Any:
    return [names] if isinstance(names, str) else names


def resolve(root: Path, config: Mapping[str, Any], beside: bool = False) -> dict[str, str]:
    """Check experiments and write the configuration of each stage; return the digest of the code of each stage and of
    the pages.

    root: the folder of the workflow. config: its configuration. Experiments are files in the working directory of
    Snakemake. beside: True if another Snakemake runs there, for a warning if the files that it reads have changed. The
    result is cached in results/.resolved.json, with the sha256 of every file that was read and written, and computed
    again if any of them has changed, is damaged or is missing. Raises ValueError for the first mistake.
    """
    results, source = Path(str(config.get("results", "results"))), package_beside(root)
    cached = _read(results)
    plain = json.loads(json.dumps(config, default=str))  # YAML has dates
    scripts = root / "workflow" / "scripts"
    current: dict[str, Any] = {
        "config": digest(plain),
        "package": digest([package_digest(source), code_below(scripts)]),
    }
    if cached.get("config") != current["config"]:
        schema = json.loads((root / "workflow" / "schemas" / "config.schema.json").read_text())
        check_settings(config, schema, CONFIG, EXPERIMENTS, STUDIES)
    same_package = cached.get("package") == current["package"]
    if same_package:
        current["code"] = cached["code"]
    else:
        current["code"] = {**stage_digests(source), "pages": scripts_digest(scripts, source)}
    current["experiments"], current["studies"] = config["experiments"], config.get("study") or []
    targets = [current["experiments"], current["studies"]]
    if same_package and [cached["experiments"], cached["studies"]] == targets and _intact(cached["files"], results):
        current["files"] = cached["files"]
    else:
        experiments = [EXPERIMENTS / f"{name}.yaml" for name in current["experiments"]]
        configure(experiments, results, source, [STUDIES / f"{name}.yaml" for name in current["studies"]])
        current["files"] = {str(path): sha256_file(path) for path in read_and_written(results, *targets)}
    before = cached.get("files", {})
    if beside and any(before.get(path, sha256) != sha256 for path, sha256 in current["files"].items()):
        print(
            "warning: Another Snakemake works in this folder, and its next stages read the configuration that has "
            "just changed.",
            file=sys.stderr,
        )
    if current != cached:
        write_json(_cache(results), current)
    return dict(current["code"])


def resolved(results: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the cached result of `resolve` and the requested experiments and studies (see `requested`), for a job on
    another machine."""
    cached = read_json(_cache(results))
    return dict(cached["code"]), {"experiments": list(cached["experiments"]), "study": list(cached["studies"])}


def configure(experiments: list[Path], results: Path, source: Path, studies: Sequence[Path] = ()) -> None:
    """Run `configure` of the package in the folder `source`. Raises ValueError with its error message."""
    arguments = ["--experiments", *map(str, experiments), "--results", str(results)]
    arguments += ["--studies", *map(str, studies)]
    command = [sys.executable, "-m", "image_diffusion", "configure", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=with_package(source))
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("error: "))
    for line in done.stderr.splitlines():
        if line.startswith("warning: "):
            print(line, file=sys.stderr, flush=True)


def read_and_written(results: Path, experiments: list[str], studies: list[str]) -> list[Path]:
    """Return the files that `configure` read and wrote: those of the experiments and of their dependencies, and the
    tables of prompts and of synthetic images."""
    loaded = Plans.read(results, experiments, studies)
    plans, runs = loaded.by_name, {run for study in loaded.studies.values() for run in study.runs}
    names = {*(plans.keys() - runs), *(name for study in loaded.studies.values() for name in study.experiments)}
    written = [read_inherited(EXPERIMENTS / f"{name}.yaml")[1] for name in names]
    paths = {path for files in written for path in files} | {plan_file(results, name) for name in plans}
    paths |= {STUDIES / f"{name}.yaml" for name in studies}
    paths |= {study_file(results, name) for name in loaded.studies}
    for plan in plans.values():
        points = {Path(path) for axis in plan.sweep.values() for path in axis.values()}
        paths |= {*map(Path, plan.configs.values()), *map(Path, plan.references.values())}
        paths |= {*points, *(path.with_name("evaluate.yaml") for path in points)}
        tables = (Path(table) for table in (plan.prompts, plan.synthesize_table) if table)
        paths |= {table for table in tables if table.is_file()}
    return sorted(paths)


def _cache(results: Path) -> Path:
    return results / ".resolved.json"


def _read(results: Path) -> dict[str, Any]:
    """Read the cached result; empty if it cannot be read."""
    try:
        cached = read_json(_cache(results))
    except ValueError:
        return {}
    complete = (
        isinstance(cached, dict) and {"config", "package", "code", "experiments", "studies", "files"} <= cached.keys()
    )
    return cached if complete else {}


def _intact(files: Mapping[str, str], results: Path) -> bool:
    """Return True if all files are unchanged and no written file is from the future, which would make it newer than the
    results made from it."""
    paths = {Path(path): sha256 for path, sha256 in files.items()}
    written = (path for path in paths if path.is_relative_to(results))
    unchanged = all(path.is_file() and sha256_file(path) == sha256 for path, sha256 in paths.items())
    return unchanged and not any(map(is_in_future, written))
