"""Layers of transformers: self-attention over tokens (Vaswani et al. 2017), and over a context, through PyTorch's fused
kernel; and feedforward layers, which treat each token on its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.nn.blocks import set_num_maps
from image_diffusion.nn.linear import Linear, uses_pytorch_product, writes_gelu
from image_diffusion.nn.positions import rotate


@dataclass
class KeyValues:
    """Cache of the keys and values of the tokens so far, [B, heads, n, d] each; None: no tokens."""

    k: Tensor | None = None
    v: Tensor | None = None

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return those of all tokens."""
        if self.k is not None and self.v is not None:
            k, v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.k, self.v = k, v
        return k, v


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(head width)) v over tokens [B, N, width], with biases.

    norm: builds the normalisation of each head's queries and keys from the head width; None for none (Dehghani et al.
    2023, "Scaling vision transformers to 22 billion parameters", section 2). context: True to also attend to another
    sequence of the same width, with separate key and value layers.
    """

    def __init__(
        self, width: int, num_heads: int, norm: Callable[[int], nn.Module] | None = None, context: bool = False
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = set_num_maps(Linear(width, 3 * width), 3)
        self.q_norm = norm(width // num_heads) if norm else nn.Identity()
        self.k_norm = norm(width // num_heads) if norm else nn.Identity()
        self.proj = Linear(width, width)
        if context:
            self.context_kv = set_num_maps(Linear(width, 2 * width), 2)
            self.context_k_norm = norm(width // num_heads) if norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        angles: Tensor | None = None,
        cache: KeyValues | None = None,
    ) -> Tensor:
        """[B, N, width] -> [B, N, width]. context: [B, L, width]; mask: bool [B, L + N], true for tokens that are
        present, context first, or [B or 1, N, L + N], true for tokens to which each token attends; angles: [N, head
        width / 2], rotations of queries and keys of x (`nn/positions.py`); cache: of the tokens before x, to which x is
        appended."""
        B, N, width = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.num_heads, width // self.num_heads)  # [B, N, 3, heads, d]
        q, k, v = (tensor.transpose(1, 2) for tensor in qkv.unbind(2))  # each [B, heads, N, d]
        q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if context is not None:
            pairs = self.context_kv(context).view(B, -1, 2, self.num_heads, width // self.num_heads)
            k_c, v_c = (tensor.transpose(1, 2) for tensor in pairs.unbind(2))  # each [B, heads, L, d]
            k, v = torch.cat([self.context_k_norm(k_c), k], 2), torch.cat([v_c, v], 2)  # [B, heads, L + N, d]
        if cache is not None:
            k, v = cache.extended(k, v)
        if mask is not None:
            mask = mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]
        out = F.scaled_dot_product_attention(q, k, v, mask)  # [B, heads, N, d]
        return self.proj(out.transpose(1, 2).reshape(B, N, width))  # [B, N, width]


_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form: 0.5 x (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x³) (Hendrycks and Gimpel 2016,
    arXiv:1606.08415, section 2).

    0.5 (1 + tanh u) equals sigmoid(2 u), which compiled code computes on a CPU in a fraction of the time of tanh.
    """
    if torch.compiler.is_compiling() and not uses_pytorch_product(x):
        return x * torch.sigmoid((_LINEAR + _CUBIC * x * x) * x)
    return F.gelu(x, approximate="tanh")


def gelu_of_product(layer: Linear, x: Tensor) -> Tensor:
    """Return gelu(layer(x)), [..., in_features] -> [..., out_features].

    On a GPU without gradients, cuBLASLt's epilogue applies the GELU, which saves writing and reading the sums. (With
    gradients, the backward pass needs the sums.) This does not apply to wrapped layers, such as adapted ones, which
    compute more than a product.
    """
    if type(layer) is not Linear or not writes_gelu(x):
        return gelu(layer(x))
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    rows, weight, bias = x.reshape(-1, x.shape[-1]).to(dtype), layer.weight.to(dtype), layer.bias.to(dtype)
    out = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)  # in its tanh form on a GPU
    return out.view(*x.shape[:-1], -1)


class Mlp(nn.Module):
    """Linear, GELU (tanh form), Linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden)
        self.fc2 = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self.fc2(gelu_of_product(self.fc1, x))


class SwiGlu(nn.Module):
    """(SiLU(x W1) * x W2) W3 (Shazeer 2020, "GLU variants improve transformer", equation 6), with biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w12 = set_num_maps(Linear(width, 2 * hidden), 2)
        self.w3 = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        gate, value = self.w12(x).chunk(2, dim=-1)  # each [..., hidden]
        return self.w3(F.silu(gate) * value)
