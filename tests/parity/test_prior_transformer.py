"""The prior of Karlo and Kandinsky against diffusers' PriorTransformer: read, written, trained, and refused files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import merged, read_yaml, to_yaml
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.experiments.resolve import load_all
from image_diffusion.export import export_of
from image_diffusion.networks.prior_transformer import PriorTransformerConfig
from image_diffusion.objectives.embedding import EmbeddingDenoising
from image_diffusion.stages.export import read_foreign
from image_diffusion.systems.base import Model
from image_diffusion.systems.prior.generator import EmbeddingGenerator, EmbeddingSampling, caption_inputs
from image_diffusion.systems.prior.prior import PriorSystem
from image_diffusion.systems.warm_start import Trained, fitted
from image_diffusion.training.load_model import load_model

ROOT = Path(__file__).parents[2]
DIM, LEN = 12, 5
CLOSE = {"rtol": 0.0, "atol": 1e-5}


def theirs(**changes: Any) -> Any:
    from diffusers.models.transformers.prior_transformer import PriorTransformer

    torch.manual_seed(0)
    small = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "embedding_dim": DIM,
        "num_embeddings": LEN,
    }
    built = PriorTransformer(**small | changes)
    for parameter in built.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    built.clip_std.data = torch.rand(1, DIM) + 0.5
    return built.eval().requires_grad_(False)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x, t, a caption's embedding, its tokens, and the mask of its tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(3, LEN, DIM, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    x, text = torch.randn(2, 3, DIM, generator=generator)
    return x, torch.tensor([0, 400, 999]), text, tokens, mask


def expected(model: Any) -> Tensor:
    x, t, text, tokens, mask = inputs()
    found: Tensor = model(x, t, text, tokens, mask).predicted_image_embedding
    return found


def given(network: nn.Module) -> Tensor:
    x, t, text, tokens, mask = inputs()
    found: Tensor = network(x, t, text_embed=text, text_encodings=tokens * mask[..., None])
    return found


def read(folder: Path, at: str, **changes: Any) -> tuple[Model, Any]:
    original = theirs(**changes)
    original.save_pretrained(folder / at)
    told = read_foreign(folder / "theirs", "", None, folder / "train")
    assert told == "diffusers' PriorTransformer of depth 2"
    return load_model(folder / "train"), original


@pytest.mark.parametrize(
    ("at", "changes"),
    [
        ("theirs", {}),
        ("theirs/prior", {"norm_in_type": "layer", "embedding_proj_norm_type": "layer", "time_embed_dim": 20}),
    ],
    ids=["model", "pipeline"],
)
def test_a_folder_is_read_and_written_again(tmp_path: Path, at: str, changes: dict[str, Any]) -> None:
    from diffusers.models.transformers.prior_transformer import PriorTransformer

    model, original = read(tmp_path, at, **changes)
    torch.testing.assert_close(given(model.network), expected(original), **CLOSE)
    codec = Rgb().build(None, None, torch.device("cpu"), torch.float32)
    use = export_of(model.system, "diffusers").write(model.system, model, codec, tmp_path / "out")
    again = PriorTransformer.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(expected(again), expected(original), **CLOSE)
    x = inputs()[0]
    torch.testing.assert_close(again.post_process_latents(x), original.post_process_latents(x), **CLOSE)
    assert use.pipeline == "PriorTransformer"


def test_embeddings_are_normalised_by_their_mean_and_deviation(tmp_path: Path) -> None:
    model, original = read(tmp_path, "theirs")
    system = model.system
    assert isinstance(system, PriorSystem)
    pairs = torch.randn(3, 2 + LEN, DIM)
    ids = torch.arange(3)
    streams = Streams(0, torch.zeros_like(ids), ids)
    batch = system.batch(pairs, ids, streams, model.spec, None)  # type: ignore[arg-type]
    torch.testing.assert_close(original.post_process_latents(batch.x), pairs[:, 0], **CLOSE)
    losses = system.build_objective(model.spec)(model.network, batch)  # type: ignore[arg-type]
    assert losses.loss.shape == (3,) and losses.loss.isfinite().all()
    sampling = EmbeddingSampling(num_candidates=1, sampler={"type": "ddim", "num_steps": 3})  # type: ignore[arg-type]
    cond = caption_inputs(pairs, system.token_encodings)
    made = EmbeddingGenerator(model.network, system.reading(model.spec), model.spec, sampling)(cond, ids)
    scaled = system.model_copy(update={"image_statistics": None, "image_scale": 1.0})
    plain = EmbeddingGenerator(model.network, scaled.reading(model.spec), model.spec, sampling)(cond, ids)
    torch.testing.assert_close(made, original.post_process_latents(plain), **CLOSE)


def test_masked_caption_has_no_effect() -> None:
    torch.manual_seed(0)
    network = PriorTransformerConfig(depth=1, num_heads=2, head_width=8, max_text_len=LEN).build(
        DataSpec(channels=DIM, resolution=1)
    )
    x, t, text, tokens, _ = inputs()
    keep = torch.tensor([True, False, False])
    found = network(x, t, text_embed=text, text_encodings=tokens, text_keep=keep, image_keep=keep)
    other = network(
        x.flip(0), t, text_embed=text.flip(0), text_encodings=tokens.flip(0), text_keep=keep, image_keep=keep
    )
    assert torch.equal(found[1], other[1]) and not torch.equal(found[0], other[0])
    whole = network(x, t, text_embed=text, text_encodings=tokens)
    torch.testing.assert_close(whole[0], found[0])


def test_training_continues_from_it_only_with_same_normalisation(tmp_path: Path) -> None:
    model, _ = read(tmp_path, "theirs")
    system = model.system
    assert isinstance(system, PriorSystem)
    weights, theirs = model.network.state_dict(), Trained(system, model.spec, None)
    drops = system.model_copy(update={"objective": EmbeddingDenoising()})
    found, changes = fitted(model.network, Trained(drops, model.spec, []), weights, theirs)
    assert (
        found.keys() == weights.keys()
        and not changes
        and drops.objective.drops_conditions
        and not system.objective.drops_conditions
    )
    other = system.model_copy(update={"image_statistics": None})
    with pytest.raises(
        ValueError, match=r"system.image_statistics differs from the value that the weights were trained with"
    ):
        fitted(model.network, Trained(other, model.spec, []), weights, theirs)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"added_emb_type": None, "additional_embeddings": 3}, "added_emb_type None, which is not supported"),
        ({"clip_embed_dim": 7}, "clip_embed_dim 7, which is not supported"),
        ({"encoder_hid_proj_type": None}, "encoder_hid_proj_type None"),
    ],
)
def test_other_parts_are_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    theirs().save_pretrained(tmp_path / "theirs")
    config = tmp_path / "theirs/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ValueError, match=told):
        read_foreign(tmp_path / "theirs", "", None, tmp_path / "train")


def test_incomplete_folder_is_refused(tmp_path: Path) -> None:
    original = theirs()
    original.clip_std.data.zero_()
    original.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="a clip_std that is not above 0"):
        read_foreign(tmp_path / "theirs", "", None, tmp_path / "train")
    next((tmp_path / "theirs").glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match="has no diffusion_pytorch_model.safetensors"):
        read_foreign(tmp_path / "theirs", "", None, tmp_path / "train")


def test_other_kind_of_prior_is_refused_before_any_work(tmp_path: Path) -> None:
    raw = read_yaml(ROOT / "config/experiments/prior_demo.yaml")
    path = tmp_path / "x.yaml"
    path.write_text(to_yaml(merged(raw, {"export": {"format": "diffusers"}})))
    with pytest.raises(ValueError, match="PriorTransformer is another network than network.type prior"):
        load_all([path])
    small = {"type": "prior_transformer", "depth": 1, "num_heads": 2, "head_width": 8}
    raw["system"]["network"] = small
    path.write_text(to_yaml(merged(raw, {"export": {"format": "diffusers"}})))
    assert load_all([path])["x"][1].system.network.depth == 1  # type: ignore[attr-defined]
