"""Every condition type and every pair of types: configured, stored next to the images, trained, stopped and resumed,
sampled with guidance, evaluated, exported, and sampled where this package cannot be imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from PIL import Image

import image_diffusion.stages.crop
import image_diffusion.stages.detect
import image_diffusion.stages.embed
import image_diffusion.stages.evaluate
import image_diffusion.stages.export
import image_diffusion.stages.sample
import image_diffusion.stages.train
from exported import load
from image_diffusion.core.config.base import parse, to_yaml
from image_diffusion.core.number_columns import NumberColumns
from image_diffusion.core.types import EMBEDDING, IMAGE
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.pairs import write_pairs
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.experiments.resolve import load_all, write_stages
from image_diffusion.metrics.samples import read_samples
from image_diffusion.systems.diffusion.conditioning import Part, VectorCondition
from image_diffusion.systems.diffusion.conditions.base import ConditionInputs, ConditionPart, ImageSource
from image_diffusion.systems.diffusion.conditions.vector import LabelCondition
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.pairs.inputs import PairInputs
from image_diffusion.systems.pairs.numbers import NumberPairs
from image_diffusion.training.load_model import load_model
from image_diffusion.workflow.inputs import Files
from image_diffusion.workflow.plans import Plans

COUNT, HELD_OUT = 48, 0.25
NETWORKS = {
    "dit": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4, "embedding_tokens": 2},
    "iddpm": {"channels": 32, "multipliers": [1], "num_res_blocks": 1, "attention_resolutions": []},
    "rin": {"width": 16, "patch": 4, "depth": 1, "num_latents": 4, "num_heads": 1, "head_width": 8},
}
SAMPLER = {"type": "ddim", "num_steps": 2}
CAPTIONS = {"type": "captions", "encoder": {"type": "hashed", "dim": 8}, "num_tokens": 4}
WRITTEN: dict[str, dict[str, Any]] = {
    "text": {"pairs": CAPTIONS, "sample": {"prompts": ["a photo of a dark", "a photo of a light"]}},
    "embedding": {"pairs": {"type": "hashed"}},
    "numbers": {"pairs": {"type": "numbers", "columns": ["age", "dose"], "table": "numbers.csv"}},
    "image from self": {"part": {"gray": True}},
    "image from pairs": {"pairs": {"type": "images", "path": "masks", "channels": 1}},
}
"""Sections of an experiment by the condition part that needs them; parts that need none are omitted."""


def parts_of(union: Any) -> Iterator[type[ConditionPart]]:
    """Yield the condition parts of a union type, also of one nested in a list."""
    if isinstance(union, type):
        if issubclass(union, ConditionPart):
            yield union
        return
    for argument in get_args(union):
        yield from parts_of(argument)


def name_of(part: type[ConditionPart]) -> str:
    (kind,) = get_args(part.model_fields["type"].annotation)
    source = part.model_fields.get("source")
    return kind if source is None else f"{kind} from {get_args(source.annotation)[0]}"


def together(union: Any) -> list[tuple[str, ...]]:
    """Return each part on its own, and all pairs of different types."""
    names = list(dict.fromkeys(map(name_of, parts_of(union))))
    pairs = [both for both in combinations(names, 2) if both[0].split()[0] != both[1].split()[0]]
    return [*((name,) for name in names), *pairs]


CASES = [
    *(("dit", *parts) for parts in together(Part)),
    *((system, *parts) for system in ("iddpm", "rin") for parts in together(VectorCondition)),
]


def experiment(folder: Path, system: str, *parts: str) -> dict[str, Any]:
    """Return an experiment whose condition has these parts."""
    conditions, sets, sample = [], [], {"num_samples": 8, "sampler": SAMPLER, "precision": "float32"}
    for name in parts:
        kind, _, source = name.partition(" from ")
        written = WRITTEN.get(name, {})
        conditions.append({"type": kind} | ({"from": source} if source else {}) | written.get("part", {}))
        located = {
            key: str(folder / value) for key, value in written.get("pairs", {}).items() if key in ("table", "path")
        }
        sets += [written["pairs"] | located] if "pairs" in written else []
        sample |= written.get("sample", {})
    alone = {name.split()[0]: 0.25 for name in parts} if len(parts) > 1 else {}
    scales = {name.split()[0]: scale for name, scale in zip(reversed(parts), (2.0, 1.5), strict=False)}
    guidance = {"scales": scales} if len(parts) > 1 else {"guidance_scale": 2.0}
    objective = {"drop_probabilities": alone} if alone else {}
    class_tokens = {"class_tokens": 2} if system == "dit" and "label" in parts else {}
    process = {"process": {"type": "discrete", "num_timesteps": 20}} if system != "rin" else {}
    return {
        "data": {
            "name": "x", "source": {"type": "folder", "path": str(folder / "in")}, "resolution": 8, "num_shards": 2,
            "validation_fraction": HELD_OUT,
        },
        "system": {
            "type": system, "network": NETWORKS[system] | class_tokens, "condition": conditions, **process,
            "objective": {"type": "denoising", "prediction": "v", "label_drop_probability": 0.25} | objective,
        },
        "train": {
            "steps": 2, "global_batch": 8, "checkpoint": {"every_steps": 1}, "validate_every_steps": 2,
            "validation_samples": 4, "grid_every_steps": 2, "ema": {"rates": [0.5], "warmup": None, "update_every": 1},
            "optimizer": {"type": "adamw", "lr": 0.05}, "schedule": {"type": "constant"},
        },
        "preview": sample | {"num_samples": 2},
        "sample": sample | {"guidance": guidance},
        "evaluate": {"detectors": ["inpipe"], "copies": False},
        **({"pairs": sets} if sets else {}),
        "export": {"format": "pipeline"},
    }  # fmt: skip


def write_data(folder: Path) -> None:
    """Write images of two classes, masks of all but one image, and a table with numbers of all but another."""
    draw, lines = np.random.default_rng(0), ["path,age,dose"]
    for number in range(COUNT):
        name = f"{('dark', 'light')[number % 2]}/{number:02d}.png"
        mask = np.zeros((8, 8), dtype=np.uint8)
        mask[:, number % 5 : number % 5 + 4] = 255
        pixels = draw.integers(0, 80, (8, 8, 3)) + 60 * (number % 2) + mask[..., None] // 3
        for path, image in ((folder / "in" / name, pixels), (folder / "masks" / name, mask)):
            path.parent.mkdir(parents=True, exist_ok=True)
            if number != 3 or path.parts[-3] == "in":
                Image.fromarray(image.astype(np.uint8)).save(path)
        if number != 4:
            lines.append(f"{name},{20 + number},{'' if number % 3 == 0 else number / 100}")
    (folder / "numbers.csv").write_text("\n".join(lines))


def command(stage: Any, *arguments: Any) -> None:
    """Run a stage's command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["verb", *map(str, arguments)])
        stage.main()


class Made:
    """Experiments by case, made on demand, and the data sets that they share."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, folder / "results"
        write_data(folder)

    def plan(self, case: tuple[str, ...]) -> tuple[str, Files]:
        """Configure an experiment; return its name and the files that the rules pass to its stages."""
        name = "_".join(case).replace(" ", "-")
        path = self.folder / f"{name}.yaml"
        path.write_text(to_yaml(experiment(self.folder, *case)))
        ((_, loaded),) = load_all([path]).values()
        write_stages(name, loaded, self.results)
        return name, Files(str(self.results), Plans.read(self.results, [name]))

    def store(self) -> None:
        """Crop the images, and train the detector that all experiments share."""
        (plan,) = self.plan(CASES[0])[1].plans.by_name.values()
        dataset = self.results / "datasets" / plan.dataset
        crops = dataset / "crops" / "manifest.json"
        command(image_diffusion.stages.crop, "--config", plan.configs["crop"], "--output", crops, "--processes", 1)
        command(image_diffusion.stages.detect, "--data", crops.parent, "--output", dataset / "detector")

    def trained(self, case: tuple[str, ...]) -> Path:
        """Train for two steps; return the weights, and check that a training stopped after step 1 resumes to them."""
        name, files = self.plan(case)
        (plan,) = files.plans.by_name.values()
        weights = self.results / name / "train" / "weights.safetensors"
        if weights.is_file():
            return weights
        dataset = self.results / "datasets" / plan.dataset
        crops = dataset / "crops" / "manifest.json"
        for pairs in plan.pairs:
            job = {"dataset": plan.dataset, "pairs": pairs}
            if not (dataset / pairs).exists():
                given = ("--config", files.pair_config(job), "--output", dataset / pairs / "manifest.json")
                command(image_diffusion.stages.embed, *given, *files.pair_options(job))
        given = (
            "--config",
            plan.configs["train"],
            "--data",
            crops,
            *files.options("pairs")["pairs"]({"experiment": name}),
        )
        command(image_diffusion.stages.train, *given, "--output", weights)
        resumed = self.folder / name / "weights.safetensors"
        command(image_diffusion.stages.train, *given, "--output", resumed, "--set", "train.steps=1")
        assert resumed.read_bytes() != weights.read_bytes()
        command(image_diffusion.stages.train, *given, "--output", resumed)
        assert resumed.read_bytes() == weights.read_bytes()
        return weights

    def sampled(self, case: tuple[str, ...], *changes: str) -> Path:
        """Sample a trained experiment; return its samples.npz."""
        weights, (name, files) = self.trained(case), self.plan(case)
        options = files.options("small_images", "embeddings").values()
        given = [word for option in options for word in option({"experiment": name})]
        output = weights.parents[1] / ("-".join(("samples", *changes))) / "samples.npz"
        sets = [word for change in changes for word in ("--set", change)]
        config = files.config("sample")({"experiment": name})
        command(
            image_diffusion.stages.sample, "--config", config, "--weights", weights, *given, *sets, "--output", output
        )
        return output

    def exported(self, case: tuple[str, ...]) -> list[Any]:
        """Export a trained experiment; return its folder and the arguments that reproduce its samples."""
        weights, (name, files) = self.trained(case), self.plan(case)
        samples, folder = weights.parents[1] / "samples" / "samples.npz", weights.parents[1] / "diffusers"
        if not folder.exists():
            config = files.config("export")({"experiment": name})
            command(image_diffusion.stages.export, "--config", config, "--weights", weights, "--output", folder)
        said, model = json.loads(samples.with_suffix(".json").read_text()), load_model(weights.parent)
        values = said.get("conditions", {}).get("values")
        call: dict[str, Any] = {"seeds": list(range(8)), "sampler": SAMPLER, "output_type": "np"}
        guidance = experiment(self.folder, *case)["sample"]["guidance"]
        call["guidance_scale"] = guidance.get("scales", guidance.get("guidance_scale"))
        if model.spec.num_classes:
            call["class_labels"] = np.load(samples)["arr_1"].tolist()
        if "prompts" in said:
            call["prompt"] = said["prompts"]
        if values is not None:
            call["numbers"] = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        (plan,) = files.plans.by_name.values()
        crops = open_shards(self.results / "datasets" / plan.dataset / "crops", "validation")
        held_out = open_shards(self.results / "datasets" / plan.dataset / "crops", "validation")
        for pairs in plan.pairs:
            held_out.join(open_shards(self.results / "datasets" / plan.dataset / pairs, "all"))
        settings = SampleConfig.model_validate(experiment(self.folder, *case)["sample"])
        images = ImageSource(model.spec, crops)
        system: Any = model.system
        request = system.conditioning.sampling_request(
            ConditionInputs(settings, torch.arange(8), model.pairs, held_out, images)
        )
        for name, argument in ((EMBEDDING, "image_embeds"), (IMAGE, "image")):
            if name in request.conditions:
                call[argument] = request.conditions[name].tolist()
        return [str(folder), call, str(folder.parent / "drawn.npy")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    experiments = Made(tmp_path_factory.mktemp("conditions"))
    experiments.store()
    return experiments


@pytest.mark.parametrize("case", CASES, ids="_".join)
def test_every_pair_of_conditions_trains_resumes_and_samples_with_guidance(made: Made, case: tuple[str, ...]) -> None:
    model = load_model(made.trained(case).parent)
    kinds = [WRITTEN[name]["pairs"]["type"] for name in case[1:] if "pairs" in WRITTEN.get(name, {})]
    assert [{"hashed": "pairs"}.get(kind, kind) for kind in kinds] == list(model.pairs)
    guided, plain = made.sampled(case), made.sampled(case, "sample.guidance={guidance_scale: 1, scales: null}")
    pixels = [np.load(path)["arr_0"] for path in (guided, plain)]
    assert pixels[0].shape == (8, 8, 8, 3) and not np.array_equal(*pixels)
    if len(case) == 3:  # one scale per part differs from one scale for both
        together = np.load(made.sampled(case, "sample.guidance={guidance_scale: 2, scales: null}"))["arr_0"]
        assert not np.array_equal(pixels[0], together) and not np.array_equal(pixels[1], together)
    if case[0] == "dit":
        files = made.plan(case)[1]
        judged, dataset = {"experiment": next(iter(files.plans.by_name))}, made.results / "datasets" / "x-8"
        metrics = guided.parents[1] / "metrics.json"
        command(
            image_diffusion.stages.evaluate, "--config", files.config("evaluate")(judged), "--samples", guided,
            "--weights", guided.parents[1] / "train" / "weights.safetensors", "--data", dataset / "crops",
            "--detector", dataset / "detector", *files.options("judged_pairs")["judged_pairs"](judged),
            "--report", guided.parents[1] / "evaluation", "--output", metrics,
        )  # fmt: skip
        found = json.loads(metrics.read_text())["metrics"]
        assert "inpipe_fd" in found and ("psnr" in found) == any(name.startswith("image") for name in case)


@pytest.mark.slow
def test_every_pair_of_conditions_samples_without_the_package(made: Made, tmp_path: Path) -> None:
    cases = [case for case in CASES if case[0] == "dit"]
    for case in cases:
        made.sampled(case)
    calls = [made.exported(case) for case in cases]
    load(calls, tmp_path)
    for case, (folder, _, drawn) in zip(cases, calls, strict=True):
        here = read_samples(Path(folder).parent / "samples" / "samples.npz").gather(np.arange(8)).movedim(1, -1)
        difference = np.abs(here.numpy().astype(int) - np.load(drawn).astype(int)).max()
        assert difference <= 1, (case, difference)


def test_new_condition_types_join_the_cases_automatically() -> None:
    class Another(LabelCondition):
        type: Literal["another"] = "another"  # type: ignore[assignment]

    cases = together(Part | Another)
    assert ("another",) in cases and {(name, "another") for (name,) in together(Part)[:6]} <= set(cases)
    assert experiment(Path(), "dit", "another")["system"]["condition"] == [{"type": "another"}]


def test_images_missing_from_one_set_are_left_out_of_all(made: Made) -> None:
    made.trained(("dit", "numbers", "image from pairs"))
    dataset = made.results / "datasets" / "x-8"
    crops, *sets = (open_shards(dataset / name, "all") for name in ("crops", "numbers", "images"))
    assert [shards.num_samples for shards in (crops, *sets)] == [COUNT, COUNT - 1, COUNT - 1]
    for shards in sets:
        crops.join(shards)
    rows = np.arange(crops.num_samples)
    assert crops.num_samples == COUNT - 2 == sets[0].num_samples == sets[1].num_samples
    assert list(crops.joined_sets) == ["numbers", "images"]
    numbers, images = crops.gather_joined(rows)
    for kind, together in (("numbers", numbers), ("images", images)):
        alone = open_shards(dataset / "crops", "all").join(open_shards(dataset / kind, "all"))
        kept = [
            row
            for row, content in enumerate(alone.gather(np.arange(alone.num_samples)))
            if content.tolist() in crops.gather(rows).tolist()
        ]
        assert torch.equal(alone.gather_of(kind, np.array(kept)), together), kind
    with pytest.raises(ValueError, match="Two sets hold images. Name one set of each kind."):
        crops.join(open_shards(dataset / "images", "all"))


def test_duplicate_images_keep_their_own_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One shard has three pairs of equal images: an image of one pair is held out, and one of another has no number."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    for number in range(6):
        (tmp_path / "in").mkdir(exist_ok=True)
        Image.fromarray(pixels[number % 3]).save(tmp_path / "in" / f"{number}.png")
    (tmp_path / "numbers.csv").write_text("\n".join(["path,age", *(f"{n}.png,{n}" for n in (0, 1, 3, 4, 5))]))
    source = {"type": "folder", "path": str(tmp_path / "in"), "classes": "none"}
    data = {"name": "x", "source": source, "resolution": 8, "num_shards": 1, "held_out": ["0.png"]}
    crop_dataset(parse(DataConfig, data, "data"), tmp_path / "crops")
    numbers = parse(NumberPairs, {"columns": ["age"], "table": str(tmp_path / "numbers.csv")}, "pairs")
    made = numbers.build(PairInputs(tmp_path / "crops", None, 1, None, torch.device("cpu")))
    manifest, _ = write_pairs(made, "x", numbers.splits, "float32", tmp_path / "numbers", 0.5)
    ages = {}
    for split in ("train", "validation"):
        joined = open_shards(tmp_path / "crops", split).join(open_shards(tmp_path / "numbers", "all"))
        (rows,) = joined.gather_joined(np.arange(joined.num_samples))
        ages[split] = [row["age"] for row in NumberColumns.described(manifest["pairs"]).values(rows)]
        shown = joined.gather(np.arange(joined.num_samples)).movedim(1, -1).numpy()
        assert all((image == pixels[int(age) % 3]).all() for image, age in zip(shown, ages[split], strict=True))
    assert {split: sorted(values) for split, values in ages.items()} == {"train": [1, 3, 4], "validation": [0]}
    assert "warning: 2 of 5 crops are left out: of equal images in a shard some have no numbers" in (
        capsys.readouterr().err
    )


def test_list_of_one_set_equals_the_set(made: Made, tmp_path: Path) -> None:
    alone, listed = (experiment(made.folder, "dit", "numbers") for _ in range(2))
    alone["pairs"] = listed["pairs"][0]
    for name, sections in (("alone", alone), ("listed", listed)):
        (tmp_path / f"{name}.yaml").write_text(to_yaml(sections))
        ((_, loaded),) = load_all([tmp_path / f"{name}.yaml"]).values()
        write_stages("x", loaded, tmp_path / name)
    for path in sorted((tmp_path / "alone").rglob("*.*")):
        same = path.read_text() == (tmp_path / "listed" / path.relative_to(tmp_path / "alone")).read_text()
        assert same or path.name == "plan.json", path


NUMBERS = {"type": "numbers", "columns": ["age"], "table": "numbers.csv"}

DROPS = {"label_drop_probability": 0.1}


def guided(objective: dict[str, Any], guidance: dict[str, Any], **sample: Any) -> dict[str, Any]:
    """Return sections of an experiment on words and numbers with these drop probabilities and guidance."""
    condition = [{"type": "text"}, {"type": "numbers"}]
    system = {"type": "dit", "network": NETWORKS["dit"], "condition": condition, "objective": objective}
    words = WRITTEN["text"]["sample"]
    return {"system": system, "sample": words | {"guidance": guidance} | sample}


@pytest.mark.parametrize(
    ("parts", "sections", "message"),
    [
        (["numbers"], {"pairs": [NUMBERS, NUMBERS]}, "pairs: two sets hold numbers. Name one set of each kind."),
        (["numbers"], {"pairs": []}, "the list is empty. Name a set, such as {type: captions}, or leave the key out."),
        (
            ["numbers"],
            {"pairs": [NUMBERS, CAPTIONS]},
            "pairs has captions, but system.condition.type is numbers: nothing reads them. Leave them out, or add "
            "{type: text} to system.condition.",
        ),
        (
            ["text", "numbers", "image from pairs"],
            {"pairs": [CAPTIONS, NUMBERS]},
            "system.condition.type is [text, numbers, image], but pairs.type is captions, numbers. It needs images: "
            "add {type: images, path: FOLDER} to the list pairs.",
        ),
        (
            ["embedding", "numbers"],
            {"sample": {"embeddings": "drawn"}},
            "sample.conditions is unset, so held-out images provide the conditions, but sample.embeddings names others",
        ),
        (
            ["embedding", "numbers"],
            {"data": {"name": "x", "source": {"type": "digits"}, "resolution": 8}},
            "sample.embeddings is unset, so held-out images provide the embeddings, but data has no held-out images.",
        ),
        (
            ["text", "numbers"],
            guided({"drop_probabilities": {"image": 0.1}}, {}),
            "drop_probabilities names image, but system.condition.type is [text, numbers]. Leave it out.",
        ),
        (
            ["text", "numbers"],
            guided({"drop_probabilities": {"text": 0.1, "numbers": 0}}, {"scales": {"text": 2, "numbers": 3}}),
            "sample.guidance.scales names numbers, but the network never learns to do without that alone. Known: text. "
            "Leave it out, or train with system.objective.drop_probabilities: {numbers: 0.1}.",
        ),
        (
            ["text", "numbers"],
            guided({"drop_probabilities": {"text": 0.1}}, {"scales": {"text": 2}}, weaker_weights="weaker"),
            "sample.guidance.scales is set, but sample.weaker_weights does not go with it. Leave one of the two out.",
        ),
        (
            ["text", "numbers"],
            guided({"drop_probabilities": {"text": 0.1}}, {"scales": {"text": 2}, "guidance_scale": 2}),
            "guidance_scale is 2 and scales is set, each in place of the other. Leave one of the two out.",
        ),
        (
            ["text", "numbers"],
            guided({}, {}, negative_prompt="a cat"),
            "sample.negative_prompt is set, but guidance leads away from no prompt. Set sample.guidance.guidance_scale",
        ),
        (
            ["text", "numbers"],
            guided(DROPS, {"guidance_scale": 2}, negative_prompt="a cat", weaker_weights="weaker"),
            "sample.negative_prompt is set, but guidance leads away from sample.weaker_weights. Leave one of the two",
        ),
        (
            ["text", "numbers"],
            guided({"drop_probabilities": {"numbers": 0.1}}, {"scales": {"numbers": 2}}, negative_prompt="a cat"),
            "sample.negative_prompt is set, but guidance leads away from no prompt. Add text to sample.guidance.scales",
        ),
    ],
    ids=[
        "twice",
        "empty",
        "not read",
        "missing",
        "two sources",
        "none held out",
        "no part",
        "not alone",
        "weaker",
        "both",
        "no guidance",
        "two negatives",
        "no scale",
    ],
)
def test_incompatible_sets_are_reported_in_one_line(
    made: Made, tmp_path: Path, parts: list[str], sections: dict[str, Any], message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(to_yaml(experiment(made.folder, "dit", *parts) | sections))
    with pytest.raises(ValueError) as caught:
        load_all([path])
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1, caught.value


def test_last_line_of_embed_counts_rows_and_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"type": "numbers", "columns": ["age", "dose", "time"]}
    config = {"name": "x", "pairs": numbers, "num_shards": 1, "source": None}
    (tmp_path / "embed.yaml").write_text(to_yaml(config))
    manifest = {"num_samples": 160, "shards": [1], "quarantined": 0}
    made = (SimpleNamespace(kind="numbers", shape=(3, 2)), manifest, 1)
    monkeypatch.setattr(image_diffusion.stages.embed, "embed", lambda *_: made)
    command(image_diffusion.stages.embed, "--config", tmp_path / "embed.yaml", "--output", tmp_path / "manifest.json")
    assert "embed: 160 rows of 3 columns in 1 shards" in capsys.readouterr().out
