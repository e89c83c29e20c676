"""Python code that runs when Snakemake starts. This package never imports torch, so a dry run takes seconds."""
