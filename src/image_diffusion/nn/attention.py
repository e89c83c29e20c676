"""Self-attention over tokens (Vaswani et al. 2017), and over a context, through PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.nn.blocks import of_parts
from image_diffusion.nn.linear import Linear
from image_diffusion.nn.rotary import rotate


@dataclass
class KeyValues:
    """What attention has seen so far of a sequence that grows, [B, heads, n, d] each; None: nothing."""

    k: Tensor | None = None
    v: Tensor | None = None

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of new tokens, and return those of all."""
        if self.k is not None and self.v is not None:
            k, v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.k, self.v = k, v
        return k, v


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(head width)) v over tokens [B, N, width], with biases.

    norm: builds the normalisation of each head's queries and keys from the head width; None for none
    (Dehghani et al. 2023, "Scaling vision transformers to 22 billion parameters", section 2). context: tokens also
    attend to those of another sequence of the same width, by keys and values of its own.
    """

    def __init__(
        self, width: int, num_heads: int, norm: Callable[[int], nn.Module] | None = None, context: bool = False
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = of_parts(Linear(width, 3 * width), 3)
        self.q_norm = norm(width // num_heads) if norm else nn.Identity()
        self.k_norm = norm(width // num_heads) if norm else nn.Identity()
        self.proj = Linear(width, width)
        if context:
            self.context_kv = of_parts(Linear(width, 2 * width), 2)
            self.context_k_norm = norm(width // num_heads) if norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        angles: Tensor | None = None,
        seen: KeyValues | None = None,
    ) -> Tensor:
        """[B, N, width] -> [B, N, width]. context: [B, L, width]; mask: bool [B, L + N], which tokens there are, those
        of the context first, or [B or 1, N, L + N], which of them each token sees; angles: [N, head width / 2], by
        which queries and keys of x turn (`nn/rotary.py`); seen: the tokens before x, to which those of x are added."""
        B, N, width = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.num_heads, width // self.num_heads)  # [B, N, 3, heads, d]
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))  # each [B, heads, N, d]
        q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if context is not None:
            told = self.context_kv(context).view(B, -1, 2, self.num_heads, width // self.num_heads)
            told_k, told_v = (each.transpose(1, 2) for each in told.unbind(2))  # each [B, heads, L, d]
            k, v = torch.cat([self.context_k_norm(told_k), k], 2), torch.cat([told_v, v], 2)  # [B, heads, L + N, d]
        if seen is not None:
            k, v = seen.extended(k, v)
        if mask is not None:
            mask = mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]
        out = F.scaled_dot_product_attention(q, k, v, mask)  # [B, heads, N, d]
        projected: Tensor = self.proj(out.transpose(1, 2).reshape(B, N, width))  # [B, N, width]
        return projected
