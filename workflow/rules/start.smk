# What happens when Snakemake starts: the experiments become plans, and the rules get to know which files they name.
import sys
from pathlib import Path

# The folder of the workflow: that of this file, wherever Snakemake was started and whoever uses the rules.
root = Path(workflow.current_basedir.get_path_or_uri(secret_free=False)).parents[1]
source = root.parents[1] if root.parts[-2:] == ("image_diffusion", "project") else root / "src"
if not (source / "image_diffusion").is_dir():
    raise SystemExit(f"error: There are rules in {root}, but no package. Clone the repository, and name its Snakefile.")
sys.path.insert(0, str(source))


from image_diffusion.workflow.damage import Damage
from image_diffusion.workflow.start import take_over
from image_diffusion.workflow.start import count_damaged_as_unfinished
from image_diffusion.workflow.start import start
from image_diffusion.workflow import terminal

# One Snakemake at a time in a folder. A workflow that uses this one as a module keeps its own ways.
is_head = workflow.modifier.is_main_snakefile() and not workflow.remote_exec
if is_head:
    owner = take_over(Path())
terminal.configure_output(workflow.output_settings if is_head else None)
context = start(
    root,
    config,
    queued=workflow.resource_settings.nodes is not None,
    remote=workflow.remote_exec,
    is_head=is_head and owner.is_ours and not workflow.output_settings.dryrun,
    holds=is_head,
    beside=is_head and not owner.is_ours,
    provider=workflow.storage_settings.default_storage_provider,
    moved=workflow.modifier.path_modifier.replace_prefix,
    arguments=sys.argv[1:] if workflow.modifier.is_main_snakefile() else [],
    cores=workflow.global_resources["_cores"].value or 1,
    limit=getattr(workflow.global_resources.get("devices"), "value", None),
    executor=lambda: workflow.executor_plugin.name if workflow.executor_plugin else "local",
)
if is_head:
    count_damaged_as_unfinished(Damage(config["tracking"]["uri"]).among)
results, plans, machine, code = context.results, context.plans, context.machine, context.code
terminal.name_runs(plans.studies.values())
files, parts = context.files, context.parts
if machine.devices:
    workflow.register_resource("devices", machine.at_once)


def shown(path, caption, category, **labels):
    """Have a result appear in Snakemake's report. caption: a file of workflow/report. Pictures are an experiment's."""
    labels = {"experiment": "{experiment}"} | labels if "picture" in labels else labels
    return report(path, caption=f"../report/{caption}.rst", category=category, labels=labels)


wildcard_constraints:
    **{name: plans.pattern(name) for name in ("experiment", "dataset", "codec", "pairs", "judge", "study")},
    axis=r"\w+",
    value=r"[^/]+",
    step=r"\d+|latest",
    part=r"\d+",
    parts=r"\d+",
