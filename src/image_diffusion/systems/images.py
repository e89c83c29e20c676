"""Samples that are images: samples.npz, pictures of them, and how they were made."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image

from image_diffusion.core.arrays import ImageDigests, read_arrays, stream_samples
from image_diffusion.core.files import write_json
from image_diffusion.core.pictures import grid_columns, image_grid, save_picture
from image_diffusion.core.verify import describe
from image_diffusion.systems.given import ToWrite


@dataclass(frozen=True)
class ImageFiles:
    """samples.npz, of all images or of the first ones; grid.png, what else the maker draws, samples.json; with
    `pictures` in the settings each as a PNG."""

    kind: Literal["images"] = "images"
    one: str = "image"
    file: str = "samples.npz"

    def shown(self, settings: Any) -> int:
        """As many as the grid holds."""
        return int(settings.grid_images)

    def write(self, given: ToWrite) -> dict[str, Path]:
        """Write them; no more than a batch is in memory."""
        settings, made, folder = given.settings, given.made, given.output.parent
        labels = None if made.labels is None else made.labels[: given.count]
        digests = ImageDigests()
        stream_samples(given.output, digests.passed(given.batches), given.count, labels)
        images = read_arrays(given.output)["arr_0"]
        shown = torch.from_numpy(images[: settings.grid_images].copy()).permute(0, 3, 1, 2)
        columns = grid_columns(len(shown), len(given.model.classes))
        save_picture(image_grid(shown, columns, made.titles[: len(shown)]), folder / "grid.png")
        pictures = made.pictures()
        for name, picture in pictures.items():
            save_picture(picture, folder / f"{name}.png")
        shutil.rmtree(folder / "pictures", ignore_errors=True)  # of a run that made more
        if settings.pictures:
            for seed, image in enumerate(images, settings.first_seed):
                save_picture(Image.fromarray(image.squeeze()), folder / "pictures" / f"{seed:08}.png")
        drawn = [folder / f"{name}.png" for name in ("grid", *pictures)]
        all_images = {"images_sha256": digests.of_all} if given.count == settings.num_samples else {}
        files = {"files": describe(folder, [given.output, *drawn])}
        write_json(folder / "samples.json", given.described | all_images | files)
        return {"samples": folder / "grid.png", "denoising": folder / "steps.png"}
