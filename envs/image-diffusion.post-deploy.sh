#!/usr/bin/env bash
# Snakemake runs this once in the new conda environment. The repository is where `logged` is found, wherever Snakemake runs.
root=$(dirname -- "$(command -v logged)")/../..
python -m pip install --no-deps --no-build-isolation --editable "$root"
