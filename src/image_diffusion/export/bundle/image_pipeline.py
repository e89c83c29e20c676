"""Pipeline of a model of image-diffusion, which makes images. Needs diffusers, torch and pydantic; not image-diffusion
itself."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from PIL import Image
from torch import Tensor


class Pipeline(DiffusionPipeline):  # type: ignore[misc]
    """Seeds and conditions -> images."""

    _optional_components = ["vae"]  # noqa: RUF012 - as diffusers declares it
    model_cpu_offload_seq = "model->vae"

    def __init__(self, model: Any, vae: Any = None) -> None:
        super().__init__()
        self.register_modules(model=model, vae=vae)

    @torch.no_grad()
    def __call__(
        self,
        seeds: list[int] | None = None,
        class_labels: list[int | str] | None = None,
        prompt: str | list[str] | None = None,
        negative_prompt: str = "",
        image_embeds: Tensor | None = None,
        image: Tensor | None = None,
        num_images: int = 1,
        num_inference_steps: int | str | None = None,
        guidance_scale: float | dict[str, float] | None = None,
        sampler: dict[str, Any] | None = None,
        precision: str = "float32",
        batch_size: int = 16,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
        numbers: list[dict[str, float | None]] | None = None,
        seed: int = 0,
    ) -> Any:
        """Sample images, each from its own seed: they do not depend on the batch and equal those of image-diffusion.

        seeds: one per image; if omitted, `num_images` seeds are drawn from `generator`. class_labels: numbers or names
        of classes, used in turn; if omitted, each class in turn by seed, as with `sample.labels: balanced` and
        `first_seed: 0`. seed: `sample.seed`. prompt: for a model conditioned on text, used in turn. image_embeds: for a
        model conditioned on embeddings, float [N, dim], used in turn. image: for a model conditioned on images, such as
        small ones to enlarge, float [N, C', h, w] in [-1, 1], used in turn. sampler: a sampler of image-diffusion, such
        as {"type": "ddim", "num_steps": 50}; if omitted, the default of the type of system. num_inference_steps: its
        number of steps. guidance_scale: one for the whole condition, or one for each part by its type. precision:
        float32, tf32 or bf16. output_type: "pil", "np" ([N, H, W, C]) or "pt" ([N, C, H, W]): uint8, or the numbers of
        arrays, which "pil" shows as pictures. numbers: for a model conditioned on numbers, rows of numbers by name,
        used in turn; a missing number is left out. Raises ValueError for arguments that do not fit the model."""
        if seeds is None:
            seeds = torch.randint(2**31, (num_images,), generator=generator).tolist()
        images: Tensor = self.model(
            self.vae,
            seeds,
            class_labels,
            [prompt] if isinstance(prompt, str) else prompt,
            negative_prompt,
            image_embeds,
            numbers,
            image,
            num_inference_steps,
            guidance_scale,
            sampler,
            {"precision": precision, "batch_size": batch_size, "seed": seed},
        )
        if output_type == "pt":
            return ImagePipelineOutput(images=images)
        if output_type == "pil":
            images = self.model.pictures(images)
        arrays = images.permute(0, 2, 3, 1).contiguous().numpy()
        if output_type == "np":
            return ImagePipelineOutput(images=arrays)
        return ImagePipelineOutput(images=[Image.fromarray(array.squeeze()) for array in arrays])
