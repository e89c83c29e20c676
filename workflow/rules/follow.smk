# What stages log goes to MLflow while they run, and a table of what was made ends it all. Snakemake calls these for the
# workflow it is started with, not for its modules: as a module, the runs are in MLflow when their experiment has ended.
import sys
from pathlib import Path

from image_diffusion.workflow.environment import package_beside
from image_diffusion.workflow.following import Following
from image_diffusion.workflow.outcome import outcome
from image_diffusion.workflow.ownership import hold
from image_diffusion.workflow.queue import tell_of_unseen_jobs

following = Following(config["tracking"], package_beside(root), results, plans.by_name)
held = []


onstart:
    held.append(hold(Path(results)))
    following.start()


onsuccess:
    following.end()
    print(outcome(plans, Path(results)), file=sys.stderr)


# Snakemake knows one block of each kind.
onerror:
    following.end()
    tell_of_unseen_jobs(log)
