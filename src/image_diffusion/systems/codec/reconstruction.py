"""Reconstructions of a codec: pictures and metrics, of one batch and, at intervals during training, of many images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from image_diffusion.codecs.base import Codec, from_uint8, to_uint8
from image_diffusion.core.pictures import image_grid, new_figure, save_figure, save_picture
from image_diffusion.core.types import DataSpec
from image_diffusion.metrics.images.reconstruction import codebook_use, psnr, ssim
from image_diffusion.networks.autoencoder import Autoencoder
from image_diffusion.networks.dvae import DVAE
from image_diffusion.systems.base import on_best_device
from image_diffusion.systems.interface import TrainedNetwork
from image_diffusion.systems.sampling import Embed, Predict, Preview, PreviewInputs, Sampling, Served

_SHOWN = 16
_SMALLEST_SSIM = 11  # pixels of its window


@dataclass(frozen=True)
class Reconstruction:
    """Reconstructions of a batch by a codec.

    images: [B, C, H, W], uint8 or float32 from 0 to 255. decoded: the same shape, for each decoding mode of the network
    ("mean" of the posterior; "soft" and "hard" tokens). tokens: the most probable tokens, int64 [B, h, w]; None without
    a codebook.
    """

    images: Tensor
    decoded: dict[str, Tensor]
    tokens: Tensor | None

    def quality(self) -> dict[str, Tensor]:
        """Return the quality of each image, float64 [B], for each decoding mode: "psnr_…" in dB and, if both edges have
        11 pixels or more, "ssim_…"."""
        values = {f"psnr_{way}": psnr(self.images, decoded) for way, decoded in self.decoded.items()}
        if min(self.images.shape[2:]) >= _SMALLEST_SSIM:
            values |= {f"ssim_{way}": ssim(self.images, decoded) for way, decoded in self.decoded.items()}
        return values

    def picture(self) -> Image.Image:
        """Return a picture with a row of images, and a row for each decoding mode below."""
        return image_grid(torch.cat([self.images, *self.decoded.values()]).cpu(), columns=len(self.images))


@torch.no_grad()
def reconstruct(network: nn.Module, images: Tensor) -> Reconstruction:
    """Encode and decode images [B, C, H, W], on the network's device: pictures, uint8, or arrays as float32 from 0 to
    255."""
    assert isinstance(network, Autoencoder | DVAE)
    images = images.to(next(network.parameters()).device)
    reconstructions, tokens = network.reconstructions(from_uint8(images))
    decoded = {
        way: (values.float().clamp(-1, 1) + 1) * 127.5 if images.is_floating_point() else to_uint8(values)
        for way, values in reconstructions.items()
    }
    return Reconstruction(images, decoded, tokens)


def show_reconstructions(
    network: nn.Module, images: Tensor, batch_size: int, folder: Path, step: int
) -> dict[str, Path | float]:
    """Encode and decode images, [N, C, H, W] as `reconstruct` takes them, and return the measures of their
    reconstructions, by name.

    "reconstructions": a picture with a row of the first images, and a row for each decoding mode below. "psnr_…" in dB
    and "ssim_…" of each decoding mode: means over the images. For a discrete VAE also "codebook": a picture of how
    often each token is the most probable one; "codebook_usage": the share of tokens that are used; "dead_codes": the
    number of unused tokens; and "codebook_perplexity". Pictures are written into the folder.
    """
    sums: dict[str, Tensor] = {}
    counts: Tensor | None = None
    for start in range(0, len(images), batch_size):
        reconstruction = reconstruct(network, images[start : start + batch_size])
        for name, value in reconstruction.quality().items():
            sums[name] = sums.get(name, value.new_zeros(())) + value.sum()
        if isinstance(network, DVAE) and reconstruction.tokens is not None:
            counted = reconstruction.tokens.flatten().bincount(minlength=network.codebook.num_embeddings)
            counts = counted if counts is None else counts + counted
    result: dict[str, Path | float] = {name: float(total) / len(images) for name, total in sums.items()}
    path = folder / f"reconstructions-{step:07d}.png"
    first = [reconstruct(network, part) for part in images[:_SHOWN].split(batch_size)]
    decoded = {way: torch.cat([part.decoded[way] for part in first]) for way in first[0].decoded}
    save_picture(Reconstruction(torch.cat([part.images for part in first]), decoded, None).picture(), path)
    result["reconstructions"] = path
    if counts is not None:
        result |= codebook_use(counts)
        plot = folder / f"codebook-{step:07d}.png"
        plot_codebook(counts, plot)
        result["codebook"] = plot
    return result


@dataclass(frozen=True)
class CodecSampling(Sampling):
    """Previews and serving of a codec, which reconstructs images. decoded: the main decoding mode."""

    decoded: str

    def preview(self, inputs: PreviewInputs) -> Preview:
        """Return the function that reconstructs held-out images, as many as a validation uses."""

        def draw(network: nn.Module, step: int, folder: Path) -> dict[str, Path | float]:
            images = inputs.held_out.gather(np.arange(min(inputs.held_out.num_samples, inputs.num_samples)))
            return show_reconstructions(network, inputs.spec.shown(images), inputs.settings.batch_size, folder, step)

        return draw

    def served(
        self, spec: DataSpec, classes: list[str], pairs: Mapping[str, Any] | None = None, embeds: bool = False
    ) -> Served:
        return Served(images=(*spec.size, spec.channels), dtype="uint8" if spec.levels is None else spec.levels.dtype)

    def predictor(
        self,
        model: TrainedNetwork,
        settings: Any,
        codec: Callable[[], Codec],
        weaker: TrainedNetwork | None,
        embed: Embed | None = None,
    ) -> Predict:
        network = on_best_device(model)

        def predict(images: NDArray[Any]) -> NDArray[Any]:
            """Return the images, [N, H, W, C], decoded from their latents."""
            shown = model.spec.shown(torch.tensor(images).permute(0, 3, 1, 2))
            decoded = reconstruct(network, shown).decoded[self.decoded]
            if model.spec.levels is not None:
                decoded = model.spec.levels.restore(from_uint8(decoded))
            return decoded.permute(0, 2, 3, 1).cpu().contiguous().numpy()

        return predict


def plot_codebook(counts: Tensor, path: Path) -> None:
    """Write how often each token is used as PNG, the most frequent first. counts: [K]."""
    shares = counts.cpu().sort(descending=True).values.double() / counts.sum().cpu()
    perplexity = codebook_use(counts)["codebook_perplexity"]
    figure = new_figure(8, 4)
    axis = figure.subplots()
    axis.fill_between(range(len(shares)), shares.numpy(), step="mid", color="#4878a8")
    used = int((counts > 0).sum())
    axis.set(title=f"{used:,} of {len(counts):,} tokens used, perplexity {perplexity:,.1f}")
    axis.set(xlabel="token, most frequent first", ylabel="share of the positions", xlim=(0, len(shares) - 1))
    save_figure(figure, path)
