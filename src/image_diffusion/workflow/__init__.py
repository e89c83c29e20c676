"""Python of the rules when Snakemake starts. Nothing in this package imports torch, so that a dry run takes seconds."""
