"""Which data sets' files have changed: looked at whenever Snakemake starts, and noted where `crop` reads it."""

from __future__ import annotations

from pathlib import Path

from image_diffusion.core.config import parse
from image_diffusion.core.files import read_json
from image_diffusion.data.source import refresh
from image_diffusion.data.sources import Source
from image_diffusion.workflow.plans import Plans


def look_at_sources(plans: Plans, results: Path, trust_ctime: bool) -> None:
    """Note which data sets' files have changed. trust_ctime: see `refresh`. Raises ValueError for a data set that is
    missing, empty, or too small."""
    for dataset, plan in plans.datasets.items():
        refresh(parse(Source, plan.source, dataset), source_file(results, dataset), trust_ctime)
    for name, plan in plans.by_name.items():
        files = read_json(source_file(results, plan.dataset))["files"]
        if plan.source["type"] == "folder" and files < plan.global_batch:
            raise ValueError(
                f"config/experiments/{name}.yaml: {plan.source['path']} holds {files} files, fewer than one batch of "
                f"train.global_batch = {plan.global_batch}. Add images, or make the batch smaller."
            )


def source_file(results: Path, dataset: str) -> Path:
    """Where the state of a data set's files is noted."""
    return results / "datasets" / dataset / "source.json"
