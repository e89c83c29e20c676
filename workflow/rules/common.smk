# What the rules share: which files a stage reads, and what it asks a machine for.


def finals(wildcards):
    """What `snakemake` makes when no file is named."""
    yield f"{results}/summary.html"
    for name in plans:
        yield from results_of_experiment(name)
        yield f"{results}/{name}/tracked.json"
        yield f"{results}/{name}/report/index.html"


def data_folder(plan):
    """Where the training examples of an experiment lie."""
    return f"{results}/datasets/{plan['dataset']}/{plan['pairs'] or plan['codec'] or 'crops'}"


def training_data(wildcards):
    """The manifest of what an experiment trains on: latents, crops, or pairs of embeddings."""
    return f"{data_folder(plans[wildcards.experiment])}/manifest.json"


def encoded_parts(wildcards):
    """The marks of the jobs that share the shards of a large data set, 16 or more each; one job alone leaves none."""
    parts = min(64, latents[wildcards.dataset, wildcards.codec]["num_shards"] // 16)
    folder = f"{results}/datasets/{wildcards.dataset}/{wildcards.codec}"
    return [f"{folder}/part-{part}-of-{parts}.done" for part in range(parts)] if parts > 1 else []


def sampled_parts(wildcards):
    """What the jobs that share the images of a large set have made; one job alone leaves none."""
    jobs = plan_of(wildcards)["sample_jobs"]
    folder = f"{results}/{wildcards.experiment}/samples"
    return [f"{folder}/part-{part}-of-{jobs}.npz" for part in range(jobs)] if jobs > 1 else []


def sampled_option(wildcards):
    """How `sample` is told where that lies."""
    return ["--made", *sampled_parts(wildcards)] if sampled_parts(wildcards) else []


def swept_config(wildcards):
    """What one point of a curve is sampled with."""
    return plan_of(wildcards)["sweep"][wildcards.axis][wildcards.value]


def swept_weights(wildcards):
    """The weights that one point of a curve is sampled from."""
    folder = f"{results}/{wildcards.experiment}"
    earlier = wildcards.axis == "checkpoint"
    return f"{folder}/{f'sweep/checkpoint/{wildcards.value}/weights' if earlier else 'train'}/weights.safetensors"


def swept_points(wildcards):
    """What was found at each point of a curve."""
    folder = f"{results}/{wildcards.experiment}/sweep/{wildcards.axis}"
    return [f"{folder}/{value}/metrics.json" for value in plan_of(wildcards)["sweep"][wildcards.axis]]


def swept_point_options(wildcards):
    """How `sweep` is told which is which."""
    values = plan_of(wildcards)["sweep"][wildcards.axis]
    return [f"{value}={path}" for value, path in zip(values, swept_points(wildcards))]


def codec_weights(wildcards):
    """The weights of the codec, where another experiment trains it."""
    codec = plan_of(wildcards)["codec_experiment"]
    return f"{results}/{codec}/train/weights.safetensors" if codec else []


def reference(wildcards):
    """What samples are compared with in place of real ones: another experiment's samples, or a file."""
    plan = plan_of(wildcards)
    other = plan["against_experiment"]
    return f"{results}/{other}/samples/samples.npz" if other else plan["against"] or []


def reference_option(wildcards):
    """How `evaluate` is told where that lies."""
    return ["--reference", reference(wildcards)] if reference(wildcards) else []


def small_images(wildcards):
    """What a super-resolution network enlarges: another experiment's samples, the held-out crops, or a file."""
    plan = plan_of(wildcards)
    if plan["small_images_experiment"]:
        return f"{results}/{plan['small_images_experiment']}/samples/samples.npz"
    return real_data(wildcards) if plan["small_images"] == "validation" else plan["small_images"] or []


def results_of(wildcards):
    """What an experiment ends with, apart from what is made of all of it."""
    return results_of_experiment(wildcards.experiment)


def results_of_experiment(name):
    folder, plan = f"{results}/{name}", plans[name]
    made = ["train/weights.safetensors", "train/model.json", "metrics.json"]
    if plan["makes_samples"]:
        made += ["samples/samples.npz", "samples/samples.json", "samples/grid.png"]
    if plan["export"] != "none":
        made += ["diffusers"]
    made += [f"sweep/{axis}/curve.json" for axis in plan["sweep"]]
    tokens = [f"{results}/datasets/{plan['dataset']}/{plan['tokens']}/manifest.json"] if plan["tokens"] else []
    return [*(f"{folder}/{path}" for path in made), *tokens]


def pair_sources(wildcards):
    """What pairs of embeddings are made from: crops and captions, or the note of files that others have embedded."""
    plan = plan_of(wildcards)
    name = "crops/manifest.json" if plan["pairs_of_images"] else "source.json"
    return [f"{results}/datasets/{plan['dataset']}/{name}", *([plan["captions"]] if plan["captions"] else [])]


def pair_options(wildcards):
    """How `embed` is told where those lie, and the detector where it looks at them."""
    plan, folder = plan_of(wildcards), f"{results}/datasets/{wildcards.dataset}"
    options = ["--data", f"{folder}/crops/manifest.json"] if plan["pairs_of_images"] else []
    return [*options, "--detector", f"{folder}/detector"] if plan["pairs_of_detector"] else options


def pair_detector(wildcards):
    """The detector that looks at the images of pairs, where one does."""
    folder = f"{results}/datasets/{wildcards.dataset}/detector"
    return f"{folder}/detector.json" if plan_of(wildcards)["pairs_of_detector"] else []


def real_data(wildcards):
    """The manifest of the real data that a model is compared with: crops, or the pairs of a prior."""
    plan = plan_of(wildcards)
    return f"{results}/datasets/{plan['dataset']}/{plan['pairs'] or 'crops'}/manifest.json"


def samples(wildcards):
    """The images that are judged, and how they were made; a codec is judged by what it leaves of real ones."""
    folder = f"{results}/{wildcards.experiment}/samples"
    return [f"{folder}/samples.npz", f"{folder}/samples.json"] if plan_of(wildcards)["makes_samples"] else []


def sample_grid(wildcards):
    """A picture of the images that an experiment makes, where it makes any."""
    makes = plan_of(wildcards)["makes_samples"]
    return f"{results}/{wildcards.experiment}/samples/grid.png" if makes else []


def sample_grid_option(wildcards):
    """How `export` is told where that lies."""
    return ["--grid", sample_grid(wildcards)] if sample_grid(wildcards) else []


def samples_option(wildcards):
    """How `evaluate` is told where those lie."""
    return ["--samples", *samples(wildcards)[:1]] if samples(wildcards) else []


def detector(wildcards):
    """What the metrics look at images with, where it is made from the data set itself."""
    plan = plan_of(wildcards)
    own = plan["detector"] == "inpipe" and not plan["pairs"]
    return f"{results}/datasets/{plan['dataset']}/detector/detector.json" if own else []


def detector_option(wildcards):
    """How `evaluate` is told where that lies."""
    description = detector(wildcards)
    return ["--detector", str(Path(description).parent)] if description else []


def config_of(stage):
    """The configuration a stage runs with."""
    return lambda wildcards: plan_of(wildcards)["configs"][stage]


def configs_before(stage):
    """The configurations of the stages before: should one of those fail, nothing after it passes for up to date."""

    before = stages[: stages.index(stage)]

    def configs(wildcards):
        plan = plan_of(wildcards)
        base = plan["small_images_experiment"] if stage in ("sample", "evaluate") else None
        own = [plan["configs"][each] for each in before if each in plan["configs"]]
        return own + ([plans[base]["configs"][each] for each in ("train", "sample")] if base else [])

    return configs


def plan_of(wildcards):
    """The plan that a job belongs to; for a data set, that of an experiment which uses it."""
    if "experiment" in wildcards.keys():
        return plans[wildcards.experiment]
    if "codec" in wildcards.keys():
        return latents[wildcards.dataset, wildcards.codec]
    if "pairs" in wildcards.keys():
        return pair_sets[wildcards.dataset, wildcards.pairs]
    return datasets[wildcards.dataset]


def codec_option(wildcards):
    """How a command is told where those weights lie."""
    codec = plan_of(wildcards)["codec_experiment"]
    return ["--codec-weights", f"{results}/{codec}/train/weights.safetensors"] if codec else []


def sample_config_option(wildcards):
    """How `doctor` is told which images will be made, where any are."""
    known = plan_of(wildcards)["configs"]
    return ["--sample", known["sample"]] if "sample" in known else []


def small_images_option(wildcards, input):
    """How `sample` is told where those lie."""
    if not input.small_images:
        return []
    path = Path(input.small_images)
    return ["--small-images", str(path.parent if path.name == "manifest.json" else path)]


# ---- What a stage asks a machine for


def asked(name):
    """A number of the experiment's section `resources`; --config NAME=NUMBER goes before it."""
    return lambda wildcards: config.get(name, plan_of(wildcards)["resources"][name])


def gpus(wildcards):
    """The GPUs of each node that trains, in Slurm's words; none on CPUs."""
    return gpu_request(asked("gpus_per_node")(wildcards))


def one_gpu(wildcards):
    """One GPU, where the experiment uses any."""
    return gpu_request(min(1, asked("gpus_per_node")(wildcards)))


def gpu_request(number):
    kind = (config.get("slurm") or {}).get("gpu_type")
    return ":".join(["gpu", *([kind] if kind else []), str(number)]) if number else None


def several_nodes(value):
    """A resource that only a job on several nodes has: `value`, or the number of nodes."""

    def resource(wildcards):
        nodes = asked("nodes")(wildcards)
        return (value or nodes) if nodes > 1 else None

    return resource


def training_cpus(wildcards):
    """CPU cores of each node that trains."""
    return asked("processes_per_node")(wildcards) * asked("cpus_per_process")(wildcards)


def local_threads(cpus):
    """Cores on this machine, where stages that use its GPU run one at a time."""
    everything = 1024

    def threads(wildcards):
        alone = asked("gpus_per_node")(wildcards) and not workflow.remote_exec
        return everything if alone else cpus(wildcards)

    return threads


def attempts(number):
    """How often a job that a queue has lost is sent again. Inside the job, and on this machine, it is not."""
    return number if workflow.resource_settings.nodes is not None and not workflow.remote_exec else 0
