"""Inputs of a prior's training, from stored pairs of embeddings."""

from __future__ import annotations

from torch import Tensor

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch
from image_diffusion.data.encoded.pairs import IMAGE, TEXT, TOKENS
from image_diffusion.systems.prior.reading import Scaling


def caption_inputs(pairs: Tensor, token_encodings: bool) -> dict[str, Tensor]:
    """Return the conditions of the network from stored pairs [B, 2 + L, dim]: "text_embed" [B, dim], and
    "text_encodings" [B, L, dim] if `token_encodings` is true and the pairs contain them."""
    cond = {"text_embed": pairs[:, TEXT].float()}
    if token_encodings and pairs.shape[1] > TOKENS:
        cond["text_encodings"] = pairs[:, TOKENS:].float()
    return cond


def pair_batch(pairs: Tensor, streams: Streams, scaling: Scaling, token_encodings: bool) -> Batch:
    """Return the batch of stored pairs [B, 2 + L, dim]. Raises ValueError for another shape."""
    if pairs.ndim != 3 or pairs.shape[1] < TOKENS:
        raise ValueError(
            f"The prior learns from pairs of embeddings, [B, 2 or more, dim], but the data set holds "
            f"{list(pairs.shape[1:])}. Train on what embed wrote."
        )
    return Batch(scaling.x(pairs[:, IMAGE].float()), caption_inputs(pairs, token_encodings), streams)
