"""Pipeline of a discrete VAE of image-diffusion, which encodes and decodes images. Needs diffusers, torch and
pydantic."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from PIL import Image
from torch import Tensor


class Pipeline(DiffusionPipeline):  # type: ignore[misc]
    """Images -> tokens -> images."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.register_modules(model=model)

    @torch.no_grad()
    def encode(self, images: Any) -> Tensor:
        """PIL images, or arrays [N, H, W, C], of the size that the codec was trained on -> tokens, int64 [N, h, w]."""
        arrays = np.stack([np.asarray(image) for image in images])
        arrays = arrays[..., None] if arrays.ndim == 3 else arrays
        tokens: Tensor = self.model.encode(torch.tensor(arrays).permute(0, 3, 1, 2))
        return tokens

    @torch.no_grad()
    def decode(self, tokens: Tensor, output_type: str = "pil") -> Any:
        """Tokens [N, h, w] -> images: "pil", or "np", [N, H, W, C]: uint8, or the numbers of arrays."""
        images = self.model.decode(tokens)
        if output_type == "pil":
            images = self.model.pictures(images)
        arrays = images.permute(0, 2, 3, 1).contiguous().numpy()
        return arrays if output_type == "np" else [Image.fromarray(array.squeeze()) for array in arrays]

    def __call__(self, images: Any, output_type: str = "pil") -> Any:
        """Reconstruct images: encode them and decode them again."""
        return ImagePipelineOutput(images=self.decode(self.encode(images), output_type))
