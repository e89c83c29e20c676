"""A diffusion model in an exported folder: it makes its images by the same `Generator` as the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from image_diffusion.codecs.base import Codec, Packed
from image_diffusion.core.number_columns import NumberColumns, numbers_of
from image_diffusion.core.pictures import as_pictures
from image_diffusion.core.types import EMBEDDING, IMAGE, NUMBERS, TEXT
from image_diffusion.export.bundle.base import ExportedModel, named
from image_diffusion.systems.diffusion.generator import Generator, Reading, SampleConfig, requested_labels
from image_diffusion.text_encoders import encode_captions, encoder_of

CODEC = "codec"
"""Name of the network of a codec that diffusers does not have."""


class ExportedDiffusion(ExportedModel):
    """Seeds -> images."""

    settings: ClassVar[type[SampleConfig]] = SampleConfig
    """Type of the sampling settings."""

    def forward(
        self,
        vae: nn.Module | None,
        seeds: list[int],
        labels: list[int | str] | None,
        prompts: list[str] | None,
        negative_prompt: str,
        image_embeds: Tensor | None,
        given_numbers: list[dict[str, float | None]] | None,
        image: Tensor | None,
        num_steps: int | str | None,
        guidance_scale: float | dict[str, float] | None,
        sampler: dict[str, Any] | None,
        settings: dict[str, Any],
    ) -> Tensor:
        """Return images [N, C, H, W] of the data's type; the arguments are those of the pipeline. Raises ValueError for
        arguments that do not fit."""
        chosen: dict[str, Any] = {**self.described["sample"], **settings}
        chosen["sampler"] = dict(sampler or chosen["sampler"])
        if num_steps is not None:
            chosen["sampler"]["num_steps"] = num_steps
        if guidance_scale is not None:
            key = "scales" if isinstance(guidance_scale, dict) else "guidance_scale"
            chosen["guidance"] = {**chosen["guidance"], key: guidance_scale}
        classes, numbers = self.described["classes"], torch.tensor(seeds, dtype=torch.int64)
        conditions, null = self._conditions(prompts, negative_prompt, image_embeds, given_numbers, len(seeds))
        if labels is not None and not self.spec.num_classes:
            raise ValueError("class_labels are given, but the model has no classes. Leave them out.")
        class_names = classes if self.spec.num_classes else []
        untrained = self.described.get("untrained", ())
        config = self.settings(**chosen)
        requested = (
            requested_labels("balanced", class_names, numbers, untrained=untrained, first_seed=config.first_seed)
            if labels is None
            else requested_labels(labels, class_names, numbers)
        )
        conditions |= self._image(image, len(seeds))
        generator = self.generator(self._codec(vae), config, null)
        parts = []
        for start in range(0, len(seeds), config.batch_size):
            rows = slice(start, start + config.batch_size)
            some_labels = None if requested is None else requested[rows]
            parts.append(generator(numbers[rows], some_labels, {name: t[rows] for name, t in conditions.items()}))
        return torch.cat(parts)

    def pictures(self, images: Tensor) -> Tensor:
        """Return images as pictures, uint8 [N, C, H, W]; arrays in grey, RGB or false colours."""
        return as_pictures(self.spec.shown(images))

    def generator(self, codec: Codec, settings: Any, null: dict[str, Tensor]) -> Callable[..., Tensor]:
        """Return the function that makes images: seeds, labels, and other conditions, by name -> images
        [N, C, H, W]. settings: of the type `settings`. null: the condition that guidance leads away from. Raises
        ValueError for conditions that do not fit.
        """
        reading = Reading(**self.described["reading"])
        return Generator(self.network, reading, self.spec, codec, settings, null=null)

    def _image(self, image: Tensor | None, count: int) -> dict[str, Tensor]:
        """Return the image that each of `count` images is conditioned on, if the model takes images."""
        shape = self.spec.conditions.get(IMAGE)
        if (image is None) != (shape is None):
            raise ValueError(
                "image is given, but the model takes no images. Leave it out."
                if shape is None
                else f"image is missing: the model takes images, float [N, {', '.join(map(str, shape))}] in [-1, 1]."
            )
        if image is None:
            return {}
        return {IMAGE: torch.as_tensor(image).float()[torch.arange(count) % len(image)]}

    def _codec(self, vae: nn.Module | None) -> Codec:
        described = self.described["codec"]
        network = dict(self.networks.items()).get(CODEC, vae)
        codec: Codec = named(described["class"]).unpacked(Packed(described["settings"], network))
        return codec

    def _conditions(
        self,
        prompts: list[str] | None,
        negative_prompt: str,
        image_embeds: Tensor | None,
        rows: list[dict[str, float | None]] | None,
        count: int,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the conditions of `count` images other than their class, and the conditions that guidance leads away
        from."""
        pairs = self.described["pairs"]
        if (image_embeds is None) == (EMBEDDING in self.spec.conditions):
            raise ValueError(
                "image_embeds are given, but the model takes no embeddings. Leave them out."
                if image_embeds is not None
                else f"image_embeds is missing: the model takes embeddings, float [N, "
                f"{self.spec.conditions[EMBEDDING][0]}]."
            )
        if (not rows) == (NUMBERS in self.spec.conditions):
            raise ValueError(
                "numbers are given, but the model takes none. Leave them out."
                if rows
                else f"numbers is missing: the model takes rows of {', '.join(pairs['numbers']['columns'])}, such as "
                f"numbers=[{{{pairs['numbers']['columns'][0]!r}: {pairs['numbers']['ranges'][0][0]:g}}}]."
            )
        if (prompts or negative_prompt) and TEXT not in self.spec.conditions:
            raise ValueError("A prompt is given, but the model takes no prompts. Leave it out.")
        if not prompts and TEXT in self.spec.conditions:
            raise ValueError('prompt is missing: the model takes prompts, such as prompt="a photo of a dog".')
        numbers, conditions, null = torch.arange(count), dict[str, Tensor](), dict[str, Tensor]()
        if image_embeds is not None:
            conditions[EMBEDDING] = image_embeds.float()[numbers % len(image_embeds)]
        if rows:
            columns = NumberColumns.described(pairs["numbers"])
            if unknown := next((name for row in rows for name in row if name not in columns.names), None):
                raise ValueError(f"numbers names {unknown}. The model takes {', '.join(columns.names)}.")
            conditions[NUMBERS] = columns.scaled(numbers_of(rows, "numbers", columns.names))[numbers % len(rows)]
        if prompts:
            encoded = encode_captions(encoder_of(pairs["captions"], self.device), [*prompts, negative_prompt])
            conditions[TEXT] = encoded[numbers % len(prompts)]
            null = {TEXT: encoded[-1]} if negative_prompt else {}
        return conditions, null
