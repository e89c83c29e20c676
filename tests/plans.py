"""Plans as `configure` writes them, for tests of the rules."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import write_json
from image_diffusion.workflow.plans import PairPlan, Plan, Plans, plan_file

RESOURCES = {
    "nodes": 1,
    "processes_per_node": 1,
    "gpus_per_node": 0,
    "cpus_per_process": 2,
    "memory_mb": 8000,
    "runtime_min": 60,
    "hang_s": 600,
    "stage_to": "",
    "one_job": False,
}


def a_plan(name: str = "one", **changes: Any) -> Plan:
    """Return an experiment on the crops of a data set `dots-16`, with some changes."""
    plan: dict[str, Any] = {
        "experiment": name,
        "system": "dit",
        "dataset": "dots-16",
        "source": {"type": "folder", "path": "images"},
        "data_digest": "1",
        "has_images": True,
        "num_shards": 2,
        "makes_samples": True,
        "keeps_samples": True,
        "makes_embeddings": False,
        "sample_jobs": 1,
        "sample_batches": 8,
        "synthesize_jobs": 0,
        "global_batch": 8,
        "judged_on_encoded": False,
        "judged_on_pairs": False,
        "pairs_beside": False,
        "pairs": {},
        "detectors": ["inpipe"],
        "references": {"inpipe": "results/datasets/dots-16/config/reference-inpipe.yaml"},
        "headline": "inpipe_fd",
        "codec_files": [],
        "decoder_files": [],
        "weaker_files": [],
        "start_files": [],
        "detector_files": {},
        "pictures": [],
        "sweep": {},
        "choose": "",
        "beyond_defaults": [],
        "export": "none",
        "resources": RESOURCES,
        "configs": {stage: f"results/{name}/config/{stage}.yaml" for stage in ("train", "sample", "evaluate", "export")}
        | {"crop": "results/datasets/dots-16/config/crop.yaml"},
    }
    nothing = ["codec", "codec_experiment", "small_images", "small_images_experiment", "against", "against_experiment"]
    nothing += [
        "embeddings",
        "embeddings_experiment",
        "start_experiment",
        "tokens",
        "prompts",
        "synthesize_table",
    ]
    return Plan(**{**dict.fromkeys(nothing), **plan, **changes})


def a_set(**changes: Any) -> PairPlan:
    """Return one set of pairs, made from crops, with some changes."""
    pairs: PairPlan = {"of_images": True, "of_source": False, "of_detector": False, "files": None, "weights": None}
    return {**pairs, **changes}  # type: ignore[typeddict-item]


def plans_of(*plans: Plan) -> Plans:
    """Return the plans of several experiments."""
    return Plans({plan.experiment: plan for plan in plans})


def write_plans(results: Path, *plans: Plan) -> None:
    """Write plans to the files of `configure`."""
    for plan in plans:
        write_json(plan_file(results, plan.experiment), asdict(plan))
