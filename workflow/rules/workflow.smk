# All rules but the first. (Snakemake takes no default target from what is included, so both Snakefiles have `all`.)
from snakemake.utils import min_version

min_version("9.20.0")


report: "../report/workflow.rst"


configfile: "config/config.yaml"


for name in (
    *("start", "data", "detector", "reference", "embed", "doctor", "train", "sample", "evaluate", "sweep"),
    *("synthesize", "checkpoint", "export", "track", "follow", "report", "study", "crate"),
):

    include: f"{name}.smk"


# `snakemake NAME` makes an experiment, whatever config.yaml lists. One that is called like a rule needs --config.
for target in plans.requested:
    if target not in {"all", *(known_rule.name for known_rule in workflow.rules)}:

        rule:
            name:
                target
            input:
                f"{results}/summary.html",
                list(files.experiment_targets(target)),
