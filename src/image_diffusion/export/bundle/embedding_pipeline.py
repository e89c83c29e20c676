"""Pipeline of a prior of image-diffusion, which makes image embeddings. Needs diffusers, torch and pydantic; not
image-diffusion."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor


class Pipeline(DiffusionPipeline):  # type: ignore[misc]
    """Embeddings of captions -> embeddings of images."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.register_modules(model=model)

    @torch.no_grad()
    def __call__(
        self,
        text_embed: Tensor,
        text_encodings: Tensor | None = None,
        seeds: list[int] | None = None,
        num_inference_steps: int = 64,
        guidance_scale: float = 1.0,
        num_candidates: int = 2,
        generator: torch.Generator | None = None,
        **settings: Any,
    ) -> Tensor:
        """Predict image embeddings, float32 [N, dim] on the CPU, in the scale of the training embeddings.

        text_embed: [N, dim]; text_encodings: of a caption's tokens, [N, L, dim]. seeds: one per caption; if omitted,
        drawn from `generator`. num_candidates: embeddings sampled per caption, of which the nearest to the caption is
        kept. settings: further settings of image-diffusion's EmbeddingSampling, such as `seed`. Raises ValueError for
        arguments that do not fit the model.
        """
        cond = {"text_embed": text_embed}
        if text_encodings is not None:
            cond["text_encodings"] = text_encodings
        if seeds is None:
            seeds = torch.randint(2**31, (len(text_embed),), generator=generator).tolist()
        chosen = {
            "sampler": {"type": "ddim", "num_steps": num_inference_steps},
            "guidance_scale": guidance_scale,
            "num_candidates": num_candidates,
            **settings,
        }
        embeddings: Tensor = self.model(cond, seeds, chosen)
        return embeddings
