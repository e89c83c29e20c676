"""SiT's weights as those of a flow here (Ma et al. 2024, arXiv:2401.08740, the linear path).

A SiT has the names and shapes of a DiT, which do not tell the two apart. Its time runs from noise to data, x_t = t x0 +
(1 - t) eps, and it predicts dx/dt = x0 - eps; here time runs from data to noise, and the velocity is eps - x0. Both are
exact changes of weights. With learn_sigma, the second half of its output was never trained, and is left out.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from image_diffusion.networks.dit import TIME_CHANNELS
from image_diffusion.networks.dit_weights import DiTWeights
from image_diffusion.nn.sinusoid import sinusoid

_TIME, _OUT = "t_embedder.mlp.0.weight", "final_layer.linear"


def as_flow(weights: DiTWeights) -> DiTWeights:
    """The network that gives -v(x, 1 - t) where the SiT gives v(x, t)."""
    tensors, channels = weights.tensors, weights.spec.channels
    return replace(
        weights,
        learned_variance=False,
        tensors={
            **tensors,
            _TIME: _reversed(tensors[_TIME], endpoint=weights.config.time_frequencies == "diffusers"),
            **{
                name: -_first(tensors[name], channels, weights.learned_variance)
                for name in (f"{_OUT}.weight", f"{_OUT}.bias")
            },
        },
    )


def _reversed(weight: Tensor, endpoint: bool) -> Tensor:
    """W' such that W' [cos(t w), sin(t w)] = W [cos((1 - t) w), sin((1 - t) w)], by the addition theorems. [D, 256]."""
    cos, sin = sinusoid(torch.ones(1), TIME_CHANNELS, endpoint=endpoint).double().chunk(2, dim=1)  # of w, [1, 128]
    of_cos, of_sin = weight.double().chunk(2, dim=1)  # [D, 128]
    return torch.cat([of_cos * cos + of_sin * sin, of_cos * sin - of_sin * cos], dim=1).float()


def _first(rows: Tensor, channels: int, halved: bool) -> Tensor:
    """The rows of x's own channels: each pixel of a patch has `channels`, and as many again where they are halved."""
    if not halved:
        return rows
    own: Tensor = rows.unflatten(0, (-1, 2 * channels))[:, :channels].flatten(0, 1)
    return own
