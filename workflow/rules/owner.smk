# One Snakemake at a time in a folder, and the same command goes on after any death of the one before. A workflow that
# uses this one as a module keeps its own ways.
from pathlib import Path

from image_diffusion.workflow.healing import Damage
from image_diffusion.workflow.incomplete import make_unfinished_again
from image_diffusion.workflow.ownership import take_over

if workflow.modifier.is_main_snakefile():
    if workflow.remote_exec:
        make_unfinished_again(None)
    else:
        owner = take_over(Path())
        make_unfinished_again(Damage(config["tracking"]["uri"]).among)
