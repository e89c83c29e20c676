"""A text encoder trained in the pipeline, together with an image encoder, on the captions of the data. It knows only
the words of these captions. Its file contains the weights and, as metadata, the words and the hash of the image encoder
that shares its space.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.files.atomic import sha256_file, write_bytes
from image_diffusion.networks.token_transformer import TextTower
from image_diffusion.text_encoders.hashing import words_of

FILE = "text.safetensors"


class LearnedText:
    """Text encoder of captions -> embeddings of norm 1, as in `TextEncoder`. Read with `read_text`.

    words: the vocabulary, in the order of word numbers. Other words are ignored; a caption of only such words is zeros.
    """

    def __init__(self, tower: TextTower, words: Sequence[str], identity: dict[str, Any]) -> None:
        self._tower, self._words = tower.eval().requires_grad_(False), words
        self.identity, self.num_tokens = identity, int(identity["num_tokens"])
        self.dim = tower.projection.out_features

    @torch.inference_mode()
    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """Encode N captions -> [N, dim] and [N, num_tokens, dim], rows of zeros after the last word."""
        numbers = word_numbers(captions, self._words, self._tower.length)  # [N, L]
        texts, tokens = torch.zeros(len(captions), self.dim), torch.zeros(*numbers.shape, self.dim)
        has_words = numbers.any(1)
        if has_words.any():
            embedded, encoded = self._tower(numbers[has_words].to(self._tower.places.device))
            texts[has_words], tokens[has_words] = F.normalize(embedded, dim=1).cpu(), encoded.cpu()
        return texts, F.pad(tokens, (0, 0, 0, self.num_tokens - numbers.shape[1]))


def word_numbers(captions: Sequence[str], words: Sequence[str], length: int) -> Tensor:
    """Return the word numbers of each caption, int64 [N, length]: from 1, in the order of `words`, without unknown
    words, truncated to `length`, and padded with 0."""
    number = {word: i for i, word in enumerate(words, 1)}
    numbers = torch.zeros(len(captions), length, dtype=torch.int64)
    for row, caption in enumerate(captions):
        row_numbers = [number[word] for word in words_of(caption) if word in number][:length]
        numbers[row, : len(row_numbers)] = torch.tensor(row_numbers, dtype=torch.int64)
    return numbers


def write_text(folder: Path, tower: TextTower, words: Sequence[str], image: str) -> None:
    """Write the file of a text encoder. image: sha256 of the image encoder that shares its space."""
    tensors = {name: value.cpu().contiguous() for name, value in tower.state_dict().items()}
    described = json.dumps({"words": list(words), "image": image})  # one entry: the order of several would be undefined
    write_bytes(folder / FILE, save(tensors, {"encoder": described}))


def read_text(folder: Path, num_tokens: int, device: torch.device) -> LearnedText:
    """Read the encoder in a folder. Raises ValueError if its file is missing or invalid."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist. It is the text encoder of the model; copy it beside the weights.")
    try:
        with safe_open(path, "pt") as file:
            metadata: Mapping[str, str] = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        words: list[str] = json.loads(metadata["encoder"])["words"]
        tower = TextTower(len(words), *tensors["places"].shape)
        tower.load_state_dict(tensors)
    except (SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} is not a text encoder: {' '.join(str(error).split())}. Run embed again.") from None
    identity = {"type": "contrastive", "sha256": sha256_file(path), "num_tokens": num_tokens}
    return LearnedText(tower.to(device), words, identity)
