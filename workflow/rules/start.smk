# What happens when Snakemake starts: the experiments become plans. Nothing here imports torch, so that a dry run takes
# seconds.
import json
import os
import re
import subprocess
import sys
from pathlib import Path

root = Path(workflow.basedir)
source = root / "src"
experiments = Path("config", "experiments")
results = config.get("results", "results")

# Stages run the Python that runs Snakemake, and find `logged`; an activated conda environment still goes before it.
found_first = [Path(sys.executable).parent, root / "workflow" / "scripts"]
os.environ.update(PATH=os.pathsep.join(map(str, [*found_first, os.environ.get("PATH", os.defpath)])))
# A stage takes the place of its shell, so that signals reach it.
shell.prefix("exec ")

sys.path.insert(0, str(source))
from image_diffusion.core.code import code_digest
from image_diffusion.core.config import parse as parse_config
from image_diffusion.core.files import digest, sha256_file, write_json, write_text


def stop(message):
    """End Snakemake with one clear line."""
    raise SystemExit(f"error: {str(message).strip().removeprefix('error: ')}")


# ---- What the experiments resolve to

stages = ["crop", "encode", "embed", "train", "sample", "evaluate", "export"]
commands = [*stages, "detect", "sweep"]


def resolve():
    """Have the experiments checked and written out stage by stage; the digest of each stage's code.

    Importing the package takes seconds, so it is done when an experiment, config.yaml or the package has changed.
    """
    read = [*sorted(experiments.glob("*.yaml")), *sorted(source.rglob("*.py"))]
    state = digest([config, [[str(path), sha256_file(path)] for path in read]])
    cache = Path(results, ".resolved.json")
    known = json.loads(cache.read_text()) if cache.is_file() else {"state": None}
    if known["state"] == state and all(Path(written).is_file() for written in known["written"]):
        return known["code"]
    check_config()
    files = [experiments / f"{name}.yaml" for name in config["experiments"]]
    command = [
        sys.executable,
        "-m",
        "image_diffusion.configure",
        "--experiments",
        *files,
        "--results",
        results,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        stop(done.stderr)
    code = {stage: code_digest(f"image_diffusion.{stage}", source) for stage in commands}
    plans = read_plans(config["experiments"])
    written = [file for plan in plans.values() for file in plan["configs"].values()]
    written.extend(file for plan in plans.values() for axis in plan["sweep"].values() for file in axis.values())
    written.extend(map(plan_file, plans))
    write_json(cache, {"state": state, "code": code, "written": written})
    return code


def check_config():
    """Compare config/config.yaml, and what the command line added to it, with its schema."""
    import jsonschema

    schema = json.loads((root / "workflow" / "schemas" / "config.schema.json").read_text())
    for problem in jsonschema.Draft202012Validator(schema).iter_errors(config):
        where = ["config/config.yaml", ".".join(map(str, problem.absolute_path))]
        stop(": ".join([*filter(None, where), problem.message]))


def plan_file(experiment):
    """Where `configure` writes what Snakemake has to know of an experiment."""
    return f"{results}/{experiment}/config/plan.json"


def read_plans(names):
    """The plan of each experiment, and of those that train its codec, make what it enlarges or is compared with."""
    plans = {}
    for name in names:
        plan = json.loads(Path(plan_file(name)).read_text())
        others = [plan[f"{key}_experiment"] for key in ("codec", "small_images", "against")]
        plans |= {name: plan, **read_plans(filter(None, others))}
    return plans


def plan_of_tokens(plan):
    """The plan by which the data set of a discrete VAE is encoded to its tokens: it is its own codec."""
    configs = plan["configs"]
    changes = {"codec": plan["tokens"], "codec_experiment": plan["experiment"]}
    return plan | changes | {"configs": {"crop": configs["crop"], "encode": configs.get("tokens")}}


def look_at_sources():
    """Note which data sets' files have changed: crop reads the note."""
    from image_diffusion.data.source import refresh
    from image_diffusion.data.sources import Source

    for dataset, plan in datasets.items():
        try:
            refresh(
                parse_config(Source, plan["source"], dataset),
                Path(results, "datasets", dataset, "source.json"),
            )
        except (ValueError, OSError) as error:
            stop(error)
    for name, plan in plans.items():
        files = json.loads(Path(results, "datasets", plan["dataset"], "source.json").read_text())["files"]
        if plan["source"]["type"] == "folder" and files < plan["global_batch"]:
            stop(
                f"{experiments / name}.yaml: {plan['source']['path']} holds {files} files, fewer than one batch of"
                f" train.global_batch = {plan['global_batch']}. Add images, or make the batch smaller."
            )


# ---- Code that has changed

# Stages whose work takes long are made again only when asked; the others carry the digest in their params.
# By stage: what it makes, and where the code it was made with is noted.
long_stages = {
    "crop": ("datasets/{dataset}/crops/manifest.json", "datasets/{dataset}/config/crop.code"),
    "encode": ("datasets/{dataset}/{codec}/manifest.json", "datasets/{dataset}/config/encode-{codec}.code"),
    "embed": ("datasets/{dataset}/{pairs}/manifest.json", "datasets/{dataset}/config/embed-{pairs}.code"),
    "train": ("{experiment}/train/weights.safetensors", "{experiment}/config/train.code"),
}


def note_code():
    """Note which code each long stage is made with; once it has been made, tell when that code has changed."""
    told = set()
    for plan in [*plans.values(), *latents.values()]:
        for stage in set(long_stages) & set(plan["configs"]):
            made, note = (Path(results, form.format(**plan)) for form in long_stages[stage])
            if note.is_file() and made.is_file():
                if note.read_text() != code[stage]:
                    told.add(f"The code of {stage} has changed since. To make it again: rm -r {made.parent}")
            else:
                write_text(note, code[stage])
    print(*sorted(told), sep="\n", end="\n" if told else "", file=sys.stderr)


# ---- Read once, where Snakemake was started; jobs on other machines take what it found

code = resolve() if not workflow.remote_exec else json.loads(Path(results, ".resolved.json").read_text())["code"]
plans = read_plans(config["experiments"])
datasets = {plan["dataset"]: plan for plan in plans.values()}
latents = {(plan["dataset"], plan["codec"]): plan for plan in plans.values() if plan["codec"]}
latents |= {(plan["dataset"], plan["tokens"]): plan for plan in map(plan_of_tokens, plans.values()) if plan["tokens"]}
pair_sets = {(plan["dataset"], plan["pairs"]): plan for plan in plans.values() if plan["pairs"]}
if not workflow.remote_exec:
    look_at_sources()
    note_code()


wildcard_constraints:
    experiment="|".join(map(re.escape, plans)),
    dataset="|".join(map(re.escape, datasets)),
    codec="|".join(sorted({re.escape(codec) for _, codec in latents})) or "none",
    pairs="|".join(sorted({re.escape(pairs) for _, pairs in pair_sets})) or "none",
    axis=r"\w+",
    value=r"[^/]+",
    part=r"\d+",
    parts=r"\d+",
