"""A diffusion model in an exported folder: it makes its images here as there, by the same `Generator`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from image_diffusion.codecs.codec import Codec, Packed
from image_diffusion.codecs.text.encoder import encode_captions
from image_diffusion.codecs.text.known import encoder_of
from image_diffusion.core.types import EMBEDDING, TEXT
from image_diffusion.systems.diffusion.reading import Reading
from image_diffusion.systems.diffusion.sampling import Generator, SampleConfig, requested_labels
from image_diffusion.systems.hub.exported import ExportedModel, named

CODEC = "codec"
"""The name of the network of a codec that is none of diffusers'."""


class ExportedDiffusion(ExportedModel):
    """Seeds -> images."""

    settings: ClassVar[type[SampleConfig]] = SampleConfig
    """What says how images are made."""

    def forward(
        self,
        vae: nn.Module | None,
        seeds: list[int],
        labels: list[int | str] | None,
        prompts: list[str] | None,
        negative_prompt: str,
        image_embeds: Tensor | None,
        low_res: Tensor | None,
        num_steps: int | str | None,
        guidance_scale: float | None,
        sampler: dict[str, Any] | None,
        settings: dict[str, Any],
    ) -> Tensor:
        """Uint8 images [N, C, H, W]; the pipeline says what is what. Raises ValueError for what does not fit."""
        chosen: dict[str, Any] = {**self.described["sample"], **settings}
        chosen["sampler"] = dict(sampler or chosen["sampler"])
        if num_steps is not None:
            chosen["sampler"]["num_steps"] = num_steps
        if guidance_scale is not None:
            chosen["guidance"] = {**chosen["guidance"], "guidance_scale": guidance_scale}
        classes, numbers = self.described["classes"], torch.tensor(seeds, dtype=torch.int64)
        told, null = self._told(prompts, negative_prompt, image_embeds, len(seeds))
        if labels is not None and not self.spec.num_classes:
            raise ValueError("class_labels are given, but the model knows no classes. Leave them out.")
        known = classes if self.spec.num_classes else []
        wanted = requested_labels("balanced" if labels is None else labels, len(seeds), known, numbers)
        if (low_res is None) != (self.described["low_resolution"] is None):
            edge = self.described["low_resolution"]
            raise ValueError(
                "image is given, but the model makes images from noise alone. Leave it out."
                if edge is None
                else f"image is missing: the model enlarges images of {edge} x {edge} pixels."
            )
        config = self.settings(**chosen)
        generator = self.generator(self._codec(vae), config, null)
        parts = []
        for start in range(0, len(seeds), config.batch_size):
            rows = slice(start, start + config.batch_size)
            some_labels, some_low = (None if each is None else each[rows] for each in (wanted, low_res))
            parts.append(generator(numbers[rows], some_labels, some_low, {name: t[rows] for name, t in told.items()}))
        return torch.cat(parts)

    def generator(self, codec: Codec, settings: Any, null: dict[str, Tensor]) -> Callable[..., Tensor]:
        """What makes images: seeds, labels, small images, and what else they are told, by name -> uint8 [N, C, H, W].
        settings: of the type `settings`. null: what guidance leads away from. Raises ValueError for what does not fit.
        """
        reading = Reading(**self.described["reading"])
        return Generator(self.network, reading, self.spec, codec, settings, null=null)

    def _codec(self, vae: nn.Module | None) -> Codec:
        described = self.described["codec"]
        network = dict(self.networks.items()).get(CODEC, vae)
        codec: Codec = named(described["class"]).unpacked(Packed(described["settings"], network))
        return codec

    def _told(
        self, prompts: list[str] | None, negative_prompt: str, image_embeds: Tensor | None, count: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What `count` images are told beside their class, and what guidance leads away from."""
        pairs = self.described["pairs"]
        if (image_embeds is None) == (EMBEDDING in self.spec.conditions):
            raise ValueError(
                "image_embeds are given, but the model is told no embeddings. Leave them out."
                if image_embeds is not None
                else f"image_embeds is missing: the model is told embeddings, float [N, "
                f"{self.spec.conditions[EMBEDDING][0]}]."
            )
        if TEXT not in self.spec.conditions:
            if prompts or negative_prompt:
                raise ValueError("A prompt is given, but the model is told no words. Leave it out.")
            if image_embeds is None:
                return {}, {}
            return {EMBEDDING: image_embeds.float()[torch.arange(count) % len(image_embeds)]}, {}
        if not prompts:
            raise ValueError('prompt is missing: the model is told words, such as prompt="a photo of a dog".')
        encoded = encode_captions(encoder_of(pairs, self.device), [*prompts, negative_prompt])
        null = {TEXT: encoded[-1]} if negative_prompt else {}
        return {TEXT: encoded[torch.arange(count) % len(prompts)]}, null
