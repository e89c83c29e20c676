"""The settings of the workflow: config/config.yaml and what the command line added. A mistake is told in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from image_diffusion.core.config import read_yaml
from image_diffusion.core.mistakes import nearest


def check_settings(
    settings: Mapping[str, Any], schema: Mapping[str, Any], file: Path, experiments: Path, ledgers: Path
) -> None:
    """Raise ValueError for the first thing that cannot work.

    settings: as Snakemake has them. schema: JSON Schema of them. file: where they were written, for what a reader of
    the data alone cannot see: keys that stand twice. experiments, ledgers: the folders of what they name.
    """
    import jsonschema  # a tenth of a second: not for those whose settings have been checked

    if file.is_file():
        read_yaml(file)
    for problem in jsonschema.Draft202012Validator(schema).iter_errors(settings):
        raise ValueError(f"{file}: {_sentence(problem)}")
    asked = {experiments: settings["experiments"], ledgers: settings.get("ledger") or []}
    if not any(asked.values()):
        raise ValueError(f"{file}: experiments: [] should be non-empty.")
    for folder, names in asked.items():
        there = sorted(path.stem for path in folder.glob("*.yaml"))
        for name in names:
            if name not in there:
                close = nearest(name, there)
                advice = f" Did you mean {close}?" if close else ""
                known = f" Known: {', '.join(there)}." if there else ""
                raise ValueError(f"{folder / name}.yaml does not exist.{advice}{known}")


def _sentence(problem: Any) -> str:
    key, value = ".".join(map(str, problem.absolute_path)), problem.instance
    match problem.validator:
        case "additionalProperties":
            known = sorted(problem.schema["properties"])
            name = next(each for each in value if each not in known)
            close, prefix = nearest(name, known), f"{key}." if key else ""
            advice = f"Did you mean {prefix}{close}?" if close else f"Known: {', '.join(known)}."
            return f"{prefix}{name} is not a known key. {advice}"
        case _:
            return f"{key}: {problem.message}." if key else f"{problem.message}."
