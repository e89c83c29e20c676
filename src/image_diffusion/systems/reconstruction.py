"""What a codec in training keeps of images: pictures and numbers, now and then."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from image_diffusion.codecs.codec import from_uint8, to_uint8
from image_diffusion.core.files import atomic_write
from image_diffusion.core.pictures import image_grid, save_picture
from image_diffusion.metrics.reconstruction import codebook_use, psnr, ssim
from image_diffusion.networks.autoencoder import Autoencoder
from image_diffusion.networks.dvae import DVAE

_SHOWN = 16
_SMALLEST_SSIM = 11  # pixels of its window


@torch.no_grad()
def show_reconstructions(
    network: nn.Module, images: Tensor, batch_size: int, folder: Path, step: int
) -> dict[str, Path | float]:
    """Encode and decode images, uint8 [N, C, H, W], and tell what is left of them, by name.

    "reconstructions": a picture, the first images in a row, and under them a row for each way the network has to
    decode them. "psnr_…" in dB and "ssim_…" of each way, means over the images. Of a discrete VAE also "codebook": a
    picture, how often each token is the most probable one; "codebook_usage", the share of tokens that ever are;
    "dead_codes", the number of those that never are; and "codebook_perplexity". Pictures are written into the folder.
    """
    assert isinstance(network, Autoencoder | DVAE)
    device = next(network.parameters()).device
    shown: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    counts = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(images), batch_size):
        part = images[start : start + batch_size].to(device)
        x = from_uint8(part)
        for way, values in network.reconstructions(x).items():
            decoded = to_uint8(values)
            found = {f"psnr_{way}": psnr(part, decoded)}
            if part.shape[-1] >= _SMALLEST_SSIM:
                found[f"ssim_{way}"] = ssim(part, decoded)
            for name, value in found.items():
                sums[name] = sums.get(name, value.new_zeros(())) + value.sum()
            shown[way] = torch.cat([shown.get(way, decoded[:0].cpu()), decoded[:_SHOWN].cpu()])[:_SHOWN]
        if isinstance(network, DVAE):
            counts = counts + network.indices(x).flatten().bincount(minlength=network.codebook.num_embeddings)
    result: dict[str, Path | float] = {name: float(total) / len(images) for name, total in sums.items()}
    path = folder / f"reconstructions-{step:07d}.png"
    first = images[:_SHOWN]
    save_picture(image_grid(torch.cat([first, *shown.values()]), columns=len(first)), path)
    result["reconstructions"] = path
    if isinstance(network, DVAE):
        use = codebook_use(counts)
        result["codebook_usage"], result["codebook_perplexity"] = use["usage"], use["perplexity"]
        result["dead_codes"] = float((counts == 0).sum())
        plot = folder / f"codebook-{step:07d}.png"
        _plot_codebook(counts.cpu(), use["perplexity"], plot)
        result["codebook"] = plot
    return result


def _plot_codebook(counts: Tensor, perplexity: float, path: Path) -> None:
    """Write how often each token is used as PNG, the most frequent first. counts: [K]."""
    shares = counts.sort(descending=True).values.double() / counts.sum()
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    axis.fill_between(range(len(shares)), shares.numpy(), step="mid", color="#4878a8")
    used = int((counts > 0).sum())
    axis.set(title=f"{used:,} of {len(counts):,} tokens used, perplexity {perplexity:,.1f}")
    axis.set(xlabel="token, most frequent first", ylabel="share of the positions", xlim=(0, len(shares) - 1))
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100, metadata={"Software": None})
