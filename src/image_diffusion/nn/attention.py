"""Self-attention over tokens (Vaswani et al. 2017), through PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.nn.linear import Linear


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(head width)) v over tokens [B, N, width], with biases.

    norm: builds the normalisation of each head's queries and keys from the head width; None for none
    (Dehghani et al. 2023, "Scaling vision transformers to 22 billion parameters", section 2).
    """

    def __init__(self, width: int, num_heads: int, norm: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(width, 3 * width)
        self.q_norm = norm(width // num_heads) if norm else nn.Identity()
        self.k_norm = norm(width // num_heads) if norm else nn.Identity()
        self.proj = Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, width] -> [B, N, width]."""
        B, N, width = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.num_heads, width // self.num_heads)  # [B, N, 3, heads, d]
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))  # each [B, heads, N, d]
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)  # [B, heads, N, d]
        projected: Tensor = self.proj(out.transpose(1, 2).reshape(B, N, width))  # [B, N, width]
        return projected
