"""unCLIP: a prior turns captions into image embeddings, and a decoder turns embeddings into images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import dump, parse, to_yaml
from image_diffusion.core.files.atomic import write_json
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import EMBEDDING, Batch, DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.captions import ClassCaptions
from image_diffusion.data.encoded.pairs import Splits, write_pairs
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.sources.embeddings import Embeddings, open_rows
from image_diffusion.networks.dit import DiT, DiTConfig
from image_diffusion.objectives.label_dropout import LabelDropout
from image_diffusion.stages import sample
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.pairs.config import CropPairs
from image_diffusion.systems.prior import generation as making
from image_diffusion.systems.prior.generation import PriorSampleConfig, text_encoder
from image_diffusion.systems.sampling import SamplingInputs
from image_diffusion.text_encoders.hashing import HashingText
from image_diffusion.tracking.pyfunc import _load_pyfunc, usage
from image_diffusion.training.load_model import load_codec, load_model
from image_diffusion.training.session import run

CPU, DIM = torch.device("cpu"), 16
NETWORK = {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}
SAMPLER = {"type": "euler", "num_steps": 2}


class Brightness:
    """An image encoder with embeddings of norm 1. name: of the encoder, in its identity."""

    dim = DIM

    def __init__(self, name: str) -> None:
        self.identity = {"type": name}

    def images(self, images: Tensor) -> Tensor:
        return F.normalize(images.float().flatten(1)[:, :DIM] + 1, dim=1)


def write_data(folder: Path, encoder: str = "brightness") -> None:
    """Write crops of two classes to `crops` and their pairs to `pairs`."""
    noise = np.random.default_rng(0).integers(0, 100, (24, 192), dtype=np.uint8)
    for number in range(24):
        path = folder / "in" / ("dark", "light")[number % 2] / f"{number:02d}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(b"P6 8 8 255\n" + bytes(noise[number] + 100 * (number % 2)))
    source = {"type": "folder", "path": str(folder / "in")}
    data = {"name": "x", "source": source, "resolution": 8, "num_shards": 3, "validation_fraction": 0.25}
    crop_dataset(parse(DataConfig, data, "data"), folder / "crops")
    pairs = CropPairs(folder / "crops", Brightness(encoder), HashingText(DIM, 3), ClassCaptions(), None)
    write_pairs(pairs, "x", Splits(), "float16", folder / "pairs")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_data(tmp_path)
    return tmp_path


def trained(folder: Path, system: dict[str, Any], output: Path, steps: int = 2, **train: Any) -> bytes:
    """Return the bytes of the weights after these steps. A decoder learns from crops, a prior from their pairs."""
    settings = {"steps": steps, "global_batch": 8, "flip_probability": 0, "checkpoint": {"every_steps": 1}}
    settings |= {"ema": {"rates": [0.5], "warmup": None}, "optimizer": {"lr": 0.05}, "validate_every_steps": 2} | train
    stage = {"experiment": "x", "codec": {"type": "rgb"}, "system": system, "train": settings}
    decodes = system["type"] == "dit"
    if decodes:
        stage["preview"] = {"num_samples": 3, "sampler": SAMPLER}
    (folder / "train.yaml").write_text(to_yaml(stage))
    pairs = folder / "pairs" / "manifest.json"
    given = (folder / "crops" / "manifest.json", None, [pairs]) if decodes else (pairs, None)
    training = prepare_training(folder / "train.yaml", *given)
    run(training.build, training.stage.train, training.model, training.data, output, None)
    return (output / "weights.safetensors").read_bytes()


DECODER: dict[str, Any] = {
    "type": "dit",
    "condition": {"type": "embedding"},
    "network": NETWORK,
    "process": {"type": "flow"},
    "objective": {"type": "flow_matching", "label_drop_probability": 0.2},
}
PRIOR: dict[str, Any] = {
    "type": "prior",
    "network": {"depth": 1, "num_heads": 2, "head_width": 8, "max_text_len": 3, "ff_mult": 1},
    "process": {"schedule": {"type": "cosine"}, "num_timesteps": 20},
}


def images(weights: Path, *embeddings: Path, **settings: Any) -> tuple[Tensor, Any]:
    """Return the images of `sample` for these embeddings, in two batches, and their maker."""
    model = load_model(weights)
    config = parse(SampleConfig, {"num_samples": 4, "sampler": SAMPLER} | settings, "sample")
    given = SamplingInputs(model, config, load_codec(model, None, CPU), load_model, embeddings=embeddings)
    made = model.system.sampling().maker(given)
    return torch.cat([made(slice(i, i + 2)) for i in (0, 2)]), made


def test_embedding_conditions_through_the_time_and_through_tokens():
    spec, x, t = (
        DataSpec(channels=3, resolution=8, conditions={EMBEDDING: (DIM,)}),
        torch.randn(2, 3, 8, 8),
        torch.ones(2),
    )
    told = torch.randn(2, DIM)
    for tokens in (0, 4):
        torch.manual_seed(0)
        network = DiT(DiTConfig(**NETWORK, embedding_tokens=tokens), spec)
        assert hasattr(network.blocks[0].attn, "context_kv") == (tokens > 0)
        for parameter in network.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        out = network(x, t, embedding=told)
        torch.testing.assert_close(network(x, t, embedding=3 * told), out, msg="its norm tells nothing")
        assert not torch.allclose(network(x, t, embedding=told.flip(0)), out)
        for name, rest in {"image_embedder.mlp.2.weight": 0, "image_embedder.tokens.weight": 0}.items():
            if name in dict(network.named_parameters()):
                dict(network.named_parameters())[name].data.fill_(rest)
        same = network(x, t, embedding=told.flip(0))
        torch.testing.assert_close(network(x, t, embedding=told), same, msg="there is no third way")
        with pytest.raises(ValueError, match="built for the conditions embedding of 16, but was called with none"):
            network(x, t)


def test_pairs_keep_their_ids_when_images_are_saved_again(data):
    before = sorted(path.read_bytes() for path in (data / "pairs").glob("*.tar"))
    for image in (data / "in/dark").iterdir():
        image.write_bytes(image.read_bytes().replace(b"P6 ", b"P6 # x\n"))
    write_data(data)
    crops = open_shards(data / "crops", "all")
    assert crops.join(open_shards(data / "pairs", "all")).num_samples == 24
    assert before == sorted(path.read_bytes() for path in (data / "pairs").glob("*.tar"))


def test_a_dropped_embedding_is_zeros():
    number = torch.arange(400)
    streams = Streams(0, torch.zeros_like(number), number)
    batch = Batch(torch.zeros(400, 3, 8, 8), {EMBEDDING: torch.ones(400, DIM)}, streams)
    dropout = LabelDropout(0.25, DataSpec(channels=3, resolution=8, conditions={EMBEDDING: (DIM,)}))
    told = dropout(batch, torch.nn.Identity())[EMBEDDING]
    assert set(told.mean(1).tolist()) == {0.0, 1.0} and 0.6 < told.mean().item() < 0.9


def test_decoder_resumes_bit_exactly_and_samples_from_held_out_embeddings(data, tmp_path):
    whole = trained(data, DECODER, tmp_path / "once", 4, grid_every_steps=2)
    assert trained(data, DECODER, tmp_path / "twice", 2, grid_every_steps=2) != whole
    assert trained(data, DECODER, tmp_path / "twice", 4, grid_every_steps=2) == whole
    model = load_model(tmp_path / "once")
    assert model.spec.num_classes == 0 and model.spec.conditions == {EMBEDDING: (DIM,)}
    assert len(list((tmp_path / "once/previews").rglob("step-???????.png"))) == 3

    folders = data / "pairs", data / "crops"
    drawn, made = images(tmp_path / "once", *folders)
    held_out = open_shards(data / "crops", "validation")
    assert made.labels.tolist() == held_out.labels[np.arange(4) % held_out.num_samples].tolist()
    assert made.described["embeddings"]["split"] == "validation" and made.titles == []
    later, _ = images(tmp_path / "once", *folders, first_seed=2)
    assert torch.equal(later[:2], drawn[2:]), "a seed has its embedding"
    guided, _ = images(tmp_path / "once", *folders, guidance={"guidance_scale": 3})
    assert not torch.equal(guided, drawn)
    with pytest.raises(ValueError, match="Name the folders of their pairs and of their crops"):
        images(tmp_path / "once")


def test_decoder_may_be_conditioned_on_the_class_too(data, tmp_path):
    both = DECODER | {"condition": [{"type": "label"}, {"type": "embedding"}]}
    whole = trained(data, both, tmp_path / "once", 4)
    trained(data, both, tmp_path / "twice", 2)
    assert trained(data, both, tmp_path / "twice", 4) == whole
    model = load_model(tmp_path / "once")
    assert model.spec.num_classes == 2 and model.spec.conditions == {EMBEDDING: (DIM,)}
    folders = data / "pairs", data / "crops"
    drawn, made = images(tmp_path / "once", *folders)
    held_out = open_shards(data / "crops", "validation")
    assert made.labels.tolist() == held_out.labels[np.arange(4) % held_out.num_samples].tolist()
    guided, _ = images(tmp_path / "once", *folders, guidance={"guidance_scale": 3})
    assert not torch.equal(guided, drawn)


@pytest.fixture
def prior(data: Path, tmp_path: Path) -> Path:
    """The folder of a trained prior."""
    trained(data, PRIOR, tmp_path / "prior", grid_every_steps=None)
    return tmp_path / "prior"


def embedded(prior: Path, output: Path, *more: Any, **settings: Any) -> Path:
    """Run the command `sample`, and return the folder of its output."""
    chosen = {"prompts": ["a photo of a light", "a photo of a dark"], "num_samples": 7, "batch_size": 4}
    chosen |= {"first_seed": 5, "sampler": {"type": "ddim", "num_steps": 3}, "num_candidates": 1} | settings
    config = output.parent / "sample.yaml"
    config.write_text(to_yaml({"sample": dump(parse(PriorSampleConfig, chosen, "sample"))}))
    sample.main(
        list(map(str, ["--config", config, "--weights", prior / "weights.safetensors", "--output", output, *more]))
    )
    return output.parent


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_prior_writes_embeddings_in_clip_retrieval_layout(prior, tmp_path, monkeypatch):
    monkeypatch.setattr(making, "_ROWS", 5)
    (tmp_path / "one").mkdir()
    folder = embedded(prior, tmp_path / "one" / "embeddings.json")
    (folder / "sample.yaml").unlink()
    source = Embeddings(path=str(folder), texts=None, id_column="id")
    parts = source.parts()
    rows = np.concatenate([open_rows(part.image) for part in parts])
    assert [part.num_rows for part in parts] == [5, 2] and rows.shape == (7, DIM) and rows.dtype == np.float16
    captions = [caption for part in parts for caption in source.captions(part)]
    assert captions[:3] == ["a photo of a light", "a photo of a dark", "a photo of a light"]
    assert source.ids(parts[1], 1) == ["000000005", "000000006"]
    described = json.loads((folder / "embeddings.json").read_text())
    assert described["kind"] == "embeddings" and len(described["files"]) == 4
    assert described["pairs"]["image"] == {"type": "brightness"} and described["weights_sha256"]

    assert content(embedded(prior, tmp_path / "one" / "embeddings.json")) | {"sample.yaml": b""} == content(folder) | {
        "sample.yaml": b""
    }
    (tmp_path / "two").mkdir()
    written = [tmp_path / "two" / f"part-{i}-of-2.npz" for i in range(2)]
    for i, path in reversed(list(enumerate(written))):
        embedded(prior, path, "--part", f"{i}/2")
    joined = embedded(prior, tmp_path / "two" / "embeddings.json", "--made", *written)
    one, two = content(folder), content(joined)
    assert {name for name in two if name not in one} == set() and one == two, "parts are the bytes of one job"

    (tmp_path / "three").mkdir()
    other = embedded(prior, tmp_path / "three" / "embeddings.json", batch_size=3)
    again = np.concatenate([open_rows(part.image) for part in Embeddings(path=str(other), texts=None).parts()])
    np.testing.assert_allclose(again.astype(float), rows.astype(float), atol=2e-3)
    (tmp_path / "four").mkdir()
    fewer = embedded(prior, tmp_path / "four" / "embeddings.json", first_seed=7, num_samples=2)
    np.testing.assert_allclose(open_rows(fewer / "img_emb/img_emb_0.npy").astype(float), rows[2:4], atol=2e-3)


def test_decoder_samples_from_embeddings_of_a_prior(data, prior, tmp_path):
    trained(data, DECODER, tmp_path / "decoder", grid_every_steps=None)
    (tmp_path / "made").mkdir()
    folder = embedded(prior, tmp_path / "made" / "embeddings.json")
    drawn, made = images(tmp_path / "decoder", folder, embeddings={"experiment": "prior"})
    assert made.titles[:2] == ["a photo of a light", "a photo of a dark"] == made.described["prompts"][:2]
    assert made.labels.tolist() == [1, 0, 1, 0], "the classes that the captions name"
    by_path, _ = images(tmp_path / "decoder", embeddings=str(folder))
    assert torch.equal(by_path, drawn)
    _, round_again = images(tmp_path / "decoder", embeddings=str(folder), first_seed=6)
    assert round_again.titles == [made.titles[0], made.titles[0], made.titles[1], made.titles[0]], "seed 7 has row 0"

    path = folder / "img_emb" / "img_emb_0.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match="img_emb_0.npy"):
        images(tmp_path / "decoder", embeddings=str(folder))
    with pytest.raises(ValueError, match="sample.embeddings: .*nowhere/img_emb does not exist"):
        images(tmp_path / "decoder", embeddings=str(tmp_path / "nowhere"))


def test_served_decoder_embeds_captions_by_the_prior_and_matches_sample(data, prior, tmp_path):
    import pandas

    trained(data, DECODER, tmp_path / "decoder", grid_every_steps=None)
    (tmp_path / "made").mkdir()
    folder = embedded(prior, tmp_path / "made" / "embeddings.json", first_seed=0)
    drawn, made = images(tmp_path / "decoder", folder, embeddings={"experiment": "prior"})
    served = tmp_path / "decoder"
    assert usage(served) is None, "alone it is told embeddings"
    config = {"num_samples": 4, "sampler": SAMPLER, "embeddings": {"experiment": "prior"}}
    (served / "sample.yaml").write_text(to_yaml({"sample": dump(parse(SampleConfig, config, "sample"))}))
    prior.rename(served / "embeds")
    (folder / "sample.yaml").rename(served / "embeds" / "sample.yaml")
    taken = usage(served, embeds=True)
    assert taken is not None and [(each.name, each.required) for each in taken.signature.inputs] == [
        ("seed", True),
        ("prompt", True),
    ]
    model = _load_pyfunc(str(served))
    rows = pandas.DataFrame({"seed": range(4), "prompt": made.titles})
    expected = drawn.permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(model.predict(rows).astype(int), expected, atol=1)
    np.testing.assert_allclose(model.predict(rows[2:3]).astype(int), expected[2:3], atol=1)
    with pytest.raises(ValueError, match="makes no embeddings. Name an experiment with a prior"):
        load_model(served).system.sampling().embedder(load_model(served), None)


def test_embeddings_by_another_encoder_are_refused(data, prior, tmp_path):
    (tmp_path / "made").mkdir()
    folder = embedded(prior, tmp_path / "made" / "embeddings.json")
    write_data(tmp_path / "other", "another")
    trained(tmp_path / "other", DECODER, tmp_path / "decoder", grid_every_steps=None)
    with pytest.raises(ValueError, match="predicts embeddings of .*brightness.* trained on those of .*another"):
        images(tmp_path / "decoder", embeddings=str(folder))
    path = folder / "embeddings.json"
    said = json.loads(path.read_text())
    for image in ({"type": "another", "num_tokens": 7}, {"type": "files"}):
        write_json(path, said | {"pairs": {"image": image}})
        assert images(tmp_path / "decoder", embeddings=str(folder))[0].shape == (4, 3, 8, 8), image


def test_prompts_use_the_text_encoder_of_the_captions(prior):
    pairs = load_model(prior).pairs["pairs"]
    assert pairs["text"] == text_encoder(pairs, None).identity == HashingText(DIM, 3).identity
    for unknown in (None, {"text": {"type": "files"}}):
        with pytest.raises(ValueError, match=r"does not record the encoder of its captions. Set sample.clip"):
            text_encoder(unknown, None)
    with pytest.raises(ValueError, match="the text encoder is now"):
        text_encoder({"text": pairs["text"] | {"version": 0}}, None)


def test_guidance_option_sets_the_key_of_a_prior(prior, tmp_path):
    (tmp_path / "one").mkdir()
    folder = embedded(prior, tmp_path / "one" / "embeddings.json", "--guidance", "2")
    assert json.loads((folder / "embeddings.json").read_text())["settings"]["guidance_scale"] == 2
