"""What a codec keeps of images: pictures and numbers, of one batch and, now and then while it is trained, of many."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from image_diffusion.codecs.codec import from_uint8, to_uint8
from image_diffusion.core.figures import new_figure, save_figure
from image_diffusion.core.pictures import image_grid, save_picture
from image_diffusion.metrics.reconstruction import codebook_use, psnr, ssim
from image_diffusion.networks.autoencoder import Autoencoder
from image_diffusion.networks.dvae import DVAE
from image_diffusion.systems.given import Model, Preview, ToPreview
from image_diffusion.systems.system import on_best_device

_SHOWN = 16
_SMALLEST_SSIM = 11  # pixels of its window


@dataclass(frozen=True)
class Reconstruction:
    """What a codec makes of a batch.

    images: uint8 [B, C, H, W]. decoded: the same shape, for each way the network has to decode them ("mean" of the
    posterior; "soft" and "hard" tokens). tokens: the most probable ones, int64 [B, h, w]; None without a codebook.
    """

    images: Tensor
    decoded: dict[str, Tensor]
    tokens: Tensor | None

    def quality(self) -> dict[str, Tensor]:
        """Of each image, float64 [B]: "psnr_…" in dB and, from 11 pixels on, "ssim_…", of each way."""
        found = {f"psnr_{way}": psnr(self.images, decoded) for way, decoded in self.decoded.items()}
        if self.images.shape[-1] >= _SMALLEST_SSIM:
            found |= {f"ssim_{way}": ssim(self.images, decoded) for way, decoded in self.decoded.items()}
        return found

    def picture(self) -> Image.Image:
        """The images in a row, and under them a row for each way."""
        return image_grid(torch.cat([self.images, *self.decoded.values()]).cpu(), columns=len(self.images))


@torch.no_grad()
def reconstruct(network: nn.Module, images: Tensor) -> Reconstruction:
    """Encode and decode uint8 images [B, C, H, W], on the network's device."""
    assert isinstance(network, Autoencoder | DVAE)
    images = images.to(next(network.parameters()).device)
    x = from_uint8(images)
    decoded = {way: to_uint8(values) for way, values in network.reconstructions(x).items()}
    return Reconstruction(images, decoded, network.indices(x) if isinstance(network, DVAE) else None)


def show_reconstructions(
    network: nn.Module, images: Tensor, batch_size: int, folder: Path, step: int
) -> dict[str, Path | float]:
    """Encode and decode images, uint8 [N, C, H, W], and tell what is left of them, by name.

    "reconstructions": a picture, the first images in a row, and under them a row for each way the network has to
    decode them. "psnr_…" in dB and "ssim_…" of each way, means over the images. Of a discrete VAE also "codebook": a
    picture, how often each token is the most probable one; "codebook_usage", the share of tokens that ever are;
    "dead_codes", the number of those that never are; and "codebook_perplexity". Pictures are written into the folder.
    """
    sums: dict[str, Tensor] = {}
    counts: Tensor | None = None
    for start in range(0, len(images), batch_size):
        found = reconstruct(network, images[start : start + batch_size])
        for name, value in found.quality().items():
            sums[name] = sums.get(name, value.new_zeros(())) + value.sum()
        if isinstance(network, DVAE) and found.tokens is not None:
            here = found.tokens.flatten().bincount(minlength=network.codebook.num_embeddings)
            counts = here if counts is None else counts + here
    result: dict[str, Path | float] = {name: float(total) / len(images) for name, total in sums.items()}
    path = folder / f"reconstructions-{step:07d}.png"
    save_picture(reconstruct(network, images[:_SHOWN]).picture(), path)
    result["reconstructions"] = path
    if counts is not None:
        result |= codebook_use(counts)
        plot = folder / f"codebook-{step:07d}.png"
        plot_codebook(counts, plot)
        result["codebook"] = plot
    return result


def preview_reconstructions(given: ToPreview) -> Preview:
    """Shows what is left of held-out images, as many as the network is validated on."""

    def draw(network: nn.Module, step: int, folder: Path) -> dict[str, Path | float]:
        images = given.held_out.gather(np.arange(min(given.held_out.num_samples, given.num_samples)))
        return show_reconstructions(network, images, given.settings.batch_size, folder, step)

    return draw


class Reconstructions:
    """Encodes and decodes images that are sent to it."""

    def __init__(self, model: Model, decoded: str) -> None:
        self._network, self._decoded = on_best_device(model), decoded

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The images, uint8 [N, H, W, C], as they are decoded from their latents."""
        found = reconstruct(self._network, torch.tensor(images).permute(0, 3, 1, 2))
        return found.decoded[self._decoded].permute(0, 2, 3, 1).cpu().contiguous().numpy()


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
