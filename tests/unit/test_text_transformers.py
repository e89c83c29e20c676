"""Text encoders of the package transformers, each tested with a tiny model of its kind with random weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from image_diffusion.core.config.base import parse
from image_diffusion.text_encoders import TextEncoderConfig, encode_captions

CPU = torch.device("cpu")
WORDS = ["<pad>", "</s>", "<unk>", "a", "dog", "red", "on", "grass"]
SMALL = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1}
LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_encoder(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write a model of this kind and its tokenizer by save_pretrained."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(seed)
    if kind == "clip":
        config = transformers.CLIPTextConfig(**SMALL, **LAYERS, max_position_embeddings=77, bos_token_id=2)
        model: Any = transformers.CLIPTextModel(config)
    elif kind == "siglip":
        model = transformers.SiglipTextModel(transformers.SiglipTextConfig(**SMALL, **LAYERS, projection_size=16))
    elif kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
        model = transformers.T5EncoderModel(transformers.T5Config(**SMALL, **sizes))
    else:
        model = transformers.BertModel(transformers.BertConfig(vocab_size=len(WORDS), pad_token_id=0, **LAYERS))
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["clip", "siglip", "t5", "auto"])
def test_encodings_do_not_depend_on_the_batch_and_weights_are_the_identity(kind, tmp_path):
    folder = write_encoder(kind, tmp_path / "one")
    config = parse(TextEncoderConfig, {"type": kind, "weights": str(folder)}, "pairs.encoder")
    encoder = config.build(CPU, 6)
    captions = ["a red dog on grass", "dog", "", "a dog a dog a dog a dog"]
    found = encode_captions(encoder, captions)
    assert found.shape == (4, 7, 16) and encoder.dim == 16 and found.isfinite().all()
    has = found[:, 1:].any(dim=2).sum(1).tolist()
    assert has == [6, 2, 0, 6] and found[[0, 1, 3], 0].any(dim=1).all(), "words and the end; cut where there is no room"
    torch.testing.assert_close(found[[1]], encode_captions(encoder, ["dog"]))
    assert torch.equal(found, encode_captions(config.build(CPU, 6), captions))
    other = config.model_copy(update={"weights": str(write_encoder(kind, tmp_path / "two", seed=1))})
    assert other.build(CPU, 6).identity["sha256"] != encoder.identity["sha256"]
    if kind in ("clip", "siglip"):
        with pytest.raises(ValueError, match=r"pairs.num_tokens is 99, but .* reads \d+ tokens"):
            config.build(CPU, 99)


def test_encodings_equal_hidden_states_of_the_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = write_encoder("t5", tmp_path)
    found = encode_captions(
        parse(TextEncoderConfig, {"type": "t5", "weights": str(folder)}, "x").build(CPU, 8), ["a dog"]
    )
    ids = torch.tensor([[3, 4, 1]])
    states = transformers.T5EncoderModel.from_pretrained(folder).eval()(input_ids=ids).last_hidden_state[0]
    torch.testing.assert_close(found[0, 1:4], states, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[0, 0], states.mean(0), atol=1e-5, rtol=1e-4)


def test_siglip_attends_to_padding(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = write_encoder("siglip", tmp_path)
    encoder = parse(TextEncoderConfig, {"type": "siglip", "weights": str(folder)}, "x").build(CPU, 8)
    ids = torch.tensor([[3, 4, 1] + [0] * 61])
    own = transformers.SiglipTextModel.from_pretrained(folder).eval()(input_ids=ids)
    encoded = encode_captions(encoder, ["a dog"])[0]
    torch.testing.assert_close(encoded[0], own.pooler_output[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(encoded[1:4], own.last_hidden_state[0, :3], atol=1e-5, rtol=1e-4)
    assert not encoded[4:].any() and encoder.identity["attends_to_padding"]


def test_missing_transformers_package_gives_a_one_line_error(tmp_path, monkeypatch):
    config = parse(TextEncoderConfig, {"type": "t5", "weights": str(tmp_path)}, "pairs.encoder")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"type is t5, which needs the package transformers. Install it: pip install"):
        config.build(CPU, 4)


def test_unloadable_encoder_weights_give_a_one_line_error(tmp_path):
    pytest.importorskip("transformers")
    config = parse(TextEncoderConfig, {"type": "t5", "weights": str(tmp_path)}, "pairs.encoder")
    with pytest.raises(
        ValueError, match=r"^The text encoder .* could not be loaded: .*pairs.encoder.weights"
    ) as caught:
        config.build(CPU, 4)
    assert len(str(caught.value).splitlines()) == 1
