"""How a system of tokens is judged: its images as those of a diffusion, and the bits a token of held-out images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from image_diffusion.core.halfway import Arrays, batches
from image_diffusion.core.progress import Progress
from image_diffusion.core.streams import Streams
from image_diffusion.data.shards import open_shards
from image_diffusion.metrics.features import at_once, kept_together
from image_diffusion.metrics.intervals import mean_estimate
from image_diffusion.metrics.moments import block_of_each
from image_diffusion.objectives.masked_tokens import hidden_bits, hide
from image_diffusion.objectives.next_token import bits_of
from image_diffusion.systems.diffusion.evaluation import judge_diffusion
from image_diffusion.systems.given import Model, ToJudge
from image_diffusion.systems.system import on_best_device

if TYPE_CHECKING:
    from image_diffusion.systems.tokens import TokensSystem

_STRATA = 8


def judge_tokens(system: TokensSystem, given: ToJudge) -> dict[str, Any]:
    """What metrics.json holds: the metrics of its images, and "bits_per_token" of the validation split."""
    result = judge_diffusion(given)
    if given.encoded is not None and given.model is not None and not system.told_words:
        bits, described = bits_per_token(system, given.model, given.encoded)
        result["metrics"] |= bits
        result["protocol"]["bits_per_token"] = described
    return result


@torch.no_grad()
def bits_per_token(system: TokensSystem, model: Model, encoded: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entry of metrics.json, and how it was measured; of a set that holds nothing out, nothing.

    Of a causal network it is -log2 p(tokens | class) / N, exact. Of another one it is the bound of Hoogeboom et al.
    2022 ("Autoregressive diffusion models", section 3): the mean bits of k hidden tokens, k uniform in 1 … N; each
    image is looked at with eight of them, one in each eighth of that range. Raises ValueError for tokens of another
    codec.
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
        for count, rows in at_once(chosen):
            tokens = data.gather(rows).to(device).long().flatten(1)
            label = torch.from_numpy(data.labels[rows]).to(device)
            cond = {"label": label} if model.spec.num_classes else {}
            number = torch.from_numpy(rows).to(device)
            bits = (
                bits_of(network(tokens, **cond), tokens).mean(1)
                if system.objective.causal
                else _bound(network, tokens, cond, number)
            )
            parts.append(bits[:count])
        return {"bits": torch.cat(parts).cpu().numpy()}

    once, found = batches(["bits", data.digest]), []
    with Progress("bits", data.num_samples, "image") as progress:
        for chosen in kept_together(np.arange(data.num_samples)):
            found.append(torch.from_numpy(once(str(chosen[0]), partial(measure, chosen))["bits"]))
            progress.advance(len(chosen))
    each = torch.cat(found).double()
    entry = mean_estimate(each, block_of_each(len(each)), 0).as_dict()
    how = "exact" if system.objective.causal else f"a bound, from {_STRATA} masks of each image"
    return {"bits_per_token": entry}, {"data": data.digest, "num_samples": len(each), "how": how}


def _bound(network: Any, tokens: Tensor, cond: dict[str, Tensor], number: Tensor) -> Tensor:
    """The bound of each image, [B], in bits a token. number: int64 [B], whose masks are drawn."""
    places, total = tokens.shape[1], torch.zeros(len(tokens), device=tokens.device)
    for stratum in range(_STRATA):
        streams = Streams(0, torch.full_like(number, stratum), number)
        share = (stratum + streams.uniform("mask_ratio")) / _STRATA
        hidden = hide(streams, 1 + (share * places).long(), places)
        total += hidden_bits(network, tokens, hidden, cond)[0]
    return total / _STRATA
