#!/usr/bin/env bash
# Snakemake runs this once in the new conda environment, at the repository's root.
python -m pip install --no-deps --no-build-isolation --editable .
