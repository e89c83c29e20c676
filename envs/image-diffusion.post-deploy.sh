#!/usr/bin/env bash
# Snakemake runs this once in the new conda environment. The workflow is where `logged` is found, wherever Snakemake runs: in
# a clone, which is installed; or in an installed package, to which this environment gets links.
root=$(cd -- "$(dirname -- "$(command -v logged)")/../.." && pwd)
if [[ $root == */image_diffusion/project ]]; then
    package=${root%/project}
    ln -sfn "$package" "$package"-*.dist-info "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/"
else
    python -m pip install --no-deps --no-build-isolation --editable "$root"
fi
