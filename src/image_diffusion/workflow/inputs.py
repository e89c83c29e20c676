"""Input files of each stage, and the command-line options for optional ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from image_diffusion.core.files.atomic import digest, sha256_once
from image_diffusion.data.sources.folder import Walk
from image_diffusion.workflow.plans import CHOSEN, STAGES, STUDIES_FOLDER, STUDY_PAGE, Plan, Plans, Wildcards, has

WEIGHTS = "weights.safetensors"
OTHER_WEIGHTS = {"checkpoint": "--step", "ema": "--average"}
"""Settings whose variation needs other weights of the training, and the option of `ema` that selects these weights."""


@dataclass(frozen=True)
class Optional:
    """Files that not every experiment has. option: of the command. form: converts the files to values of the option."""

    option: str | None
    files: list[str]
    form: Callable[[list[str]], list[str]] = list

    @property
    def words(self) -> list[str]:
        """The option and its values; empty without files."""
        return option_of(self.option, self.form(self.files)) if self.option else []


@dataclass(frozen=True)
class Files:
    """The inputs of the rules, as functions of a job's wildcards."""

    results: str
    """The folder of all results."""
    plans: Plans

    # ---- Targets

    def everything(self, wildcards: Wildcards) -> Iterator[str]:
        """Yield the default targets of `snakemake`."""
        if self.plans.studies and not self.plans.requested:
            for name in self.plans.studies:
                yield from (f"{self.results}/{STUDIES_FOLDER}/{name}/{file}" for file in (STUDY_PAGE, "tracked.json"))
            return
        yield f"{self.results}/summary.html"
        for name in self.plans.by_name:
            yield from self.experiment_targets(name)

    def experiment_targets(self, name: str) -> Iterator[str]:
        """Yield the files that are made from one experiment only."""
        yield from self._outputs_of(name)
        yield from self._data(self.plans.by_name[name])
        yield f"{self.results}/{name}/tracked.json"
        yield f"{self.results}/{name}/report/index.html"

    def outputs(self, wildcards: Wildcards) -> list[str]:
        """Return the final files of an experiment, except its report and its tracking record; without an experiment,
        those of all."""
        names = [wildcards["experiment"]] if has(wildcards, "experiment") else self.plans.by_name
        return [path for name in names for path in self._outputs_of(name)]

    def study_runs(self, wildcards: Wildcards) -> list[str]:
        """Return the final files of a study's runs."""
        runs = dict.fromkeys(self.plans.studies[wildcards["study"]].runs)
        return [path for run in runs for path in [*self._outputs_of(run), *self._data(self.plans.by_name[run])]]

    def _outputs_of(self, name: str) -> list[str]:
        plan = self.plans.by_name[name]
        paths = ["train/weights.safetensors", "train/model.json", "metrics.json"]
        if plan.makes_samples:
            paths += ["samples/samples.npz", "samples/samples.json", "samples/grid.png"]
        if plan.makes_embeddings:
            paths += ["samples/embeddings.json"]
        if plan.export != "none":
            paths += ["diffusers"]
        if plan.synthesizes:
            paths += ["synthetic"]
        paths += [f"sweep/{axis}/curve.json" for axis in plan.sweep]
        tokens = [f"{self._dataset(plan)}/{plan.tokens}/manifest.json"] if plan.tokens else []
        return [*(f"{self.results}/{name}/{path}" for path in paths), *tokens]

    def _data(self, plan: Plan) -> list[str]:
        """Return the files by which a data set is read. Snakemake makes a missing file only if it is a target."""
        parts = [*(["crops"] if _has_crops(plan) else []), plan.codec, *plan.pairs]
        manifests = [f"{self._dataset(plan)}/{part}/manifest.json" for part in parts if part]
        has_detector = (
            any(pairs["of_detector"] for pairs in plan.pairs.values()) or plan.synthesizes or _has_detector(plan)
        )
        detector = [self._detector(plan.dataset)] if has_detector else []
        return [*manifests, *detector, *self._references(plan)]

    def configurations(self, wildcards: Wildcards) -> list[str]:
        """Return the files an experiment was made from: configurations of its stages, and manifests of its data."""
        plan = self.plans.plan_for(wildcards)
        return [*plan.configs.values(), *(path for path in self._data(plan) if path.endswith("/manifest.json"))]

    # ---- Optional inputs

    def inputs(self, *names: str) -> dict[str, Callable[[Wildcards], list[str]]]:
        """Return inputs of a rule: files of the table of `_optional`, by name."""

        def files(name: str) -> Callable[[Wildcards], list[str]]:
            return lambda wildcards: self._optional(self.plans.plan_for(wildcards))[name].files

        return {name: files(name) for name in names}

    def options(self, *names: str) -> dict[str, Callable[[Wildcards], list[str]]]:
        """Return params of a rule: the options that name these files."""

        def words(name: str) -> Callable[[Wildcards], list[str]]:
            return lambda wildcards: self._optional(self.plans.plan_for(wildcards))[name].words

        return {name: words(name) for name in names}

    def _optional(self, plan: Plan) -> dict[str, Optional]:
        """Return the optional input files of an experiment, by name."""
        dataset, small = self._dataset(plan), plan.small_images
        detector = [self._detector(plan.dataset)]
        beside = [f"{dataset}/{name}/manifest.json" for name in plan.pairs if plan.pairs_beside]

        def outputs_of(experiment: str | None, *paths: str) -> list[str]:
            return [f"{self.results}/{experiment}/{path}" for path in paths] if experiment else []

        start = plan.start_experiment if plan.start_experiment in self.plans.by_name else None
        sampled = plan.experiment if plan.makes_samples else None
        held_out = small == "validation"
        enlarged = [f"{self._real(plan)}/manifest.json"] if held_out else _listed(small)
        embedded = plan.embeddings is not None and plan.embeddings != "validation"
        return {
            "codec": Optional("--codec-weights", outputs_of(plan.codec_experiment, "train/weights.safetensors")),
            "start": Optional("--init-from", [self._of_weights(start, WEIGHTS)] if start else []),
            "pairs": Optional("--pairs", beside),
            "small_images": Optional(
                "--small-images",
                outputs_of(plan.small_images_experiment, "samples/samples.npz") or enlarged,
                _folders if held_out else list,
            ),
            "embeddings": Optional(
                "--embeddings",
                self._embeddings(plan),
                (lambda files: _listed(plan.embeddings)) if embedded else _folders,
            ),
            "prompts": Optional(None, _listed(plan.prompts)),
            "pictures": Optional(None, plan.pictures),
            "synthesize_table": Optional(None, _listed(plan.synthesize_table)),
            "crop": Optional("--crop", _listed(plan.configs.get("crop")) if plan.pictures else []),
            "datasheet": Optional(None, [f"{dataset}/datasheet/datasheet.json"] if _has_crops(plan) else []),
            "trained_by": Optional("--trained-by", _listed(plan.configs.get("train"))),
            "sample": Optional("--sample", _listed(plan.configs.get("sample"))),
            "samples": Optional(
                "--samples",
                outputs_of(sampled, "samples/samples.npz", "samples/samples.json"),
                lambda files: files[:1],
            ),
            "grid": Optional("--grid", outputs_of(sampled, "samples/grid.png")),
            "encoded": Optional("--encoded", [self._trained_on(plan)] if plan.judged_on_encoded else [], _folders),
            "judged_pairs": Optional("--pairs", beside if plan.judged_on_pairs else [], _folders),
            "reference": Optional(
                "--reference", outputs_of(plan.against_experiment, "samples/samples.npz") or _listed(plan.against)
            ),
            "references": Optional("--references", self._references(plan), _folders),
            "own_features": Optional(
                "--references",
                [path for path in self._references(plan) if path.endswith("/inpipe/reference.json")],
                _folders,
            ),
            "detector": Optional("--detector", detector if _has_detector(plan) else [], _folders),
        }

    def _embeddings(self, plan: Plan) -> list[str]:
        """Return the embeddings that images are sampled from: those of a prior, those of held-out images, or files."""
        if plan.embeddings_experiment:
            return [f"{self.results}/{plan.embeddings_experiment}/samples/embeddings.json"]
        if plan.embeddings == "validation":
            return [f"{self._dataset(plan)}/{part}/manifest.json" for part in (*plan.pairs, "crops")]
        if plan.embeddings is None:
            return []
        files = sorted(str(path) for path in Path(plan.embeddings).glob("*/*_*"))
        return files or [f"{plan.embeddings}/img_emb/img_emb_0.npy"]  # reported as missing by Snakemake

    def _references(self, plan: Plan) -> list[str]:
        return [f"{self._dataset(plan)}/references/{name}/reference.json" for name in plan.references]

    def made_with(self, wildcards: Wildcards) -> list[str]:
        """Return the inputs of `sample`, which `evaluate` reads to generate images that are not stored."""
        plan = self.plans.plan_for(wildcards)
        optional = self._optional(plan)
        names = ("codec", "small_images", "embeddings", "prompts")
        return [] if plan.keeps_samples else [path for name in names for path in optional[name].files]

    def sampling_options(self, wildcards: Wildcards) -> list[str]:
        """Return the options of `evaluate` for generating images that are not stored."""
        plan = self.plans.plan_for(wildcards)
        if plan.keeps_samples:
            return []
        config = self.swept_config(wildcards) if has(wildcards, "axis") else plan.configs["sample"]
        optional = self._optional(plan)
        words = (word for name in ("codec", "small_images", "embeddings") for word in optional[name].words)
        return ["--making", config, *words]

    def pair_sources(self, wildcards: Wildcards) -> list[str]:
        """Return the files that pairs are made from: crops and captions, or source.json for imported embeddings.
        source.json is also included for captions that come with the images, since a caption may change while the images
        do not."""
        plan = self.plans.plan_for(wildcards)
        pairs = plan.pairs[wildcards["pairs"]]
        crops = [f"{self._dataset(plan)}/crops/manifest.json"] if pairs["of_images"] else []
        note = [f"{self._dataset(plan)}/source.json"] if pairs["of_source"] else []
        return [*crops, *note, *_listed(pairs["files"])]

    def pair_detector(self, wildcards: Wildcards) -> list[str]:
        """Return the detector that a set of pairs needs, if any."""
        plan = self.plans.plan_for(wildcards)
        of_detector = plan.pairs[wildcards["pairs"]]["of_detector"]
        return [self._detector(plan.dataset)] if of_detector else []

    def pair_config(self, wildcards: Wildcards) -> str:
        """Return the configuration that pairs are made with."""
        return self.plans.plan_for(wildcards).configs[f"embed-{wildcards['pairs']}"]

    def pair_files(self, wildcards: Wildcards) -> list[str]:
        """Return the options of `embed`, and stamps of a folder or a table of pairs and of the encoder's weights, since
        the time of a folder does not change with its files. Without any, the parameters equal the recorded ones, so no
        pairs are remade."""
        pairs = self.plans.plan_for(wildcards).pairs[wildcards["pairs"]]
        weights = "" if pairs["weights"] is None else str(Path(pairs["weights"]).expanduser())
        folders = [folder for folder in (pairs["files"], weights) if folder and Path(folder).is_dir()]
        stamps = [*map(_stamp_of_folder, folders), *_stamps([weights]), *_digests(_listed(pairs["files"]))]
        return [*self.pair_options(wildcards), *stamps]

    def pair_options(self, wildcards: Wildcards) -> list[str]:
        """Return the options of `embed` that name the sources of pairs."""
        plan = self.plans.plan_for(wildcards)
        of_images = plan.pairs[wildcards["pairs"]]["of_images"]
        crops = ["--data", f"{self._dataset(plan)}/crops/manifest.json"] if of_images else []
        return [*crops, *option_of("--detector", _folders(self.pair_detector(wildcards)))]

    def reference_detector(self, wildcards: Wildcards) -> list[str]:
        """Return the detector of the reference features, if it is trained on the data set itself."""
        own = wildcards["judge"] == "inpipe"
        return [self._detector(wildcards["dataset"])] if own else []

    def reference_detector_option(self, wildcards: Wildcards) -> list[str]:
        """Return the option of `reference` that names the folder of the detector."""
        return option_of("--detector", _folders(self.reference_detector(wildcards)))

    def own_detector(self, wildcards: Wildcards) -> str:
        """Return the detector that is trained on the data set itself."""
        return self._detector(self.plans.plan_for(wildcards).dataset)

    def _detector(self, dataset: str) -> str:
        return f"{self.results}/datasets/{dataset}/detector/detector.json"

    def stamps(
        self, *kinds: Literal["codec_files", "decoder_files", "weaker_files"]
    ) -> Callable[[Wildcards], list[str]]:
        """Return stamps of external files, which change when a file is replaced, even by an older one. kinds: fields of
        the plan that list the files."""
        return lambda wildcards: [
            stamp for kind in kinds for stamp in _stamps(getattr(self.plans.plan_for(wildcards), kind))
        ]

    def sample_stamps(self, wildcards: Wildcards) -> list[str]:
        """Return stamps of the external images and embeddings that samples are made from, and the digest of the table
        of prompts or numbers."""
        plan = self.plans.plan_for(wildcards)
        optional = self._optional(plan)
        names = [name for name in ("small_images", "embeddings") if getattr(plan, name) not in (None, "validation")]
        arrays = [path for name in names for path in optional[name].files]
        return [*_stamps([*plan.pictures, *arrays]), *_digests(_listed(plan.prompts))]

    def synthesize_stamps(self, wildcards: Wildcards) -> list[str]:
        """Return stamps of the decoder and of the weaker network, and the digest of the table of a synthetic set."""
        table = _listed(self.plans.plan_for(wildcards).synthesize_table)
        return [*self.stamps("decoder_files", "weaker_files")(wildcards), *_digests(table)]

    # These repeat an option that the rule has already: without a stamp, the set of all params, which Snakemake
    # compares, equals the recorded one, and existing results are kept.

    def start_stamps(self, wildcards: Wildcards) -> list[str]:
        """Return the option for the weights to start from, and stamps of their files if they are in a folder."""
        plan = self.plans.plan_for(wildcards)
        return [*self._optional(plan)["start"].words, *_stamps(plan.start_files)]

    def detector_stamps(self, wildcards: Wildcards) -> list[str]:
        """Return the option for the detector, stamps of the weights of all detectors of an experiment and of the
        samples that it is compared with, and `sample_stamps` if `evaluate` generates the samples."""
        plan = self.plans.plan_for(wildcards)
        files = [path for paths in plan.detector_files.values() for path in paths]
        made_from = [] if plan.keeps_samples else self.sample_stamps(wildcards)
        return [*self._optional(plan)["detector"].words, *_stamps([*files, *_listed(plan.against)]), *made_from]

    def reference_stamps(self, wildcards: Wildcards) -> list[str]:
        """Return the option of `reference` for the detector, and stamps of the weights of the detector."""
        plans = [plan for plan in self.plans.by_name.values() if plan.dataset == wildcards["dataset"]]
        files = {path for plan in plans for path in plan.detector_files.get(wildcards["judge"], [])}
        return [*self.reference_detector_option(wildcards), *_stamps(sorted(files))]

    # ---- Configurations of stages

    def config(self, stage: str) -> Callable[[Wildcards], str]:
        """Return the configuration a stage runs with."""
        return lambda wildcards: self.plans.plan_for(wildcards).configs[stage]

    def configs_before(self, stage: str) -> Callable[[Wildcards], list[str]]:
        """Return the configurations of earlier stages: after a failed stage, no later one counts as up to date."""
        # A set of pairs depends on no codec: experiments with different codecs share it.
        before = ("crop",) if stage == "embed" else STAGES[: STAGES.index(stage)]

        def configs(wildcards: Wildcards) -> list[str]:
            plan, others = self.plans.plan_for(wildcards), list[tuple[str | None, str]]()
            if stage in ("sample", "evaluate"):
                bases = (plan.small_images_experiment, plan.embeddings_experiment)
                others += [(base, name) for base in bases for name in ("train", "sample")]
            if stage == "train":
                others.append((plan.start_experiment, "train"))
            own = [plan.configs[key] for name in before for key in plan.configs if key.split("-")[0] == name]
            return own + [self.plans.by_name[base].configs[name] for base, name in others if base]

        return configs

    def of_model(self, stage: str, before: str) -> dict[str, Callable[[Wildcards], str | list[str]]]:
        """Return the inputs of a rule that uses a trained model: its configuration, those of the stages before
        `before`, the weights and their description."""

        def file(name: str) -> Callable[[Wildcards], str]:
            return lambda wildcards: self._of_weights(wildcards["experiment"], name)

        files = {"weights": file(WEIGHTS), "model": file("model.json")}
        return {"config": self.config(stage), "before": self.configs_before(before), **files}

    def _of_weights(self, experiment: str, name: str) -> str:
        """Return a file in the folder of the weights that the stages after training use."""
        return f"{self.results}/{experiment}/{self.plans.by_name[experiment].weights}/{name}"

    # ---- Data

    def training_data(self, wildcards: Wildcards) -> str:
        """Return the manifest of what an experiment trains on: latents, crops, or pairs of embeddings."""
        return self._trained_on(self.plans.plan_for(wildcards))

    def real_data(self, wildcards: Wildcards) -> str:
        """Return the manifest of the real data that a model is compared with: crops, the pairs of a prior, or imported
        latents, of which only the classes are used."""
        return f"{self._real(self.plans.plan_for(wildcards))}/manifest.json"

    def to_encode(self, wildcards: Wildcards) -> str:
        """Return the input of encoding: the manifest of the crops, or source.json for imported latents."""
        plan = self.plans.plan_for(wildcards)
        return f"{self._dataset(plan)}/{'crops/manifest' if plan.has_images else 'source'}.json"

    def _dataset(self, plan: Plan) -> str:
        return f"{self.results}/datasets/{plan.dataset}"

    def _trained_on(self, plan: Plan) -> str:
        return f"{self._dataset(plan)}/{plan.learns_from_pairs or plan.codec or 'crops'}/manifest.json"

    def _real(self, plan: Plan) -> str:
        return f"{self._dataset(plan)}/{plan.learns_from_pairs or ('crops' if plan.has_images else plan.codec)}"

    # ---- Other weights of a training: checkpoints and sweeps

    def newest_checkpoint(self, wildcards: Wildcards) -> str:
        """Return the newest checkpoint if step=latest, since a newer checkpoint gives other images; else ""."""
        folder = Path(self.results, wildcards["experiment"], "train", "state")
        if wildcards["step"] != "latest":
            return ""
        checkpoints = []
        for path in folder.glob("*/step-*"):
            with suppress(FileNotFoundError):  # training continues and removes old checkpoints
                checkpoints.append((path.stat().st_mtime_ns, path))
        return str(max(checkpoints)[1].relative_to(folder)) if checkpoints else ""

    def swept_config(self, wildcards: Wildcards) -> str:
        """Return the configuration that one point of a curve is sampled with."""
        return self.plans.plan_for(wildcards).sweep[wildcards["axis"]][wildcards["value"]]

    def swept_weights(self, wildcards: Wildcards) -> str:
        """Return the weights that one point of a curve is sampled from."""
        axis = wildcards["axis"]
        if axis not in OTHER_WEIGHTS:
            return self._of_weights(wildcards["experiment"], WEIGHTS)
        return f"{self.results}/{wildcards['experiment']}/sweep/{axis}/{wildcards['value']}/weights/{WEIGHTS}"

    def choosing_curve(self, wildcards: Wildcards) -> list[str]:
        """Return the curve that states the chosen step, if the weights of the chosen step are requested."""
        curve = f"{self.results}/{wildcards['experiment']}/sweep/{wildcards['axis']}/curve.json"
        return [curve] if wildcards["value"] == CHOSEN else []

    def which_weights(self, wildcards: Wildcards) -> list[str]:
        """Return the option of `ema` that selects weights of the training."""
        chosen = option_of("--chosen-in", self.choosing_curve(wildcards))
        return chosen or [OTHER_WEIGHTS[wildcards["axis"]], wildcards["value"]]

    def choosing_option(self, wildcards: Wildcards) -> list[str]:
        """Return the option of `sweep` for the rule that chooses a step."""
        rule = self.plans.plan_for(wildcards).choose
        return option_of("--choose", [rule] if rule and wildcards["axis"] == "checkpoint" else [])

    def swept_points(self, wildcards: Wildcards) -> dict[str, str]:
        """Return the metrics file of each point of a curve, by value."""
        plan, axis = self.plans.plan_for(wildcards), wildcards["axis"]
        return {
            value: f"{self.results}/{plan.experiment}/sweep/{axis}/{value}/metrics.json" for value in plan.sweep[axis]
        }


def _has_crops(plan: Plan) -> bool:
    return plan.has_images and all(pairs["of_images"] for pairs in plan.pairs.values())


def _has_detector(plan: Plan) -> bool:
    return "inpipe" in plan.detectors and not plan.learns_from_pairs


def _listed(path: str | None) -> list[str]:
    return [path] if path else []


def _folders(paths: list[str]) -> list[str]:
    return [str(Path(path).parent) for path in paths]


def option_of(name: str, values: list[str]) -> list[str]:
    """Return an option of a command and its values; empty without values."""
    return [name, *values] if values else []


def _stamp_of_folder(folder: str) -> str:
    """Return a digest that changes with each file of a folder, by names, sizes and times."""
    return digest(sorted([group.folder, group.digest()] for group in Walk(folder).file_groups()))


def _stamps(paths: list[str]) -> list[str]:
    """Return path, size and time of each existing file."""
    stats = [(path, Path(path).stat()) for path in paths if Path(path).is_file()]
    return [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]


def _digests(tables: list[str]) -> list[str]:
    """Return path and sha256 of each existing table. Snakemake asks for each job, so a table is hashed once."""
    return [f"{path} {sha256_once(Path(path))}" for path in tables if Path(path).is_file()]
