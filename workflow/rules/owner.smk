# One Snakemake at a time in a folder, and the same command goes on after any death of the one before. A workflow that
# uses this one as a module keeps its own ways.
from pathlib import Path

from snakemake.persistence import PersistenceBase
from snakemake.settings.types import DAGSettings

from image_diffusion.workflow.healing import Damage
from image_diffusion.workflow.ownership import take_over

if workflow.modifier.is_main_snakefile():
    if not workflow.remote_exec:
        owner = take_over(Path())

        # What is no longer what a stage wrote counts as what a killed stage was making.
        damage, unfinished = Damage(config["tracking"]["uri"]), PersistenceBase.incomplete

        async def unfinished_or_damaged(self, job):
            return list(job.output) if damage.among(job.output) else await unfinished(self, job)

        PersistenceBase.incomplete = unfinished_or_damaged

    # What a killed stage was making is made again, as with --rerun-incomplete: every command goes on from its own state
    # and writes whole files. Snakemake takes this from the command line only, and after it has read the rules.
    DAGSettings.force_incomplete = property(lambda settings: True, lambda settings, value: None)
