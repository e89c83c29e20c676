# The whole workflow, from images to a report: snakemake --cores all


configfile: "config/config.yaml"


include: "workflow/rules/start.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/detector.smk"
include: "workflow/rules/embed.smk"
include: "workflow/rules/doctor.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/sample.smk"
include: "workflow/rules/checkpoint.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/sweep.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/track.smk"
include: "workflow/rules/follow.smk"
include: "workflow/rules/report.smk"


rule all:
    input:
        files.everything,
