"""Encoder and decoder of OpenAI's discrete VAE (Ramesh et al. 2021, appendix A.2), and its weights.

A group of residual blocks at each resolution, twice as wide at each coarser one; maximum pooling down, nearest
neighbours up. Its files encoder.pkl and decoder.pkl hold modules of the package `dall_e`. They are read by an unpickler
that accepts only the names of these parts, replaces them by placeholders, and runs no code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from image_diffusion.networks.weights.dit import load_without_code

_PARTS = (
    *(f"dall_e.{name}" for name in ("encoder.Encoder", "encoder.EncoderBlock", "decoder.Decoder", "utils.Conv2d")),
    "dall_e.decoder.DecoderBlock",
    *(f"torch.nn.modules.{name}" for name in ("container.Sequential", "activation.ReLU", "pooling.MaxPool2d")),
    *(f"torch.nn.modules.{name}" for name in ("upsampling.Upsample", "linear.Identity")),
)
FILES = ("encoder.pkl", "decoder.pkl")


def encoder(channels: int, num_tokens: int, hidden: int, num_groups: int, blocks: int) -> nn.Sequential:
    """Build the encoder of pixels [B, C, H, W] -> logits [B, num_tokens, h, w], h = H / 2^(num_groups - 1)."""
    gain = (num_groups * blocks) ** -2
    widths = [hidden] + [hidden * 2**i for i in range(num_groups)]
    parts: OrderedDict[str, nn.Module] = OrderedDict(input=nn.Conv2d(channels, hidden, 7, padding=3))
    for i, (c_in, c_out) in enumerate(pairwise(widths)):
        down: dict[str, nn.Module] = {} if i == num_groups - 1 else {"pool": nn.MaxPool2d(2)}
        parts[f"group_{i + 1}"] = _group(c_in, c_out, (3, 3, 3, 1), gain, blocks, down)
    parts["output"] = nn.Sequential(OrderedDict(relu=nn.ReLU(), conv=nn.Conv2d(widths[-1], num_tokens, 1)))
    return nn.Sequential(parts)


def decoder(channels: int, codebook_dim: int, hidden: int, num_groups: int, blocks: int) -> nn.Sequential:
    """Build the decoder of embeddings [B, codebook_dim, h, w] -> the means of its pixels, in (0, 1), [B, C, H, W]."""
    gain = (num_groups * blocks) ** -2
    widths = [codebook_dim] + [hidden * 2**i for i in reversed(range(num_groups))]
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (c_in, c_out) in enumerate(pairwise(widths)):
        up: dict[str, nn.Module] = {} if i == num_groups - 1 else {"upsample": nn.Upsample(scale_factor=2.0)}
        parts[f"group_{i + 1}"] = _group(c_in, c_out, (1, 3, 3, 3), gain, blocks, up)
    parts["output"] = nn.Sequential(OrderedDict(relu=nn.ReLU(), conv=nn.Conv2d(hidden, 2 * channels, 1)))
    parts["means"] = _Means()
    return nn.Sequential(parts)


class _Block(nn.Module):
    """Residual block: x, projected to the output channels, + gain times four convolutions, each after a ReLU."""

    def __init__(self, c_in: int, c_out: int, kernels: tuple[int, ...], gain: float) -> None:
        super().__init__()
        widths, path = [c_in, *[c_out // 4] * 3, c_out], OrderedDict[str, nn.Module]()
        for i, kernel in enumerate(kernels):
            path[f"relu_{i + 1}"] = nn.ReLU()
            path[f"conv_{i + 1}"] = nn.Conv2d(widths[i], widths[i + 1], kernel, padding=kernel // 2)
        self.id_path = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()
        self.res_path, self.gain = nn.Sequential(path), gain

    def forward(self, x: Tensor) -> Tensor:
        return self.id_path(x) + self.gain * self.res_path(x)


class _Means(nn.Module):
    """Sigmoid of the first half of the channels; the other half are the scales of a distribution of pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x[:, : x.shape[1] // 2])


def _group(
    c_in: int, c_out: int, kernels: tuple[int, ...], gain: float, blocks: int, end: dict[str, nn.Module]
) -> nn.Sequential:
    parts = {f"block_{i + 1}": _Block(c_in if i == 0 else c_out, c_out, kernels, gain) for i in range(blocks)}
    return nn.Sequential(OrderedDict(**parts, **end))


def is_openai_folder(folder: Path) -> bool:
    """Return True if a folder contains the two files."""
    return all((folder / name).is_file() for name in FILES)


def read_openai(folder: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Read the sizes of the network in a folder, by the names of `DVAEConfig`, "channels" among them; and its tensors,
    by the names of `DVAE`.

    The decoder's first convolution, of one-hot tokens, is the codebook. Raises ValueError for files that hold anything
    but the parts of this network.
    """
    theirs, ours = [dict(_tensors(_load(folder / name))) for name in FILES], {}
    for side, tensors in zip(("encoder", "decoder"), theirs, strict=True):
        for name, tensor in tensors.items():
            stem, _, kind = name.removeprefix("blocks.").rpartition(".")
            ours[f"{side}.{stem}.{'weight' if kind == 'w' else 'bias'}"] = tensor.float()
    codes, offset = ours.pop("decoder.input.weight"), ours.pop("decoder.input.bias")
    ours["codebook.weight"] = (codes[:, :, 0, 0].T + offset).contiguous()
    hidden, channels = ours["encoder.input.weight"].shape[:2]
    blocks = {name.split(".")[2] for name in ours if name.startswith("encoder.group_1.block_")}
    groups = {name.split(".")[1] for name in ours if name.startswith("encoder.group_")}
    sizes = {
        "channels": channels,
        "num_tokens": len(ours["codebook.weight"]),
        "codebook_dim": ours["codebook.weight"].shape[1],
        "hidden_dim": hidden,
        "num_layers": len(groups) - 1,
        "num_resnet_blocks": len(blocks),
    }
    return sizes, ours


class _Part:
    """Placeholder of a module: its attributes, without its code."""


def _load(path: Path) -> Any:
    whose = "OpenAI's discrete VAE"
    safe_classes = [(_Part, name) for name in _PARTS]
    advice = "Get it from its authors again."
    return load_without_code(path, safe_classes, f"a file of {whose}", f"the parts of {whose}", advice)


def _tensors(part: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a part and of the parts in it, by name."""
    if not isinstance(part, _Part):
        return
    for name, tensor in vars(part).get("_parameters", {}).items():
        if isinstance(tensor, Tensor):
            yield f"{prefix}{name}", tensor.detach()
    for name, inner in vars(part).get("_modules", {}).items():
        yield from _tensors(inner, f"{prefix}{name}.")
