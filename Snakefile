# The whole workflow, from images to a report: snakemake --cores all


include: "workflow/rules/workflow.smk"


rule all:
    "Every experiment that config.yaml names, to its page and into MLflow."
    input:
        files.everything,
