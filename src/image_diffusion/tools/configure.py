"""Resolve experiment files into one configuration per stage, and a plan for Snakemake.

    python -m image_diffusion configure --experiments config/experiments/demo.yaml --results results

Writes results/<experiment>/config/<stage>.yaml, the configuration of the stages of a data set under
results/datasets/<dataset>/config, and results/<experiment>/config/plan.json. A file is written only when its content
changes, so a comment in an experiment file reruns nothing. Experiments that another one needs, for its codec, small
images or embeddings, are searched for in the same folder and configured as well. A study (--studies
config/studies/digits.yaml) becomes an experiment for each variant and seed, and results/studies/<study>/plan.json.
"""

from __future__ import annotations

from pathlib import Path

from image_diffusion.core.files.atomic import to_json, write_if_changed
from image_diffusion.core.process import command
from image_diffusion.core.process.errors import log_line
from image_diffusion.experiments.experiment import schema
from image_diffusion.experiments.resolve import load_all, replaced, write_stages
from image_diffusion.experiments.study import expand
from image_diffusion.experiments.study import schema as study_schema
from image_diffusion.workflow.plans import study_file


def main() -> None:
    parser = command.Parser(prog="image-diffusion configure", description=__doc__)
    parser.add_path("--experiments", "experiment files", nargs="*", default=[])
    parser.add_path("--studies", "study files", nargs="*", default=[])
    parser.add_path("--bases", "folder of the base experiments of studies", default=Path("config/experiments"))
    parser.add_path("--results", "folder of all results", default=Path("results"))
    parser.add_path("--schema", "write the JSON schemas of experiments and of studies")
    arguments = parser.parse_args()
    if arguments.schema is not None:
        write_if_changed(arguments.schema, to_json(schema()))
        write_if_changed(arguments.schema.with_name("study.schema.json"), to_json(study_schema()))
    studies = [expand(path, arguments.bases) for path in arguments.studies]
    every = load_all(arguments.experiments, studies)
    for sentence in replaced({name: experiment for name, (_, experiment) in every.items()}, arguments.results):
        log_line(f"warning: {sentence}")
    for name, (_, experiment) in every.items():
        write_stages(name, experiment, arguments.results)
    for study in studies:
        write_if_changed(study_file(arguments.results, study.name), to_json(study.plan()))
