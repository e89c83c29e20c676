# What happens when Snakemake starts: the experiments become plans, and the rules get to know which files they name.
import sys
from pathlib import Path

# The folder of the workflow: that of this file, wherever Snakemake was started and whoever uses the rules.
root = Path(workflow.current_basedir.get_path_or_uri(secret_free=False)).parents[1]
source = root.parents[1] if root.parts[-2:] == ("image_diffusion", "project") else root / "src"
if not (source / "image_diffusion").is_dir():
    raise SystemExit(f"error: There are rules in {root}, but no package. Clone the repository, and name its Snakefile.")
sys.path.insert(0, str(source))


include: "owner.smk"


from image_diffusion.workflow.attempts import send_again_if_it_helps
from image_diffusion.workflow.incomplete import count_no_parts
from image_diffusion.workflow.start import start

limit = workflow.global_resources.get("devices")
known = start(
    root,
    config,
    queued=workflow.resource_settings.nodes is not None,
    remote=workflow.remote_exec,
    moved=workflow.modifier.path_modifier.replace_prefix,
    arguments=sys.argv[1:] if workflow.modifier.is_main_snakefile() else [],
    cores=workflow.global_resources["_cores"].value or 1,
    limit=limit.value if limit else None,
)
results, plans, files, machine, code = known.results, known.plans, known.files, known.machine, known.code
count_no_parts()
if machine.devices:
    workflow.register_resource("devices", machine.at_once)
if machine.queued and not machine.remote and workflow.modifier.is_main_snakefile():
    send_again_if_it_helps(machine)


wildcard_constraints:
    experiment=plans.pattern("experiment"),
    dataset=plans.pattern("dataset"),
    codec=plans.pattern("codec"),
    pairs=plans.pattern("pairs"),
    judge=plans.pattern("judge"),
    ledger=plans.pattern("ledger"),
    axis=r"\w+",
    value=r"[^/]+",
    step=r"\d+|latest",
    part=r"\d+",
    parts=r"\d+",
