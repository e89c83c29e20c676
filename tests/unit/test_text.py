"""Text conditions: captions, their stored encodings, a text-conditioned network, and prompts."""

from __future__ import annotations

import csv
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from image_diffusion.core.config.base import dump, load, parse, to_yaml
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded import captions as captions_module
from image_diffusion.data.encoded.captions import BesideCaptions, ClassCaptions, TableCaptions
from image_diffusion.data.encoded.pairs import write_pairs
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.shards.records import Sample
from image_diffusion.data.sources.arrow import HuggingFace
from image_diffusion.experiments.experiment import TrainStage
from image_diffusion.networks.dit import DiT, DiTConfig
from image_diffusion.objectives.label_dropout import LabelDropout
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.diffusion.conditions.base import ConditionInputs, classes_named, read_prompts
from image_diffusion.systems.diffusion.conditions.encoded import TextCondition
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.pairs.captions import CaptionPairs
from image_diffusion.systems.pairs.inputs import PairInputs
from image_diffusion.systems.sampling import SamplingInputs
from image_diffusion.text_encoders import encode_captions
from image_diffusion.text_encoders.hashing import HashingText
from image_diffusion.training.load_model import load_codec, load_model
from image_diffusion.training.session import run
from saved_data_sets import save_to_disk

CPU = torch.device("cpu")
WORDS = ("zero", "one", "two", "three")


@pytest.fixture(autouse=True)
def _read_anew() -> None:
    captions_module._caption_columns.cache_clear()
    captions_module._read.cache_clear()


def write_images(folder: Path, count: int = 24) -> None:
    """Write grey images of 8 x 8 pixels, each with a caption file of two captions."""
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:02d}.ppm").write_bytes(b"P6 8 8 255\n" + bytes([10 * number] * 192))
        (folder / f"{number:02d}.txt").write_text(f"a {WORDS[number % 4]} in grey\n\nnumber {number}\n")


def cropped(tmp_path: Path, **source: Any) -> DataConfig:
    """Crop the images in `tmp_path / "in"` to `tmp_path / "crops"`."""
    given = {"type": "folder", "path": str(tmp_path / "in"), "classes": "none"} | source
    config = DataConfig(name="x", source=given, resolution=8, num_shards=3, validation_fraction=0.25)  # type: ignore[arg-type]
    crop_dataset(config, tmp_path / "crops")
    return config


def encoded(tmp_path: Path, config: DataConfig, max_bad_fraction: float = 0.1, **pairs: Any) -> tuple[Any, int]:
    captions_module._caption_columns.cache_clear()
    settings = parse(CaptionPairs, {"captions": {"type": "beside"}, "num_tokens": 4} | pairs, "pairs")
    made = settings.build(PairInputs(tmp_path / "crops", config.source, 3, None, CPU))
    output = tmp_path / "captions"
    return write_pairs(made, "x", settings.splits, settings.dtype, output, max_bad_fraction)


def captions_of(config: DataConfig, captions: Any, names: list[str]) -> list[list[str]]:
    samples = [Sample("", name, "", i % 2, (1, 1), []) for i, name in enumerate(names)]
    found: list[list[str]] = captions.read(samples, ["old_man", "dog"], config.source)
    return found


def test_several_captions_come_from_classes_files_tars_tables_and_columns(tmp_path, monkeypatch):
    write_images(tmp_path / "in", 3)
    (tmp_path / "in" / "01.txt").unlink()
    (tmp_path / "in" / "01.json").write_text(json.dumps({"caption": ["one", "uno"], "url": "x"}))
    (tmp_path / "in" / "02.txt").write_text(" \n")
    config = cropped(tmp_path)
    names = ["00.ppm", "01.ppm", "02.ppm"]
    expected = [["a zero in grey", "number 0"], ["one", "uno"], []]
    assert captions_of(config, BesideCaptions(), names) == expected
    of_classes = captions_of(config, ClassCaptions(template=("a {}", "{} here")), names[:2])
    assert of_classes == [["a old man", "old man here"], ["a dog", "dog here"]]

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for path in sorted((tmp_path / "in").iterdir()):
            tar.add(path, path.name)
    tars = {"type": "webdataset", "path": str(tmp_path / "a.tar"), "labels": False}
    in_tar = parse(DataConfig, dump(config) | {"source": tars}, "x")
    captions_module._caption_columns.cache_clear()
    assert captions_of(in_tar, BesideCaptions(), [f"a.tar/{name[:2]}" for name in names]) == expected

    table = tmp_path / "table.csv"
    with table.open("w", newline="") as file:
        rows = [["00.ppm", "short", "long"], ["00.ppm", "third", ""], ["02.ppm", "", " "]]
        csv.writer(file).writerows([["path", "caption", "more"], *rows])
    of_table = TableCaptions(path=str(table), caption_column=("caption", "more"))
    assert captions_of(config, of_table, names) == [["short", "long", "third"], [], []]
    source = {"type": "table", "path": str(table), "label_column": None}
    in_table = parse(DataConfig, dump(config) | {"source": source}, "x")
    captions_module._caption_columns.cache_clear()
    assert captions_of(in_table, BesideCaptions(column=("more", "caption")), names)[0] == ["long", "short", "third"]

    columns = {"image": [b"", b"", b""], "caption": [["first", "second"], ["alone"], None]}
    save_to_disk(tmp_path / "saved", columns)
    found = HuggingFace(path=str(tmp_path / "saved")).read_captions(("caption",))
    assert found == {"000000000": ["first", "second"], "000000001": ["alone"], "000000002": []}


def test_an_image_without_a_caption_is_quarantined_and_not_trained_on(tmp_path):
    write_images(tmp_path / "in")
    (tmp_path / "in" / "05.txt").unlink()
    (tmp_path / "in" / "17.txt").write_text("!\n")  # no words
    config = cropped(tmp_path)
    with pytest.raises(ValueError, match=r"2 of 24 pairs \(8.3%\) .* data.max_bad_fraction = 0.05\. The first is"):
        encoded(tmp_path, config, max_bad_fraction=0.05)
    manifest, _ = encoded(tmp_path, config)
    assert (manifest["num_samples"], manifest["quarantined"], manifest["kind"]) == (22, 2, "captions")
    table = (tmp_path / "captions" / "quarantine.csv").read_text()
    assert "05.ppm,it has no caption" in table and "17.ppm,its caption embedding is all zeros" in table
    whole = open_shards(tmp_path / "crops", "all")
    joined = open_shards(tmp_path / "crops", "all").join(open_shards(tmp_path / "captions", "all"))
    assert joined.num_samples == 22 and joined.digest != whole.digest
    grey = joined.gather(np.arange(22))[:, 0, 0, 0].tolist()
    assert sorted(set(range(24)) - {value // 10 for value in grey}) == [5, 17]
    encoder = HashingText(128, 4, context=True)
    (beside,) = joined.gather_joined(np.arange(22))
    for value, row in zip(grey, beside, strict=True):
        expected = encode_captions(encoder, [f"a {WORDS[value // 10 % 4]} in grey"])
        torch.testing.assert_close(row.float(), expected, atol=1e-3, rtol=1e-3)


def test_edited_caption_re_encodes_only_its_shard(tmp_path):
    write_images(tmp_path / "in")
    config = cropped(tmp_path)
    before, written = encoded(tmp_path, config)
    assert written == 3 and encoded(tmp_path, config) == (before, 0)
    (tmp_path / "in" / "07.txt").write_text("something else")
    assert crop_dataset(config, tmp_path / "crops").num_written == 0
    after, written = encoded(tmp_path, config)
    assert written == 1
    assert sum(a != b for a, b in zip(before["shards"], after["shards"], strict=True)) == 1
    assert encoded(tmp_path, config, encoder={"type": "hashed", "dim": 64})[1] == 3


def test_captions_of_other_images_are_rejected(tmp_path):
    write_images(tmp_path / "in")
    encoded(tmp_path, cropped(tmp_path))
    for path in (tmp_path / "in").glob("*.ppm"):
        path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    cropped(tmp_path)
    with pytest.raises(ValueError, match="The captions are of other images than the crops"):
        open_shards(tmp_path / "crops", "train").join(open_shards(tmp_path / "captions", "all"))


def test_encodings_are_deterministic_and_empty_captions_are_zeros():
    encoder = HashingText(64, 4, context=True)
    texts = ["a red house on white", "", "a red house in white", "red"]
    found = encode_captions(encoder, texts)
    assert found.shape == (4, 5, 64) and not found[1].any() and not found[3, 2:].any()
    assert torch.equal(found[[2]], encode_captions(encoder, [texts[2]])), "whatever stands beside it"
    assert torch.equal(found[0, 1], HashingText(64, 4)(["a"])[1][0, 0])
    on, within = (encode_captions(encoder, [f"{word} white"])[0, 2] for word in ("on", "in"))
    assert not torch.allclose(on, within), "a word is told by the one in front of it"


def test_captions_are_drawn_by_weight_among_those_present():
    stored = torch.zeros(2000, 3, 2, 4)
    stored[:, 0], stored[:, 1] = 1, 2
    stored[::2, 2] = 3  # the others have two
    number = torch.arange(2000)
    streams = Streams(0, torch.zeros_like(number), number)

    def shares(weights: tuple[float, ...] | None, rows: slice, streams: Streams = streams) -> list[float]:
        drawn = TextCondition(caption_weights=weights).training_conditions(stored, streams, SPEC)["text"][rows, 0, 0]
        return [(drawn == value).float().mean().item() for value in (1, 2, 3)]

    assert shares(None, slice(0, None, 2)) == pytest.approx([1 / 3] * 3, abs=0.05)
    assert shares(None, slice(1, None, 2)) == pytest.approx([1 / 2, 1 / 2, 0], abs=0.05)
    assert shares((1, 3, 4), slice(1, None, 2)) == pytest.approx([1 / 4, 3 / 4, 0], abs=0.05)
    assert shares((0, 0, 1), slice(1, None, 2)) == pytest.approx([1 / 2, 1 / 2, 0], abs=0.05)
    later = Streams(0, torch.ones_like(number), number)
    told = [TextCondition().training_conditions(stored, each, SPEC)["text"] for each in (streams, streams, later)]
    assert torch.equal(told[0], told[1]) and not torch.equal(told[0], told[2])


SPEC = DataSpec(channels=3, resolution=8, conditions={"text": (5, 6)})


def text_dit(**settings: Any) -> DiT:
    torch.manual_seed(0)
    config = DiTConfig(depth=2, width=16, num_heads=2, patch=4, **settings)
    network = config.build(SPEC)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return network.eval()


@pytest.mark.parametrize("settings", [{}, {"qk_norm": True, "norm": "rms_norm", "gradient_checkpointing": True}])
def test_network_attends_only_to_present_tokens(settings):
    network, x, t = text_dit(**settings), torch.randn(3, 3, 8, 8), torch.tensor([1.0, 2.0, 3.0])
    text = torch.randn(3, 5, 6)
    text[0, 3:], text[1] = 0, 0
    seen = network(x, t, text=text)
    assert torch.equal(seen, network(x, t, text=text)) and seen.isfinite().all()
    for changed in ((0, 0), (0, 2), (2, 4)):
        other = text.clone()
        other[changed] = -other[changed]
        differs = (network(x, t, text=other) != seen).flatten(1).any(dim=1).tolist()
        assert differs == [row == changed[0] for row in range(3)]
    # Padding is not attended to: a shorter text of the same words gives the same image.
    shorter = DiTConfig(depth=2, width=16, num_heads=2, patch=4, **settings).build(
        SPEC.model_copy(update={"conditions": {"text": (3, 6)}})
    )
    shorter.load_state_dict(network.state_dict())
    torch.testing.assert_close(shorter.eval()(x[:1], t[:1], text=text[:1, :3]), seen[:1])
    with pytest.raises(ValueError, match="built for the conditions text of 5 x 6, but was called with text of 4 x 6"):
        network(x, t, text=text[:, :4])
    with pytest.raises(ValueError, match="but was called with none"):
        network(x, t)


def test_captions_are_dropped_only_in_training():
    number = torch.arange(400)
    batch = Batch(torch.zeros(400, 1), {"text": torch.ones(400, 5, 6)}, Streams(0, number * 0, number))
    network = torch.nn.Identity()
    dropped = LabelDropout(0.25, SPEC)(batch, network.train())["text"].flatten(1)
    assert ((dropped == 0).all(1) | (dropped == 1).all(1)).all()
    assert (dropped == 0).all(1).float().mean() == pytest.approx(0.25, abs=0.06)
    assert LabelDropout(0.25, SPEC)(batch, network.eval())["text"].all()


def test_prompts_come_from_lists_and_files_and_may_name_classes(tmp_path):
    (tmp_path / "p.txt").write_text("a dog\n\n  a cat \n")
    (tmp_path / "p.csv").write_text('prompt,seed\n"a dog, asleep",1\n')
    assert read_prompts(("a", " "), "sample.prompts") == ["a"]
    assert read_prompts(str(tmp_path / "p.txt"), "sample.prompts") == ["a dog", "a cat"]
    assert read_prompts(str(tmp_path / "p.csv"), "sample.prompts") == ["a dog, asleep"]
    with pytest.raises(ValueError, match=r"sample.prompts: nowhere.txt does not exist"):
        read_prompts("nowhere.txt", "sample.prompts")
    (tmp_path / "p.txt").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(str(tmp_path / "p.txt"), "sample.prompts")
    classes = ["dog", "old_man", "man"]
    named = classes_named(["A dog.", "dogs and a man"], classes)
    assert named is not None and named.tolist() == [0, 2]
    assert classes_named(["a dog", "a cat"], classes) is None
    assert classes_named(["a dog and a man"], classes) is classes_named([], classes) is None


def stage(tmp_path: Path, steps: int, **changes: Any) -> Path:
    """Write the configuration of a text-conditioned training."""
    path = tmp_path / "train.yaml"
    system = {
        "type": "dit",
        "condition": {"type": "text"},
        "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4},
        "process": {"type": "flow"},
        "objective": {"type": "flow_matching", "label_drop_probability": 0.2},
    }
    train = {"steps": steps, "global_batch": 8, "flip_probability": 0, "grid_every_steps": 2}
    train |= {"checkpoint": {"every_steps": 1}, "ema": {"rates": [0.5], "warmup": None}, "optimizer": {"lr": 0.05}}
    preview = {"num_samples": 2, "prompts": ["a zero in grey"], "sampler": {"type": "euler", "num_steps": 2}}
    encoder = dump(CaptionPairs())["encoder"]
    content = {"experiment": "x", "codec": {"type": "rgb"}, "system": system, "train": train, "preview": preview}
    path.write_text(to_yaml(content | {"encoder": encoder} | changes))
    load(TrainStage, path)
    return path


def trained(tmp_path: Path, steps: int, output: Path) -> bytes:
    """Return the bytes of the weights after this number of steps."""
    config, data = stage(tmp_path, steps), tmp_path / "crops" / "manifest.json"
    training = prepare_training(config, data, None, [tmp_path / "captions" / "manifest.json"])
    run(training.build, training.stage.train, training.model, training.data, output, None)
    return (output / "weights.safetensors").read_bytes()


def test_text_training_resumes_bit_exactly_and_samples_follow_prompts(tmp_path):
    write_images(tmp_path / "in")
    encoded(tmp_path, cropped(tmp_path), num_captions=2)
    whole = trained(tmp_path, 4, tmp_path / "once")
    assert trained(tmp_path, 2, tmp_path / "twice") != whole
    assert trained(tmp_path, 4, tmp_path / "twice") == whole

    model = load_model(tmp_path / "once")
    assert (
        list(model.pairs) == ["captions"]
        and model.spec.num_classes == 0
        and model.spec.conditions == {"text": (5, 128)}
    )

    def images(**settings: Any) -> tuple[torch.Tensor, Any]:
        given = {"num_samples": 4, "sampler": {"type": "euler", "num_steps": 2}} | settings
        config = parse(SampleConfig, given, "sample")
        made = model.system.sampling().maker(SamplingInputs(model, config, load_codec(model, None, CPU), load_model))
        batches = [made(slice(i, i + 2)) for i in (0, 2)]
        return torch.cat(batches), made

    two, made = images(prompts=["a zero in grey", "something else"])
    assert made.titles == ["a zero in grey", "something else"] * 2 == made.described["prompts"] and made.labels is None
    one, _ = images(prompts=["a zero in grey"])
    assert torch.equal(two[::2], one[::2]) and not torch.equal(two[1::2], one[1::2])
    guided, _ = images(prompts=["a zero in grey"], guidance={"guidance_scale": 3})
    away, _ = images(prompts=["a zero in grey"], guidance={"guidance_scale": 3}, negative_prompt="a two in grey")
    itself, _ = images(prompts=["a zero in grey"], guidance={"guidance_scale": 3}, negative_prompt="a zero in grey")
    assert not torch.equal(guided, one) and not torch.equal(away, guided)
    assert (itself.int() - one.int()).abs().max() <= 1, "guidance away from the prompt itself is none"
    assert "steps" in made.pictures()
    with pytest.raises(ValueError, match="sample.prompts is missing"):
        images()


def test_encodings_of_another_text_encoder_are_rejected(tmp_path):
    write_images(tmp_path / "in")
    encoded(tmp_path, cropped(tmp_path))
    data, pairs = tmp_path / "crops" / "manifest.json", tmp_path / "captions" / "manifest.json"
    other = stage(tmp_path, 1, encoder={"type": "hashed", "dim": 64})
    with pytest.raises(ValueError, match="were encoded by .*'dim': 128.* but the experiment names .*'dim': 64"):
        prepare_training(other, data, None, [pairs])
    with pytest.raises(ValueError, match="reads captions beside its data. Name their manifest.json: --pairs"):
        prepare_training(stage(tmp_path, 1), data, None)
    with pytest.raises(ValueError, match="holds crops, not captions"):
        prepare_training(stage(tmp_path, 1), data, None, [data])
    with pytest.raises(
        ValueError, match="--pairs names 2 sets, but the dit reads captions .* Leave out a set of crops"
    ):
        prepare_training(stage(tmp_path, 1), data, None, [pairs, data])
    trained(tmp_path, 1, tmp_path / "out")
    model = load_model(tmp_path / "out")
    captions = model.pairs["captions"]
    changed = {"captions": {**captions, "text": {**captions["text"], "version": 0}}}
    settings = parse(SampleConfig, {"prompts": ["a"]}, "sample")
    with pytest.raises(ValueError, match="Restore the one that encoded them, or train again"):
        model.system.conditioning.sampling_request(ConditionInputs(settings, torch.arange(1), changed))  # type: ignore[attr-defined]
