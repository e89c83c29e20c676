"""Experiments proposed from a folder and a budget: facts on the folder, rules, and the written file."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from image_diffusion.core.config.base import dump, parse
from image_diffusion.core.config.yaml12 import from_text
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.types import DataSpec
from image_diffusion.data.masks import MaskFacts
from image_diffusion.data.quality.facts import CaptionFacts, Facts, describe_source, source_of
from image_diffusion.data.sources.folder import Folder
from image_diffusion.data.sources.table import Table
from image_diffusion.experiments.choices import choices
from image_diffusion.experiments.experiment import Experiment, load_experiment, parse_experiment
from image_diffusion.experiments.proposal import Proposal, least_steps, parsed, propose, seconds_of
from image_diffusion.experiments.request import DESIGNS, Machine, Request, Speed, classes_of, resolution_of, start_of
from image_diffusion.experiments.resolve import load_all
from image_diffusion.systems import AnySystem
from image_diffusion.tools.budget import measured, propose_for
from tiny_autoencoders import write_autoencoder

CPU, GPU = Machine(1, 0, 8.0, 2.5), Machine(16, 1, 72.0, 4.0)
MANY = Facts(Folder(path="images"), 20_000, (2_000,) * 10, 64, (1.0, 1.0), 3)
FEW = replace(MANY, num_images=500, per_class=(50,) * 10)


def at(operations_per_s: float, muon: float = 1.3) -> Callable[[Experiment], Speed]:
    """Return a speed model with this rate; a step takes six operations for each parameter, token and image. muon:
    relative duration of a step with Muon."""

    def speed(experiment: Experiment) -> Speed:
        shape = experiment.system.network.shape  # type: ignore[union-attr]
        height, width = experiment.data.size
        tokens = (height // shape.patch) * (width // shape.patch)
        pass_s = 2 * 18 * shape.depth * shape.width**2 * tokens / operations_per_s
        longer = muon if experiment.train.optimizer.type == "muon" else 1.0
        return Speed(3 * longer * pass_s * experiment.train.global_batch, pass_s, 5e-4, 1e-3, 0.7)

    return speed


def proposed(
    facts: Facts, budget: str, machine: Machine = CPU, operations_per_s: float = 4e10
) -> tuple[Proposal, Experiment]:
    proposal = propose(facts, "images", machine, budget, at(operations_per_s))
    return proposal, parse_experiment(from_text(proposal.text), "the proposal")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10min", 600), ("1.5 h", 5400), ("2d", 172_800)])
def test_a_budget_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "6", "h", "-1h", "0min", "6 hours", "1h30min"])
def test_invalid_budgets_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration\. Give a number and a unit: 10min, 6h or 2d\."):
        seconds_of(text)


@pytest.mark.parametrize(
    ("changes", "machine", "resolution"),
    [
        ({"short_side": 32}, CPU, 32),
        ({"short_side": 28}, CPU, 32),
        ({"short_side": 24}, CPU, 16),
        ({"short_side": 8}, CPU, 16),
        ({"short_side": 1000}, CPU, 64),
        ({"short_side": 1000}, GPU, 256),
        ({"short_side": 200, "aspect": (0.66, 1.5)}, CPU, 64),
        ({"short_side": 200, "aspect": (1.5, 1.5)}, CPU, (64, 96)),
        ({"short_side": 200, "aspect": (0.5, 0.7)}, CPU, (112, 64)),
        ({"short_side": 200, "aspect": (4.0, 9.0)}, CPU, (64, 128)),
    ],
)
def test_the_resolution_follows_from_the_images_and_the_device(
    changes: dict[str, object], machine: Machine, resolution: object
) -> None:
    assert resolution_of(replace(MANY, **changes), machine, 8) == resolution  # type: ignore[arg-type]


def test_folders_with_few_images_are_not_classes() -> None:
    assert classes_of(FEW) == (50,) * 10
    single = replace(FEW, per_class=(1,) * 500)
    assert classes_of(single) == ()
    text = proposed(single, "10min")[0].text
    assert "classes: none" in text and "guidance" not in text and "label_init_std" not in text


def test_designs_need_more_steps_the_larger_they_are() -> None:
    for designs in DESIGNS.values():
        assert [design.operations for design in designs] == sorted(design.operations for design in designs)
        least = [least_steps(designs, number) for number in range(len(designs))]
        assert least == sorted(least) and least[0] == 200
    assert least_steps(DESIGNS["cpu"], 1) == 1500


@pytest.mark.parametrize("facts", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize(("machine", "operations_per_s"), [(CPU, 4e10), (GPU, 1e14)], ids=["cpu", "gpu"])
def test_larger_budgets_never_give_smaller_proposals(facts: Facts, machine: Machine, operations_per_s: float) -> None:
    budgets = ["6min", "8min", "10min", "20min", "40min", "1h", "3h", "6h", "12h", "1d", "2d", "7d"]
    sizes, steps, samples = [], [], []
    for budget in budgets:
        proposal, _ = proposed(facts, budget, machine, operations_per_s)
        sizes.append(DESIGNS[machine.kind].index(proposal.design._replace(optimizer="adamw")))
        steps.append((sizes[-1], proposal.steps))
        samples.append((sizes[-1], proposal.num_samples))
        assert 0.8 * seconds_of(budget) < proposal.total_s <= seconds_of(budget)
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert steps == sorted(steps)
    assert samples == sorted(samples)


def test_proposal_uses_nearly_the_whole_budget() -> None:
    for budget in ("10min", "1h", "6h"):
        assert proposed(MANY, budget)[0].total_s == pytest.approx(0.97 * seconds_of(budget), rel=0.07)


def test_a_faster_machine_takes_more_steps_or_a_larger_network() -> None:
    slow, fast = (proposed(MANY, "1h", operations_per_s=speed)[0] for speed in (2e10, 8e10))
    assert (fast.design.operations, fast.steps) > (slow.design.operations, slow.steps)


def test_networks_that_exceed_memory_are_not_proposed() -> None:
    def small(largest: int) -> Callable[[Experiment], Speed]:
        def speed(experiment: Experiment) -> Speed:
            fits = experiment.system.network.shape.width <= largest  # type: ignore[union-attr]
            return at(4e10)(experiment) if fits else Speed(0.0, 0.0, 0.0, 0.0, 100.0)

        return speed

    assert proposed(MANY, "2d")[0].design.width > 128
    assert propose(MANY, "images", CPU, "2d", small(128)).design[:5] == DESIGNS["cpu"][1][:5]
    with pytest.raises(ValueError, match=r"takes 100\.0 GiB of memory, but 8\.0 GiB may be used"):
        propose(MANY, "images", CPU, "2d", small(64))


def test_the_same_speed_gives_the_same_file() -> None:
    assert proposed(FEW, "10min") == proposed(FEW, "10min")


def test_muon_is_proposed_if_its_step_is_only_slightly_slower() -> None:
    fast = propose(MANY, "images", CPU, "1h", at(4e10, muon=1.4))
    slow = propose(MANY, "images", CPU, "1h", at(4e10, muon=1.6))
    assert (fast.design.optimizer, slow.design.optimizer) == ("muon", "adamw")
    assert fast.steps == pytest.approx(slow.steps / 1.4, rel=0.02)
    assert fast.total_s == pytest.approx(slow.total_s, rel=0.02)
    width, settings = fast.design.width, from_text(fast.text)["train"]["optimizer"]
    assert settings == {"type": "muon", "lr": pytest.approx(1e-2 * 128 / width, rel=0.05)}
    assert proposed(MANY, "1h", GPU, 1e14)[1].train.optimizer.type == "adamw"


def test_muon_is_not_proposed_if_it_exceeds_memory() -> None:
    def larger(experiment: Experiment) -> Speed:
        is_muon = experiment.train.optimizer.type == "muon"
        return Speed(0.0, 0.0, 0.0, 0.0, 100.0) if is_muon else at(4e10)(experiment)

    assert propose(MANY, "images", CPU, "1h", larger).design.optimizer == "adamw"


def test_muon_makes_no_budget_too_small() -> None:
    def optimizers(muon: float) -> list[str]:
        names = []
        for seconds in range(200, 500, 10):
            with suppress(ValueError):
                names.append(propose(MANY, "images", CPU, f"{seconds}s", at(4e10, muon)).design.optimizer)
        return names

    with_muon, without = optimizers(1.5), optimizers(1.6)
    assert set(without) == {"adamw"} and set(with_muon) == {"adamw", "muon"}
    assert len(with_muon) == len(without)


@pytest.mark.parametrize(
    ("short_side", "channels", "prediction"), [(32, 3, "velocity"), (32, 5, "x0"), (64, 3, "x0"), (64, 1, "velocity")]
)
def test_patches_with_few_values_predict_the_velocity(short_side: int, channels: int, prediction: str) -> None:
    facts = replace(MANY, short_side=short_side, channels=channels, dtype="uint16" if channels == 5 else None)
    experiment = parsed(choices(Request(facts, "images", CPU, 600.0), DESIGNS["cpu"][1], 100, 100))
    assert experiment.system.objective.prediction == prediction  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("num_images", "where"),
    [(120, "Look at evaluation/nearest.png: `copies` takes 100 images."), (130, "See `copies` in metrics.json.")],
)
def test_copies_warning_names_the_file_to_check(num_images: int, where: str) -> None:
    warnings = proposed(replace(FEW, num_images=num_images, per_class=()), "10min")[0].warnings
    assert warnings[0].endswith(f" times: samples may be copies of them. {where}")


def test_few_images_use_augmentation_best_weights_and_a_warning() -> None:
    _, experiment = proposed(replace(FEW, num_images=200), "10min")  # seen 600 times
    assert experiment.train.augment is not None
    assert (experiment.train.augment.probability, experiment.train.augment.until) == (0.25, 0.75)
    assert experiment.train.weights == "best"
    few, experiment = proposed(FEW, "10min")  # fewer passes
    assert experiment.train.augment is not None and experiment.train.augment.probability == 0
    assert experiment.train.weights == "best"
    assert any("500 images are few" in sentence for sentence in few.warnings) and "# Warning: 500 images" in few.text
    many, experiment = proposed(MANY, "10min")
    assert experiment.train.augment is not None and experiment.train.augment.probability == 0
    assert experiment.train.weights == "ema" and not many.warnings


CAPTIONS = CaptionFacts(19_000, "text", 2, 11, ("a red fox: asleep", 'a "dog"', "yes"))


def test_captions_of_nearly_all_images_become_the_condition() -> None:
    proposal, experiment = proposed(replace(MANY, captions=CAPTIONS), "10min")
    assert from_text(proposal.text)["pairs"] == {
        "type": "captions",
        "captions": {"type": "beside", "column": "text"},
        "encoder": {"type": "hashed"},
        "num_tokens": 16,
        "num_captions": 2,
    }
    assert experiment.section("preview").prompts == CAPTIONS.prompts
    assert proposal.files == {"config/prompts.txt": 'a red fox: asleep\na "dog"\nyes\n'}
    assert experiment.section("sample").prompts == "config/prompts.txt"
    assert experiment.system.objective.label_drop_probability == 0.1  # type: ignore[union-attr]
    assert not proposal.warnings and "10 classes, captions, 64 pixels" in proposal.text.replace("\n# ", " ")


MASKS = MaskFacts("cells/masks", 480, (0, 255))


def test_masks_of_nearly_all_images_become_the_condition() -> None:
    proposal, experiment = proposed(replace(FEW, masks=MASKS), "10min")
    raw = from_text(proposal.text)
    assert raw["pairs"] == {"type": "images", "path": MASKS.path, "labels": {"value_0": 0, "value_255": 255}}
    assert raw["system"]["condition"] == [{"type": "label"}, {"type": "image", "from": "pairs"}]
    assert "augment" not in raw["train"] and raw["train"]["weights"] == "best"  # augmentations do not transform masks
    assert experiment.system.objective.label_drop_probability == 0.1  # type: ignore[union-attr]
    assert "10 classes, masks of 2 labels, 64 pixels" in proposal.text.replace("\n# ", " ")
    without = from_text(proposed(replace(FEW, masks=MASKS, per_class=()), "10min")[0].text)
    assert without["system"]["condition"] == {"type": "image", "from": "pairs"}


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0, 1, 2), 3),
        (((0, 0, 0), (255, 0, 16)), {"colour_000000": [0, 0, 0], "colour_ff0010": [255, 0, 16]}),
    ],
)
def test_labels_are_named_by_their_values(values: tuple[Any, ...], labels: object) -> None:
    assert (
        from_text(proposed(replace(FEW, masks=replace(MASKS, values=values)), "10min")[0].text)["pairs"]["labels"]
        == labels
    )


def test_the_time_of_comparing_masks_is_in_the_forecast() -> None:
    facts = replace(FEW, masks=MASKS)
    speed = at(4e10)
    slow = propose(facts, "images", CPU, "10min", lambda experiment: replace(speed(experiment), mask_s=0.01))
    fast = propose(facts, "images", CPU, "10min", speed)
    assert slow.steps < fast.steps and 0.9 < slow.total_s / 600 < 1


def test_masks_of_some_images_give_a_warning() -> None:
    proposal, experiment = proposed(replace(FEW, masks=replace(MASKS, count=400)), "10min")
    assert "400 images have a mask. Masks of pictures are used if" in proposal.warnings[1]
    assert not experiment.pair_sets


def test_masks_and_captions_give_a_warning_on_using_both() -> None:
    facts = replace(FEW, captions=replace(CAPTIONS, count=480), masks=MASKS)
    proposal, experiment = proposed(facts, "10min")
    assert (
        "480 images have a mask, which is not used: the captions are the condition. Add the masks to pairs and "
        "system.condition (docs/conditions.md#parts-of-a-condition) to use both." in proposal.warnings
    )
    assert [pairs.type for pairs in experiment.pair_sets] == ["captions"]


@pytest.mark.parametrize(
    ("channels", "cure"),
    [(1, " For grey images, delete data.dtype, set data.range: [low, high] and name them in pairs."), (5, "")],
)
def test_masks_of_arrays_give_a_warning_with_an_alternative(channels: int, cure: str) -> None:
    warnings = proposed(replace(FEW, dtype="uint16", channels=channels, masks=MASKS), "10min")[0].warnings
    assert f"480 images have a mask, which is not used: masks are for pictures of 8 bits.{cure}" in warnings


def test_captions_of_some_images_and_notices_give_warnings() -> None:
    facts = replace(MANY, captions=replace(CAPTIONS, count=17_000), notices=("metadata.csv is not read",))
    proposal, experiment = proposed(facts, "10min")
    assert "17,000 images have a caption. Captions are used if" in proposal.warnings[0]
    assert proposal.warnings[1] == "metadata.csv is not read"
    assert not experiment.pair_sets and not proposal.files


def test_ema_half_life_is_a_twentieth_of_the_steps() -> None:
    for budget in ("10min", "6h"):
        proposal, _ = proposed(MANY, budget)
        rate = from_text(proposal.text)["train"]["ema"]["rates"][0]
        half_life = np.log(0.5) / np.log(rate)
        assert half_life == pytest.approx(0.05 * proposal.steps, rel=0.1)


def test_batches_are_smaller_than_the_data_set() -> None:
    experiment = proposed(replace(MANY, num_images=40, per_class=()), "10min")[1]
    assert experiment.train.global_batch == 8


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"per_class": ()},
        {"channels": 1},
        {"transparent": True},
        {"deep": True},
        {"several_pages": True},
        {"dtype": "uint16", "channels": 5},
        {"dtype": "float32", "channels": 2, "names": ("dapi", "actin"), "several_pages": True},
        {"aspect": (1.5, 1.6)},
        {"num_images": 40, "per_class": ()},
        {"captions": CAPTIONS},
        {"captions": CAPTIONS, "per_class": ()},
    ],
)
@pytest.mark.parametrize(("machine", "speed"), [(CPU, 4e10), (GPU, 1e14)], ids=["cpu", "gpu"])
def test_a_proposed_file_can_be_configured(
    changes: dict[str, object], machine: Machine, speed: float, tmp_path: Path
) -> None:
    for name in ("a", "b") if changes.get("per_class", "some") else ("",):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.png").touch()
    facts = replace(MANY, source=Folder(path=str(tmp_path / "images")), **changes)  # type: ignore[arg-type]
    path, (proposal, _) = tmp_path / "mine.yaml", proposed(facts, "1h", machine, speed)
    path.write_text(proposal.text.replace("config/prompts.txt", f"{tmp_path}/prompts.txt"))
    for name, text in proposal.files.items():
        (tmp_path / Path(name).name).write_text(text)
    assert max(map(len, path.read_text().splitlines())) < 200
    assert load_experiment(path).train.steps == load_all([path])["mine"][1].train.steps


def test_every_choice_that_is_not_obvious_has_a_reason() -> None:
    text = proposed(MANY, "1h")[0].text
    lines = text.splitlines()
    for key in ("source", "resolution", "network", "steps", "optimizer", "ema", "augment", "num_samples", "sampler"):
        place = max(number for number, line in enumerate(lines) if line.startswith(f"  {key}:"))
        assert "  # " in lines[place] or lines[place - 1].startswith("  # "), key
    assert "arXiv:2203.03466" in text


def test_insufficient_budget_error_states_a_sufficient_one() -> None:
    with pytest.raises(ValueError, match=r"The budget 1min is too small for 20,000 images on 1 CPU core") as error:
        proposed(MANY, "1min")
    enough = str(error.value).rpartition("at least ")[2].removesuffix(".")
    assert proposed(MANY, enough)[0].steps >= 200
    with pytest.raises(ValueError, match="too small"):
        proposed(MANY, f"{int(enough.removesuffix('min')) - 1}min")


def test_twelve_images_are_too_few() -> None:
    with pytest.raises(ValueError, match=r"^12 images are too few to train on .* Give at least 30\.$"):
        proposed(replace(MANY, num_images=12), "1h")


def pictures(folder: Path, mode: str, size: tuple[int, int], count: int = 8) -> Path:
    generator = np.random.default_rng(0)
    for number in range(count):
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        channels = len(Image.new(mode, (1, 1)).getbands())
        pixels = generator.integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
        Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode).save(path)
    return folder


def test_pictures_are_described(tmp_path: Path) -> None:
    facts = describe_source(source_of(pictures(tmp_path, "RGB", (30, 20))))
    assert (facts.num_images, facts.per_class, facts.short_side, facts.aspect) == (8, (4, 4), 20, (1.5, 1.5))
    assert (facts.channels, facts.dtype, facts.transparent, facts.captions) == (3, None, False, None)
    (tmp_path / "a/0.txt").write_text("a  caption\nanother one")
    (tmp_path / "a/2.txt").write_text("a caption\nof four words\nand a fourth")
    assert describe_source(source_of(tmp_path)).captions == CaptionFacts(2, "caption", 2, 3, ("a caption",))


def test_grey_pictures_are_grey_however_they_are_stored(tmp_path: Path) -> None:
    assert describe_source(source_of(pictures(tmp_path / "grey", "L", (16, 16)))).channels == 1
    for number in range(4):
        (tmp_path / "rgb").mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (number, number, number)).save(tmp_path / f"rgb/{number}.png")
    assert describe_source(source_of(tmp_path / "rgb")).channels == 1


def test_alpha_channels_are_detected(tmp_path: Path) -> None:
    assert describe_source(source_of(pictures(tmp_path, "RGBA", (16, 16)))).transparent


@pytest.mark.parametrize(
    ("numbers", "dtype", "channels"),
    [
        (np.arange(64 * 64, dtype=np.uint16).reshape(64, 64), "uint16", 1),
        (np.zeros((5, 32, 40), np.uint16), "uint16", 5),
        (np.zeros((32, 40, 2), np.float64), "float32", 2),
        (np.zeros((1, 32, 40), np.int16), "int16", 1),
    ],
)
def test_arrays_are_described(numbers: np.ndarray, dtype: str, channels: int, tmp_path: Path) -> None:
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", numbers)
    facts = describe_source(source_of(tmp_path))
    assert (facts.dtype, facts.channels, facts.per_class) == (dtype, channels, ())
    assert facts.short_side == sorted(numbers.shape)[-2]


def test_grey_pictures_of_16_bits_are_arrays(tmp_path: Path) -> None:
    for number in range(4):
        tifffile.imwrite(tmp_path / f"{number}.tif", np.full((32, 32), 1000 * number, np.uint16))
    facts = describe_source(source_of(tmp_path))
    assert (facts.dtype, facts.channels) == ("uint16", 1)


def test_deep_or_multipage_images_outside_the_read_subset_are_detected(tmp_path: Path) -> None:
    for number in range(70):
        Image.new("RGB", (16, 16)).save(tmp_path / f"{number:02}.jpg")
    plain = describe_source(source_of(tmp_path))
    assert not plain.deep and not plain.several_pages
    Image.fromarray(np.full((16, 16), 30_000, np.uint16)).save(tmp_path / "01.jpg.png")  # one of 71: 64 are read
    deep = describe_source(source_of(tmp_path))
    assert deep.deep and not deep.several_pages and "range: file" in proposed(deep, "10min")[0].text
    Image.new("L", (16, 16)).save(tmp_path / "01.jpg.tif", save_all=True, append_images=[Image.new("L", (16, 16))])
    paged = describe_source(source_of(tmp_path))
    assert paged.several_pages and "pages: first" in proposed(paged, "10min")[0].text


def test_16_bit_images_that_would_be_nearly_black_are_rejected(tmp_path: Path) -> None:
    pictures(tmp_path, "RGB", (16, 16))
    Image.fromarray(np.full((16, 16), 4_000, np.uint16)).save(tmp_path / "a" / "deep.png")
    with pytest.raises(ValueError, match=r"1 of 9 images that were read have 16 bits and use values up to 4,000 of"):
        describe_source(source_of(tmp_path))


def test_unexpected_masks_and_pages_are_noted(tmp_path: Path) -> None:
    pictures(tmp_path / "soft" / "images", "RGB", (16, 16))
    masks(tmp_path / "soft" / "masks", tmp_path / "soft" / "images", *range(40))
    assert "The folder masks is a class" in describe_source(source_of(tmp_path / "soft")).notices[-1]
    flat = pictures(tmp_path / "flat", "RGB", (16, 16)) / "a"
    for path in [*flat.iterdir()]:
        Image.new("L", (16, 16)).save(flat / f"{path.stem}_mask.png")
    assert (
        "4 of 8 files are named as masks of others (0_mask.png beside 0.png)"
        in describe_source(source_of(flat)).notices[-1]
    )
    Image.new("L", (16, 16)).save(flat / "stack.tif", save_all=True, append_images=[Image.new("L", (16, 16))])
    assert "Files hold several pages, of which the first is used." in describe_source(source_of(flat)).notices[-1]


def test_classes_with_few_images_are_reported() -> None:
    warnings = proposed(replace(MANY, per_class=(10_000, 9_999, 1)), "6h")[0].warnings
    assert "The smallest class has 1 image: samples of it may be copies." in warnings


def test_damaged_pictures_are_not_taken_for_arrays(tmp_path: Path) -> None:
    pictures(tmp_path, "RGB", (16, 16), 8)
    for number in range(10):
        (tmp_path / "a" / f"broken{number}.png").write_bytes(b"no picture")
    facts = describe_source(source_of(tmp_path))
    assert (facts.dtype, facts.channels, facts.num_images) == (None, 3, 18)


def masks(folder: Path, images: Path, *values: object) -> None:
    for path in images.rglob("*.png"):
        mask = folder / path.relative_to(images)
        mask.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.array([values[(i // 4) % len(values)] for i in range(16 * 16)], np.uint8)
        Image.fromarray(pixels.reshape(16, 16, *pixels.shape[1:])).save(mask)


def test_masks_next_to_the_images_are_found(tmp_path: Path) -> None:
    photos = pictures(tmp_path / "cells" / "photos", "RGB", (16, 16))
    for path in photos.rglob("?.png"):
        path.rename(path.with_name(f"v1.{path.name}"))  # a name with two dots
    masks(tmp_path / "cells" / "Masks", tmp_path / "cells" / "photos", 0, 7)
    (tmp_path / "cells" / "Masks" / "a" / "v1.0.png").unlink()
    (tmp_path / "cells" / "Masks" / "b" / "v1.1.png").write_bytes(b"damaged")
    facts = describe_source(source_of(tmp_path / "cells"))
    assert facts.source == Folder(path=str(tmp_path / "cells" / "photos")) and facts.per_class == (4, 4)
    assert facts.masks == MaskFacts(str(tmp_path / "cells" / "Masks"), 7, (0, 7))
    assert describe_source(source_of(tmp_path / "cells" / "photos")) == facts


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (((9, 0, 0), (0, 0, 0), (0, 9, 0)), ((0, 0, 0), (0, 9, 0), (9, 0, 0))),
        (range(40), None),  # a picture
        ((5,), None),
    ],
)
def test_only_images_with_few_values_are_masks(values: Any, found: object, tmp_path: Path) -> None:
    pictures(tmp_path / "images", "RGB", (16, 16))
    masks(tmp_path / "masks", tmp_path / "images", *values)
    facts = describe_source(source_of(tmp_path))
    assert (facts.masks and facts.masks.values) == found


def test_images_and_other_folders_are_classes(tmp_path: Path) -> None:
    pictures(tmp_path / "cat", "RGB", (16, 16))
    pictures(tmp_path / "dog", "RGB", (16, 16))
    masks(tmp_path / "masks", tmp_path / "cat", 0, 1)
    assert source_of(tmp_path) == Folder(path=str(tmp_path))


def test_class_folder_named_mask_is_not_a_mask_folder(tmp_path: Path) -> None:
    for name in ("mask", "without_mask"):  # photographs with the same file names
        pictures(tmp_path / name, "RGB", (16, 16))
    assert source_of(tmp_path) == Folder(path=str(tmp_path))


def test_a_table_and_a_zip_are_sources(tmp_path: Path) -> None:
    pictures(tmp_path / "images", "RGB", (16, 16), 4)
    (tmp_path / "labels.csv").write_text("path,label\nimages/a/0.png,x\nimages/b/1.png,y\n")
    (tmp_path / "metadata.csv").write_text("file_name,text\nimages/a/0.png,a caption\n")
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for path in sorted((tmp_path / "images").rglob("*.png")):
            archive.write(path, path.relative_to(tmp_path / "images"))
    assert describe_source(source_of(tmp_path / "labels.csv")).per_class == (1, 1)
    assert describe_source(source_of(tmp_path / "images.zip")).per_class == (2, 2)
    captioned = describe_source(source_of(tmp_path / "metadata.csv"))
    assert (captioned.num_images, captioned.per_class) == (1, ())
    assert captioned.captions == CaptionFacts(1, "text", 1, 2, ("a caption",))
    assert source_of(tmp_path) == Folder(path=str(tmp_path))  # two tables name its images: which one is meant?


@pytest.mark.parametrize(
    ("name", "text", "label_column", "per_class", "column"),
    [
        (
            "captions.csv",
            "id,text,picture\n0," + 300 * "grey " + ",images/a/0.png\n1,white,images/b/1.png",
            None,
            (),
            "text",
        ),
        ("list.tsv", "category\tfile\nx\timages/a/0.png\ny\timages/b/1.png\n", "category", (1, 1), None),
        ("metadata.jsonl", '{"file_name": "images/a/0.png", "caption": "x", "label": 3}', "label", (1,), "caption"),
    ],
)
def test_folder_is_read_by_the_table_inside(
    name: str, text: str, label_column: str | None, per_class: tuple[int, ...], column: str | None, tmp_path: Path
) -> None:
    pictures(tmp_path / "images", "RGB", (16, 16), 4)
    (tmp_path / "sizes.csv").write_text("name,bytes\nimages/a/0.png,700\n")  # neither classes nor captions
    (tmp_path / "words.csv").write_text("word,text\nx,images\n")  # names no images
    (tmp_path / "broken.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / name).write_text(text)
    facts = describe_source(source_of(tmp_path))
    assert isinstance(facts.source, Table) and facts.source.path == str(tmp_path / name)
    assert (facts.source.label_column, facts.per_class) == (label_column, per_class)
    assert (facts.captions and facts.captions.column) == column
    _, experiment = proposed(replace(FEW, source=facts.source, per_class=per_class), "10min")
    assert experiment.data.source == facts.source.model_copy(update={"label_column": None})  # each class has one image


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("captions.csv", "file,text\nimages/a/0.png,grey, and small\nimages/b/1.png,white\n"),
        ("list.jsonl", '{"file": "images/a/0.png", "label": 1}\n{"file": "images/b/1.png", label: 2}'),
    ],
)
def test_invalid_table_that_names_images_is_reported(name: str, text: str, tmp_path: Path) -> None:
    pictures(tmp_path / "images", "RGB", (16, 16), 4)
    (tmp_path / "words.csv").write_text("word,text\nx,images,y\n")  # broken too, but names no images
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} is not valid"):
        source_of(tmp_path)


def test_error_for_table_without_paths_lists_its_columns(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("image,label\nlost.png,x\n")
    with pytest.raises(
        ValueError, match=r"labels\.csv names no images: of its columns \(image, label\) none holds paths"
    ):
        source_of(tmp_path / "labels.csv")


def test_volumes_without_stated_axes_are_rejected(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.zeros((32, 32, 32), np.uint8))
    with pytest.raises(ValueError, match=r"Nothing states which axes of 32 x 32 x 32 numbers .* data\.axes"):
        describe_source(source_of(tmp_path))


def test_sources_without_images_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist\. Give the folder"):
        source_of(tmp_path / "nowhere")
    (tmp_path / "a.docx").write_text("words")
    with pytest.raises(ValueError, match=r"a\.docx is no folder of images"):
        source_of(tmp_path / "a.docx")
    with pytest.raises(ValueError, match="holds no images: of 1 files none could be read"):
        describe_source(source_of(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no files"):
        describe_source(source_of(tmp_path / "empty"))


OF_WEIGHTS = {
    "process": {"type": "flow", "time_scale": 1000},
    "objective": {"type": "flow_matching", "prediction": "x0", "label_drop_probability": 0.2},
}


def weights_of(
    folder: Path,
    x: DataSpec,
    codec: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **other: Any,
) -> Path:
    """Write the weights of a random DiT of 16 channels, or of another system."""
    network = {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}
    system = parse(AnySystem, {"type": "dit", "network": network, **OF_WEIGHTS} | other, "the test")
    about = {"system": dump(system), "spec": dump(x), "classes": [*map(str, range(x.num_classes))], "step": 1200}
    codec_of = {"config": codec or {"type": "rgb"}, "identity": {}, "scale": None}
    train = {} if optimizer is None else {"train": {"optimizer": optimizer}}
    save_weights(
        folder, system.build_network(x).state_dict(), {**about, "codec": codec_of, "examples_seen": 0, **train}
    )
    return folder


def test_weights_determine_network_and_resolution(tmp_path: Path) -> None:
    start = start_of(weights_of(tmp_path, DataSpec(channels=3, resolution=16, num_classes=4)))
    facts = replace(FEW, captions=replace(CAPTIONS, count=500), masks=replace(MASKS, count=500))
    proposal = propose(facts, "images", CPU, "10min", at(4e10), start)
    experiment = parse_experiment(from_text(proposal.text), "the proposal")
    network, objective = experiment.system.network, experiment.system.objective  # type: ignore[union-attr]
    assert (network.depth, network.width, network.patch) == (1, 16, 4) and experiment.data.resolution == 16
    assert (objective.type, objective.prediction, objective.label_drop_probability) == ("flow_matching", "x0", 0.1)
    assert experiment.train.init_from == str(tmp_path) and "its weights, of step 1,200" in proposal.text
    assert (experiment.train.optimizer.type, experiment.train.optimizer.lr) == ("adamw", 1e-4)
    assert not experiment.pair_sets
    assert 8 * 60 < proposal.total_s < 10 * 60


def test_proposal_keeps_the_optimizer_of_the_weights(tmp_path: Path) -> None:
    muon = {"type": "muon", "lr": 0.005, "momentum": 0.9}
    folder = weights_of(tmp_path, DataSpec(channels=1, resolution=16), optimizer=muon)
    proposal = propose(replace(MANY, per_class=()), "images", CPU, "10min", at(4e10), start_of(folder))
    raw = from_text(proposal.text)
    assert raw["train"]["optimizer"] == {"type": "muon", "lr": 0.005, "momentum": 0.9}
    assert raw["data"]["channels"] == 1 and raw["system"]["objective"]["label_drop_probability"] == 0


def test_the_size_of_images_follows_from_latents(tmp_path: Path) -> None:
    write_autoencoder("sd", tmp_path / "vae")
    codec = {"type": "stability_vae", "weights": str(tmp_path / "vae"), "scale": 0.5}
    start = start_of(weights_of(tmp_path / "dit", DataSpec(channels=4, resolution=(8, 16)), codec))
    assert (start.resolution, start.channels, start.grid, start.codec) == ((64, 128), 3, 2, codec)


def test_unsupported_initial_weights_are_rejected(tmp_path: Path) -> None:
    pixels, text = DataSpec(channels=3, resolution=16), {"text": (4, 8)}
    trained = {"type": "trained", "experiment": "mine"}
    unet = {
        "type": "iddpm",
        "network": {"type": "unet", "channels": 32, "multipliers": [1], "attention_resolutions": []},
    }
    unet["objective"], unet["process"] = {"variance": "fixed_large", "loss": "simple"}, {"type": "discrete"}
    cases = {
        "are a iddpm": {"x": pixels, **unet},
        "are conditioned on more than a class": {
            "x": DataSpec(channels=3, resolution=16, conditions=text), "condition": {"type": "text"}
        },
        "are on the latents of the experiment mine": {"x": pixels, "codec": trained},
    }  # fmt: skip
    for number, (message, settings) in enumerate(cases.items()):
        with pytest.raises(ValueError, match=message):
            start_of(weights_of(tmp_path / f"{number}", **settings))
    arrays, start = replace(FEW, dtype="uint16", channels=5), start_of(weights_of(tmp_path / "pixels", pixels))
    with pytest.raises(ValueError, match="arrays of 5 channels, but the weights in .* are of images with 3"):
        propose(arrays, "images", CPU, "10min", at(4e10), start)


def initialised(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "image_diffusion", "init", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "--data", "images"], "--data and --budget belong together"),
        (["new", "--budget", "6h"], "--data and --budget belong together"),
        (["new", "--data", "images", "--budget", "6h", "--cores", "0"], "--cores is a number from 1"),
        (["new", "--weights", "images"], "--weights belongs to --data and --budget"),
        (["images", "--data", "images", "--budget", "6h"], "images exists and is not an empty folder"),
        (["images/new", "--data", "images", "--budget", "6h"], "images/new lies inside the images, images. Name a"),
    ],
)
def test_invalid_arguments_are_reported_before_measuring(arguments: list[str], message: str, tmp_path: Path) -> None:
    pictures(tmp_path / "images", "RGB", (16, 16))
    done = initialised(tmp_path, *arguments)
    assert done.returncode != 0 and message in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


@pytest.mark.parametrize(
    ("folder", "shown"),
    [
        ("my-flowers", "cd my-flowers && snakemake."),
        ("my flowers", "cd 'my flowers' && snakemake."),
        ("-new", "cd -- -new && snakemake."),
    ],
)
def test_the_command_that_init_prints_can_be_pasted(folder: str, shown: str, tmp_path: Path) -> None:
    done = initialised(tmp_path, *(["--"] if folder.startswith("-") else []), folder)
    assert done.returncode == 0 and shown in done.stdout, done.stdout + done.stderr


def test_repeated_measurements_are_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        Image.new("L", (17, 19), number).save(tmp_path / f"{number}.png")

    def twice(*arguments: Any) -> None:
        for _ in range(2):
            arguments[4](None)

    monkeypatch.setattr("image_diffusion.tools.budget.propose", twice)
    monkeypatch.setattr("image_diffusion.tools.budget.measured", lambda *_: None)
    propose_for(tmp_path, "5min", 1)
    assert capsys.readouterr().err.count("init: measuring") == 1


@pytest.mark.slow
def test_arrays_without_classes_are_measured(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(40):
        tifffile.imwrite(tmp_path / f"{number}.tif", generator.integers(0, 4096, (32, 32), dtype=np.uint16))
    facts = describe_source(source_of(tmp_path))
    sections = choices(Request(facts, "images", CPU, 600.0), DESIGNS["cpu"][0], 200, 100)
    speed = measured(parsed(sections), facts, CPU)
    assert 0 < speed.pass_s < speed.step_s < 10 and 0 < speed.detector_s < 1 and 0 < speed.crop_s < 1
    assert 0 < speed.memory_gib < CPU.memory_gib
    assert measured(parsed(sections), facts, replace(CPU, memory_gib=1e-3)).step_s == 0


@pytest.mark.slow
def test_captions_are_measured_and_their_prompts_written(tmp_path: Path) -> None:
    pictures(tmp_path / "images", "RGB", (16, 16), 40)
    for path in [*(tmp_path / "images").rglob("*.png")][:38]:
        path.with_suffix(".txt").write_text(f"picture {path.stem} of noise")
    done = initialised(tmp_path, "new", "--data", "images", "--budget", "1h", "--cores", "1")
    assert done.returncode == 0, done.stderr
    prompts = (tmp_path / "new/config/prompts.txt").read_text().splitlines()
    assert len(prompts) == 38 and prompts[0].endswith("of noise")
    experiment = load_experiment(tmp_path / "new/config/experiments/mine.yaml")
    assert [pairs.kind for pairs in experiment.pair_sets] == ["captions"]


@pytest.mark.slow
def test_masks_are_measured(tmp_path: Path) -> None:
    pictures(tmp_path / "cells" / "images", "RGB", (16, 16), 40)
    masks(tmp_path / "cells" / "masks", tmp_path / "cells" / "images", 0, 255)
    done = initialised(tmp_path, "new", "--data", "cells", "--budget", "1h", "--cores", "1")
    assert done.returncode == 0, done.stderr
    experiment = load_experiment(tmp_path / "new/config/experiments/mine.yaml")
    assert [pairs.kind for pairs in experiment.pair_sets] == ["images"] and experiment.data.name == "cells"


@pytest.mark.slow
def test_latents_of_weights_are_measured(tmp_path: Path) -> None:
    pictures(tmp_path / "images", "RGB", (40, 40), 40)
    write_autoencoder("sd", tmp_path / "vae")
    codec = {"type": "stability_vae", "weights": str(tmp_path / "vae"), "scale": 0.5}
    weights_of(tmp_path / "dit", DataSpec(channels=4, resolution=8, num_classes=3), codec)
    done = initialised(tmp_path, "new", "--data", "images", "--budget", "1h", "--cores", "1", "--weights", "dit")
    assert done.returncode == 0, done.stderr
    experiment = load_experiment(tmp_path / "new/config/experiments/mine.yaml")
    assert experiment.codec.name == "vae" and experiment.data.resolution == 64
    speed = measured(experiment, describe_source(source_of(tmp_path / "images")), CPU)
    assert 0 < speed.encode_s < 1 and 0 < speed.decode_s < 1


@pytest.mark.slow
def test_a_failed_proposal_leaves_nothing(tmp_path: Path) -> None:
    pictures(tmp_path / "images", "RGB", (16, 16))
    for budget, message in (("6", "is not a duration"), ("6h", "8 images are too few")):
        done = initialised(tmp_path, "new", "--data", "images", "--budget", budget)
        assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


@pytest.mark.parametrize(("number", "reason"), [(630, "fewer than the 640 of"), (640, "enough for")])
def test_reason_for_the_number_of_samples_states_what_an_interval_requires(number: int, reason: str) -> None:
    sections = choices(Request(MANY, "images", CPU, 600.0), DESIGNS["cpu"][0], 200, number)
    chosen = {choice.key: choice for choice in sections["sample"]}
    assert chosen["num_samples"].reason.endswith(f"; {reason} an interval of the distance")
