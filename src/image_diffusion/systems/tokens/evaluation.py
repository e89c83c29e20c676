"""Evaluation of a system of tokens: of its images, as for a diffusion, and of the bits per token of held-out images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.files.partial_results import Arrays, batches
from image_diffusion.core.process.progress import Progress
from image_diffusion.core.random.streams import Streams
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.metrics.features.base import padded_batches, storage_groups
from image_diffusion.objectives.tokens import bits_of, hidden_bits, hide
from image_diffusion.systems.base import on_best_device
from image_diffusion.systems.diffusion.evaluation import DiffusionEvaluation
from image_diffusion.systems.evaluation import EvaluationInputs
from image_diffusion.systems.interface import TrainedNetwork

_STRATA = 8


@dataclass(frozen=True)
class TokenEvaluation(DiffusionEvaluation):
    """Evaluation of images, and "bits_per_token" of the validation split.

    causal: whether the network predicts each token from the earlier ones. has_captions: whether it is conditioned on
    captions instead of classes.
    """

    reads_encoded: ClassVar[bool] = True

    causal: bool = False
    has_captions: bool = False

    def evaluate(self, inputs: EvaluationInputs) -> dict[str, Any]:
        result = super().evaluate(inputs)
        if inputs.encoded is not None and inputs.model is not None and not self.has_captions:
            bits, description = bits_per_token(inputs.model, inputs.encoded, self.causal)
            result["metrics"] |= bits
            result["protocol"]["bits_per_token"] = description
        return result


@torch.no_grad()
def bits_per_token(model: TrainedNetwork, encoded: Path, causal: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entry of metrics.json, and its protocol; both are empty without held-out images.

    For a causal network it is -log2 p(tokens | class) / N, exact. Otherwise it is the bound of Hoogeboom et al. 2022
    ("Autoregressive diffusion models", section 3): the mean bits of k masked tokens, k uniform in 1 … N; each image is
    evaluated with eight values of k, one in each eighth of that range. Raises ValueError for tokens of another codec.
    """
    data = open_shards(encoded, "validation")
    if data.manifest["codec"] != model.codec["identity"]:
        raise ValueError(
            f"{encoded} holds tokens of the codec {data.manifest['codec']}, but the model learned from those of "
            f"{model.codec['identity']}. Run encode again."
        )
    if not data.num_samples:
        return {}, {}
    network: Any = on_best_device(model)
    device = next(network.parameters()).device

    def measure(chosen: NDArray[np.int64]) -> Arrays:
        parts = []
        for count, rows in padded_batches(chosen):
            tokens = data.gather(rows).to(device).long().flatten(1)
            label = torch.from_numpy(data.labels[rows]).to(device)
            cond = {"label": label} if model.spec.num_classes else {}
            number = torch.from_numpy(rows).to(device)
            bits = bits_of(network(tokens, **cond), tokens).mean(1) if causal else _bound(network, tokens, cond, number)
            parts.append(bits[:count])
        return {"bits": torch.cat(parts).cpu().numpy()}

    once, parts = batches(["bits", data.digest]), []
    with Progress("bits", data.num_samples, "image") as progress:
        for chosen in storage_groups(np.arange(data.num_samples)):
            parts.append(torch.from_numpy(once(str(chosen[0]), partial(measure, chosen))["bits"]))
            progress.advance(len(chosen))
    bits = torch.cat(parts).double()
    entry = mean_estimate(bits, 0).as_dict()
    how = "exact" if causal else f"a bound, from {_STRATA} masks of each image"
    return {"bits_per_token": entry}, {"data": data.digest, "num_samples": len(bits), "how": how}


def _bound(network: Any, tokens: Tensor, cond: dict[str, Tensor], number: Tensor) -> Tensor:
    """Return the bound of each image, [B], in bits per token. number: int64 [B], of the images; they key the masks."""
    places, total = tokens.shape[1], torch.zeros(len(tokens), device=tokens.device)
    for stratum in range(_STRATA):
        streams = Streams(0, torch.full_like(number, stratum), number)
        share = (stratum + streams.uniform("mask_ratio")) / _STRATA
        hidden = hide(streams, 1 + (share * places).long(), places)
        total += hidden_bits(network, tokens, hidden, cond)[0]
    return total / _STRATA
