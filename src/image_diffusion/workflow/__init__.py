"""What the rules know when Snakemake starts. Nothing here imports torch, so that a dry run takes seconds."""
