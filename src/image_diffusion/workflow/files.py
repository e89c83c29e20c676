"""Which files each stage reads, and how its command is told of those that not every experiment has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_diffusion.core.files import read_json
from image_diffusion.workflow.ledgers import FOLDER, PAGE, ledger_file
from image_diffusion.workflow.plans import STAGES, Plan, Plans, Wildcards
from image_diffusion.workflow.sources import source_file

Paths = str | list[str]
"""A file, or several; an empty list where an experiment has no use for one."""

OTHER_WEIGHTS = {"checkpoint": "--step", "ema": "--average"}
"""What can be varied that asks for other weights of the training, and the option of `ema` that names them."""

IMAGES_A_CROP_JOB = 2_000_000
"""Images that are cropped in half an hour or so."""
IMAGE_BYTES = 100_000
"""What an image file takes, where many lie in one."""
IMAGES_A_MB = 500
"""Images of which a job that crops holds a note in memory: 1.6 KB each, as measured."""
IMAGES_A_MINUTE = 10_000
"""Images that a job crops, or that a data sheet looks at, in a minute on a slow machine."""
_SHORTEST_MIN, _LONGEST_MIN = 15, 240
_MOST_JOBS = 64
"""Jobs that share a data set."""


@dataclass(frozen=True)
class Files:
    """The inputs of the rules, as functions of a job's wildcards."""

    results: str
    """The folder of all results."""
    plans: Plans
    jobs_at_once: Callable[[Plan], int] = lambda plan: 1
    """Jobs of an experiment that work at once on this machine, each on a GPU of its own."""

    def everything(self, wildcards: Wildcards) -> Iterator[str]:
        """What `snakemake` makes when no file is named."""
        if self.plans.ledgers and not self.plans.asked:
            for name in self.plans.ledgers:
                yield from self._of_ledger(name)
            return
        yield f"{self.results}/summary.html"
        for name in self.plans.by_name:
            yield from self.all_of(name)

    def all_of(self, name: str) -> Iterator[str]:
        """What is made of one experiment, and of no other; where it is trained with several seeds, of all of them."""
        yield from self._made(name)
        if (seeds := self.plans.by_name[name].seeds) in self.plans.ledgers:
            yield from self._of_ledger(str(seeds))
        yield from self._data(self.plans.by_name[name])
        yield f"{self.results}/{name}/tracked.json"
        yield f"{self.results}/{name}/report/index.html"

    def made(self, wildcards: Wildcards) -> list[str]:
        """What an experiment ends with, apart from what is made of all of it; without an experiment, what all do."""
        named = "experiment" in wildcards.keys()  # noqa: SIM118 - Snakemake's wildcards are a list with names
        names = [wildcards["experiment"]] if named else self.plans.by_name
        return [path for name in names for path in self._made(name)]

    def _made(self, name: str) -> list[str]:
        plan = self.plans.by_name[name]
        paths = ["train/weights.safetensors", "train/model.json", "metrics.json"]
        if plan.makes_samples:
            paths += ["samples/samples.npz", "samples/samples.json", "samples/grid.png"]
        if plan.makes_embeddings:
            paths += ["samples/embeddings.json"]
        if plan.export != "none":
            paths += ["diffusers"]
        paths += [f"sweep/{axis}/curve.json" for axis in plan.sweep]
        tokens = [f"{self._dataset(plan)}/{plan.tokens}/manifest.json"] if plan.tokens else []
        return [*(f"{self.results}/{name}/{path}" for path in paths), *tokens]

    def _data(self, plan: Plan) -> list[str]:
        """What a data set is read through. Snakemake makes what is missing only where it is asked for by name."""
        parts = [*(["crops"] if _has_crops(plan) else []), plan.codec, plan.pairs]
        made = [f"{self._dataset(plan)}/{part}/manifest.json" for part in parts if part]
        has_detector = plan.pairs_of_detector or (not plan.learns_from_pairs and "inpipe" in plan.detectors)
        detector = [f"{self._dataset(plan)}/detector/detector.json"] if has_detector else []
        return [*made, *detector, *self._references(plan)]

    def given(self, wildcards: Wildcards) -> list[str]:
        """What an experiment was made from: the configurations of its stages, and what describes its data."""
        plan = self.plans.of(wildcards)
        return [*plan.configs.values(), *(path for path in self._data(plan) if path.endswith("/manifest.json"))]

    # ---- The configurations of stages

    def config(self, stage: str) -> Callable[[Wildcards], str]:
        """The configuration a stage runs with."""
        return lambda wildcards: self.plans.of(wildcards).configs[stage]

    def configs_before(self, stage: str) -> Callable[[Wildcards], list[str]]:
        """The configurations of the stages before: should one of those fail, nothing after it passes for up to date."""
        before = STAGES[: STAGES.index(stage)]

        def configs(wildcards: Wildcards) -> list[str]:
            plan = self.plans.of(wildcards)
            bases = (
                [plan.small_images_experiment, plan.embeddings_experiment] if stage in ("sample", "evaluate") else []
            )
            theirs = [self.plans.by_name[base].configs[each] for base in bases if base for each in ("train", "sample")]
            start = plan.start_experiment if stage == "train" else None
            theirs += [self.plans.by_name[start].configs["train"]] if start else []
            return [plan.configs[each] for each in before if each in plan.configs] + theirs

        return configs

    def trained_by_option(self, wildcards: Wildcards) -> list[str]:
        """How a command is told which training its weights must be of."""
        return ["--trained-by", self.plans.of(wildcards).configs["train"]]

    def sample_config_option(self, wildcards: Wildcards) -> list[str]:
        """How `doctor` is told which images will be made, where any are."""
        known = self.plans.of(wildcards).configs
        return ["--sample", known["sample"]] if "sample" in known else []

    # ---- What is trained on

    def data_folder(self, wildcards: Wildcards) -> str:
        """Where the training examples of an experiment lie."""
        plan = self.plans.of(wildcards)
        return f"{self._dataset(plan)}/{plan.learns_from_pairs or plan.codec or 'crops'}"

    def training_data(self, wildcards: Wildcards) -> str:
        """The manifest of what an experiment trains on: latents, crops, or pairs of embeddings."""
        return f"{self.data_folder(wildcards)}/manifest.json"

    def real_folder(self, wildcards: Wildcards) -> str:
        """Where the real data lie that a model is compared with: crops, or the pairs of a prior; latents that others
        have encoded, which tell of the classes alone."""
        plan = self.plans.of(wildcards)
        return f"{self._dataset(plan)}/{plan.learns_from_pairs or ('crops' if plan.has_images else plan.codec)}"

    def real_data(self, wildcards: Wildcards) -> str:
        """The manifest of those."""
        return f"{self.real_folder(wildcards)}/manifest.json"

    def judged_on(self, wildcards: Wildcards) -> Paths:
        """The manifest of what the codec makes of those, where a model is judged on that too."""
        return self.training_data(wildcards) if self.plans.of(wildcards).judged_on_encoded else []

    def judged_on_option(self, wildcards: Wildcards) -> list[str]:
        """How `evaluate` is told where that lies."""
        return _option("--encoded", _folder(self.judged_on(wildcards)))

    def datasheet(self, wildcards: Wildcards) -> Paths:
        """What was found in the images of an experiment, where it looks at any."""
        plan = self.plans.of(wildcards)
        return f"{self._dataset(plan)}/datasheet/datasheet.json" if _has_crops(plan) else []

    def dataset_folder(self, wildcards: Wildcards) -> str:
        """Where everything lies that is made of a data set alone."""
        return self._dataset(self.plans.of(wildcards))

    def _dataset(self, plan: Plan) -> str:
        return f"{self.results}/datasets/{plan.dataset}"

    def initial_weights(self, wildcards: Wildcards) -> Paths:
        """What training starts from, where another experiment trains it."""
        start = self.plans.of(wildcards).start_experiment
        return f"{self.results}/{start}/train/weights.safetensors" if start else []

    def initial_weights_option(self, wildcards: Wildcards) -> list[str]:
        """How `train` is told where those lie."""
        return _option("--init-from", self.initial_weights(wildcards))

    # ---- Codecs

    def codec_weights(self, wildcards: Wildcards) -> Paths:
        """The weights of the codec, where another experiment trains it."""
        codec = self.plans.of(wildcards).codec_experiment
        return f"{self.results}/{codec}/train/weights.safetensors" if codec else []

    def codec_option(self, wildcards: Wildcards) -> list[str]:
        """How a command is told where those lie."""
        return _option("--codec-weights", self.codec_weights(wildcards))

    def codec_stamps(self, wildcards: Wildcards) -> list[str]:
        """What tells the files of a codec that others have trained from any that take their place, older ones too."""
        return _stamps(self.plans.of(wildcards).codec_files)

    def decoder_stamps(self, wildcards: Wildcards) -> list[str]:
        """The same of the decoder of samples, where it is another one."""
        return _stamps(self.plans.of(wildcards).decoder_files)

    def cropped_parts(self, wildcards: Wildcards) -> list[str]:
        """The notes of the jobs that share the images of a very large data set; one alone leaves none."""
        plan = self.plans.of(wildcards)
        return [f"{self._dataset(plan)}/crops/{part}.json" for part in self._crop_parts(plan)]

    def cropped_option(self, wildcards: Wildcards) -> list[str]:
        """How `crop` is told where those lie."""
        return _option("--made", self.cropped_parts(wildcards))

    def crop_memory_mb(self, wildcards: Wildcards) -> int:
        """Memory of a job that crops, in MB: each lists all images, and the last one holds what is known of each."""
        return max(8000, self._num_images(self.plans.of(wildcards)) // IMAGES_A_MB)

    def crop_runtime_min(self, wildcards: Wildcards) -> int:
        """Time for a job that crops, or that looks at crops, in minutes: it goes on where it was in the next."""
        plan = self.plans.of(wildcards)
        each = self._num_images(plan) // max(1, len(self._crop_parts(plan)))
        return min(_LONGEST_MIN, _SHORTEST_MIN + each // IMAGES_A_MINUTE) if each else _LONGEST_MIN

    def _crop_parts(self, plan: Plan) -> list[str]:
        """The names of the parts that jobs crop a data set in, of so many images each."""
        return _named_parts(min(_MOST_JOBS, plan.num_shards, self._num_images(plan) // IMAGES_A_CROP_JOB))

    def _num_images(self, plan: Plan) -> int:
        """The images of a data set by the number or the size of its files, as they were found when Snakemake started;
        0 where nobody looks for files, or there are none on this machine."""
        try:
            source = read_json(source_file(Path(self.results), plan.dataset))
            return int(max(source["files"], source["bytes"] // IMAGE_BYTES))
        except (ValueError, KeyError, TypeError):
            return 0

    def to_encode(self, wildcards: Wildcards) -> str:
        """What becomes latents: crops, or the files that others have encoded, by their note."""
        plan = self.plans.of(wildcards)
        return f"{self._dataset(plan)}/{'crops/manifest' if plan.has_images else 'source'}.json"

    def encoded_parts(self, wildcards: Wildcards) -> list[str]:
        """The marks of the jobs that share the shards of a large data set; one alone leaves none."""
        plan = self.plans.of(wildcards)
        return [f"{self._dataset(plan)}/{plan.codec}/{part}.done" for part in self._parts(plan)]

    def _parts(self, plan: Plan) -> list[str]:
        """The names of the parts that jobs share a large data set in, 16 shards or more each, or fewer where several
        GPUs work at once; none for one job alone."""
        return _named_parts(min(_MOST_JOBS, self._shared(plan, max(1, plan.num_shards // 16), plan.num_shards)))

    def _shared(self, plan: Plan, jobs: int, most: int) -> int:
        """So many jobs, and more where those that work at once would not all have the same to do."""
        at_once = self.jobs_at_once(plan)
        return min(most, -(-jobs // at_once) * at_once)

    # ---- Pairs of embeddings

    def pair_sources(self, wildcards: Wildcards) -> list[str]:
        """What pairs are made from: crops and captions, or the note of files that others have embedded. The note is
        there for captions that come with the images, too: one may change where no image does."""
        plan = self.plans.of(wildcards)
        crops = [f"{self._dataset(plan)}/crops/manifest.json"] if plan.pairs_of_images else []
        note = [f"{self._dataset(plan)}/source.json"] if plan.pairs_of_source else []
        return [*crops, *note, *([plan.captions] if plan.captions else [])]

    def pairs_beside(self, wildcards: Wildcards) -> Paths:
        """The manifest of the pairs that an experiment reads beside its data, where it does."""
        plan = self.plans.of(wildcards)
        return f"{self._dataset(plan)}/{plan.pairs}/manifest.json" if plan.pairs_beside else []

    def pairs_beside_option(self, wildcards: Wildcards) -> list[str]:
        """How `train` is told where those lie."""
        return _option("--pairs", self.pairs_beside(wildcards))

    def pair_detector(self, wildcards: Wildcards) -> Paths:
        """The detector that looks at the images of pairs, where one does."""
        plan = self.plans.of(wildcards)
        return f"{self._dataset(plan)}/detector/detector.json" if plan.pairs_of_detector else []

    def pair_options(self, wildcards: Wildcards) -> list[str]:
        """How `embed` is told where all that lies."""
        plan = self.plans.of(wildcards)
        crops = ["--data", f"{self._dataset(plan)}/crops/manifest.json"] if plan.pairs_of_images else []
        return [*crops, *_option("--detector", _folder(self.pair_detector(wildcards)))]

    # ---- Samples

    def small_images(self, wildcards: Wildcards) -> Paths:
        """What a super-resolution network enlarges: another experiment's samples, the held-out crops, or a file."""
        plan = self.plans.of(wildcards)
        if plan.small_images_experiment:
            return f"{self.results}/{plan.small_images_experiment}/samples/samples.npz"
        return self.real_data(wildcards) if plan.small_images == "validation" else plan.small_images or []

    def small_images_option(self, wildcards: Wildcards) -> list[str]:
        """How `sample` is told where those lie."""
        held_out = self.plans.of(wildcards).small_images == "validation"
        return _option("--small-images", self.real_folder(wildcards) if held_out else self.small_images(wildcards))

    def embeddings(self, wildcards: Wildcards) -> list[str]:
        """What images are made of: the embeddings of a prior, those of the held-out images, or files."""
        plan = self.plans.of(wildcards)
        if plan.embeddings_experiment:
            return [f"{self.results}/{plan.embeddings_experiment}/samples/embeddings.json"]
        if plan.embeddings == "validation":
            return [f"{self._dataset(plan)}/{part}/manifest.json" for part in (plan.pairs, "crops")]
        if plan.embeddings is None:
            return []
        found = sorted(str(path) for path in Path(plan.embeddings).glob("*/*_*"))
        return found or [f"{plan.embeddings}/img_emb/img_emb_0.npy"]  # which Snakemake says is missing

    def embeddings_option(self, wildcards: Wildcards) -> list[str]:
        """How `sample` is told where those lie."""
        files, folder = self.embeddings(wildcards), self.plans.of(wildcards).embeddings
        named = [folder] if folder not in (None, "validation") else [str(Path(path).parent) for path in files]
        return _option("--embeddings", [each for each in named if each])

    def prompts(self, wildcards: Wildcards) -> Paths:
        """The file that prompts are read from, where there is one."""
        return self.plans.of(wildcards).prompts or []

    def sampled_parts(self, wildcards: Wildcards) -> list[str]:
        """What the jobs that share the images of a large set have made; one job alone leaves none."""
        plan = self.plans.of(wildcards)
        parts = _named_parts(self._shared(plan, plan.sample_jobs, plan.most_sample_jobs))
        return [f"{self.results}/{plan.experiment}/samples/{part}.npz" for part in parts]

    def made_option(self, wildcards: Wildcards, input: Any) -> list[str]:
        """How a stage is told where its parts lie. A function of the input is none of the parameters that Snakemake
        makes results again for: those of any number of parts are the same."""
        return _option("--made", list(input.parts))

    def samples(self, wildcards: Wildcards) -> list[str]:
        """The images that are judged, and how they were made; a codec is judged by what it leaves of real ones."""
        plan = self.plans.of(wildcards)
        folder = f"{self.results}/{plan.experiment}/samples"
        return [f"{folder}/samples.npz", f"{folder}/samples.json"] if plan.makes_samples else []

    def samples_option(self, wildcards: Wildcards) -> list[str]:
        """How `evaluate` is told where those lie."""
        return _option("--samples", self.samples(wildcards)[:1])

    def made_with(self, wildcards: Wildcards) -> list[str]:
        """What `evaluate` reads to make the images itself, where they are not stored: what `sample` reads."""
        if self.plans.of(wildcards).keeps_samples:
            return []
        read = [each(wildcards) for each in (self.codec_weights, self.small_images, self.embeddings, self.prompts)]
        return [path for paths in read for path in ([paths] if isinstance(paths, str) else paths)]

    def making_option(self, wildcards: Wildcards) -> list[str]:
        """How `evaluate` is told where those lie."""
        plan = self.plans.of(wildcards)
        if plan.keeps_samples:
            return []
        swept = "axis" in wildcards.keys()  # noqa: SIM118 - Snakemake's wildcards are a list with names
        config = self.swept_config(wildcards) if swept else plan.configs["sample"]
        options = [each(wildcards) for each in (self.codec_option, self.small_images_option, self.embeddings_option)]
        return ["--making", config, *(word for option in options for word in option)]

    def grid(self, wildcards: Wildcards) -> Paths:
        """A picture of the images that an experiment makes, where it makes any."""
        plan = self.plans.of(wildcards)
        return f"{self.results}/{plan.experiment}/samples/grid.png" if plan.makes_samples else []

    def grid_option(self, wildcards: Wildcards) -> list[str]:
        """How `export` is told where that lies."""
        return _option("--grid", self.grid(wildcards))

    # ---- What samples are judged with

    def reference(self, wildcards: Wildcards) -> Paths:
        """What samples are compared with in place of real ones: another experiment's samples, or a file."""
        plan = self.plans.of(wildcards)
        other = plan.against_experiment
        return f"{self.results}/{other}/samples/samples.npz" if other else plan.against or []

    def reference_option(self, wildcards: Wildcards) -> list[str]:
        """How `evaluate` is told where that lies."""
        return _option("--reference", self.reference(wildcards))

    def detector(self, wildcards: Wildcards) -> Paths:
        """What the metrics look at images with, where it is made from the data set itself."""
        plan = self.plans.of(wildcards)
        own = "inpipe" in plan.detectors and not plan.learns_from_pairs
        return f"{self._dataset(plan)}/detector/detector.json" if own else []

    def detector_option(self, wildcards: Wildcards) -> list[str]:
        """How `evaluate` is told where that lies."""
        return _option("--detector", _folder(self.detector(wildcards)))

    def references(self, wildcards: Wildcards) -> list[str]:
        """What detectors have seen in the data set, for all that is compared with it."""
        return self._references(self.plans.of(wildcards))

    def references_option(self, wildcards: Wildcards) -> list[str]:
        """How `evaluate` is told where that lies."""
        return _option("--references", [str(Path(path).parent) for path in self.references(wildcards)])

    def reference_config(self, wildcards: Wildcards) -> str:
        """Which detector looks at a data set."""
        return self.plans.references[wildcards["dataset"], wildcards["judge"]]

    def reference_detector(self, wildcards: Wildcards) -> Paths:
        """The same, where it is made from the data set itself."""
        own = wildcards["judge"] == "inpipe"
        return f"{self.results}/datasets/{wildcards['dataset']}/detector/detector.json" if own else []

    def reference_detector_option(self, wildcards: Wildcards) -> list[str]:
        """How `reference` is told where that lies."""
        return _option("--detector", _folder(self.reference_detector(wildcards)))

    def reference_parts(self, wildcards: Wildcards) -> list[str]:
        """What the jobs have seen that share the images of a large data set; one alone leaves none."""
        plan, judge = self.plans.of(wildcards), wildcards["judge"]
        return [f"{self._dataset(plan)}/references/{judge}/parts/{part}.npz" for part in self._parts(plan)]

    def _references(self, plan: Plan) -> list[str]:
        return [f"{self._dataset(plan)}/references/{name}/reference.json" for name in plan.references]

    def dataset(self, wildcards: Wildcards) -> str:
        """The name of its data set."""
        return self.plans.of(wildcards).dataset

    def headline(self, wildcards: Wildcards) -> str:
        """The metric that an experiment is ranked by."""
        return self.plans.of(wildcards).headline

    # ---- Ledgers

    def ledger_folder(self, name: str) -> str:
        """Where everything lies that is made of a ledger alone."""
        return f"{self.results}/{FOLDER}/{name}"

    def _of_ledger(self, name: str) -> list[str]:
        return [f"{self.ledger_folder(name)}/{made}" for made in (PAGE, "tracked.json")]

    def ledger_plan(self, wildcards: Wildcards) -> str:
        """What its rows are."""
        return str(ledger_file(self.results, wildcards["ledger"]))

    def ledger_runs(self, wildcards: Wildcards) -> list[str]:
        """What its runs end with."""
        runs = dict.fromkeys(self.plans.ledgers[wildcards["ledger"]].runs)
        return [path for run in runs for path in [*self._made(run), *self._data(self.plans.by_name[run])]]

    # ---- Checkpoints of a training that may go on

    def checkpoint_option(self, wildcards: Wildcards) -> list[str]:
        """How `ema` is told which checkpoint is meant; the newest needs no telling."""
        return [] if wildcards["step"] == "latest" else ["--step", wildcards["step"]]

    def newest_checkpoint(self, wildcards: Wildcards) -> str:
        """Which checkpoint is the newest of an experiment, where that one is asked for: another one makes other
        images."""
        folder = Path(self.results, wildcards["experiment"], "train", "state")
        if wildcards["step"] != "latest":
            return ""
        there = []
        for path in folder.glob("*/step-*"):
            with suppress(FileNotFoundError):  # the training goes on, and keeps few
                there.append((path.stat().st_mtime_ns, path))
        return str(max(there)[1].relative_to(folder)) if there else ""

    # ---- Sweeps

    def swept_config(self, wildcards: Wildcards) -> str:
        """What one point of a curve is sampled with."""
        return self.plans.of(wildcards).sweep[wildcards["axis"]][wildcards["value"]]

    def swept_weights(self, wildcards: Wildcards) -> str:
        """The weights that one point of a curve is sampled from."""
        axis = wildcards["axis"]
        where = f"sweep/{axis}/{wildcards['value']}/weights" if axis in OTHER_WEIGHTS else "train"
        return f"{self.results}/{wildcards['experiment']}/{where}/weights.safetensors"

    def swept_weights_option(self, wildcards: Wildcards) -> list[str]:
        """How `ema` is told which weights of the training those are."""
        return [OTHER_WEIGHTS[wildcards["axis"]], wildcards["value"]]

    def swept_points(self, wildcards: Wildcards) -> list[str]:
        """What was found at each point of a curve."""
        plan, axis = self.plans.of(wildcards), wildcards["axis"]
        return [f"{self.results}/{plan.experiment}/sweep/{axis}/{value}/metrics.json" for value in plan.sweep[axis]]

    def swept_point_options(self, wildcards: Wildcards) -> list[str]:
        """How `sweep` is told which is which."""
        values = self.plans.of(wildcards).sweep[wildcards["axis"]]
        return [f"{value}={path}" for value, path in zip(values, self.swept_points(wildcards), strict=True)]


def _has_crops(plan: Plan) -> bool:
    return plan.has_images and (plan.pairs is None or plan.pairs_of_images)


def _named_parts(parts: int) -> list[str]:
    return [f"part-{part}-of-{parts}" for part in range(parts)] if parts > 1 else []


def _option(name: str, paths: Paths) -> list[str]:
    """An option of a command and its values; nothing where there are none."""
    return [name, *([paths] if isinstance(paths, str) else paths)] if paths else []


def _folder(paths: Paths) -> Paths:
    """The folder of a file; nothing where there is none."""
    return str(Path(paths).parent) if isinstance(paths, str) else paths


def _stamps(paths: list[str]) -> list[str]:
    """Path, size and time of each file that is there."""
    found = [(path, Path(path).stat()) for path in paths if Path(path).is_file()]
    return [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in found]
