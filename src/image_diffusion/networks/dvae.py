"""Discrete VAE of DALL-E (Ramesh et al. 2021, section 2.1) in the small form of DALLE-pytorch.

An encoder predicts a distribution over tokens at each position of a grid, a codebook has an embedding for each token,
and a decoder maps the grid of embeddings to pixels. Parameters have the names of the original.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.resolution import divided, size_text
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.quantizers import FiniteScalars, VectorQuantiser, VectorQuantiserConfig
from image_diffusion.networks.weights import openai_dvae

Estimator = Literal["gumbel_softmax", "straight_through", "reinmax"]


class DVAEConfig(Config):
    """Size of the network, sampling of tokens in training, and normalisation of pixels."""

    layout: Literal["dalle_pytorch", "openai"] = "dalle_pytorch"
    """Architecture of encoder and decoder: DALLE-pytorch's, or OpenAI's, in which the channels double with every layer
    and a sigmoid outputs the pixels."""
    num_tokens: int = Field(8192, ge=2)
    """Number of tokens in the codebook."""
    codebook_dim: int = Field(512, ge=1)
    """Length of a token's embedding, which is the number of channels of the latent."""
    levels: tuple[Annotated[int, Field(ge=3)], ...] | None = Field(None, min_length=1)
    """Numbers of levels of finite scalar quantisation (Mentzer et al. 2024), one for each channel of the latent, which
    replaces the codebook; num_tokens is their product: 240 for [8, 6, 5], 1,000 for [8, 5, 5, 5]. Unset: the codebook
    is learned."""
    vector_quantiser: VectorQuantiserConfig | None = None
    """Vector quantisation (van den Oord et al. 2017) instead of sampled tokens: the token of an encoding of
    codebook_dim numbers is the nearest code, and codes are moving averages of encodings. {}: as published. Unset:
    tokens are sampled."""
    num_layers: int = Field(3, ge=1)
    """Number of layers that halve the resolution in the encoder, and that double it in the decoder."""
    num_resnet_blocks: int = Field(2, ge=0)
    """Number of residual blocks on the smallest grid, in the encoder and in the decoder each."""
    hidden_dim: int = Field(256, ge=1)
    """Channels inside the encoder and the decoder."""
    estimator: Estimator = "gumbel_softmax"
    """Gradient estimator of sampled tokens. gumbel_softmax: soft samples. straight_through: hard samples with the
    gradient of soft ones. reinmax: hard samples with a second-order gradient."""
    mean: tuple[float, ...] | None = None
    """Mean that is subtracted from each channel of pixels in [0, 1]; unset: 0.5, and 0 for an alpha channel, the last
    of 2 or 4 channels of pictures. Arrays (data.dtype) have no alpha channel."""
    std: tuple[float, ...] | None = None
    """Standard deviation by which each channel is then divided; unset: 0.5, and 1 for an alpha channel of pictures."""

    @model_validator(mode="before")
    @classmethod
    def _derive_from_levels(cls, data: Any) -> Any:
        levels = data.get("levels") if isinstance(data, Mapping) else None
        if not levels or not isinstance(levels, list | tuple) or not all(isinstance(level, int) for level in levels):
            return data
        derived = {"num_tokens": math.prod(levels), "codebook_dim": len(levels), "estimator": "gumbel_softmax"}
        for key, value in derived.items():
            if data.get(key, value) != value:
                raise ValueError(
                    f"{key} is {data[key]}, but levels is {[*levels]}, from which it follows: {value}. Leave it out."
                )
        return {**data, **derived}

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.vector_quantiser is None:
            return self
        if self.levels is not None:
            raise ValueError("levels and vector_quantiser are both set. Leave one of them out.")
        if self.estimator != "gumbel_softmax":
            raise ValueError(f"estimator is {self.estimator}, but vector_quantiser has no estimator. Leave it out.")
        return self

    @property
    def deterministic_key(self) -> str | None:
        """Return the key that makes tokens deterministic; None: tokens are sampled."""
        return next((key for key in ("levels", "vector_quantiser") if getattr(self, key) is not None), None)

    def build(self, spec: DataSpec) -> DVAE:
        """Build the network for images of `spec`. Raises ValueError if the sizes do not fit."""
        shorter = min(spec.size)
        if isinstance(spec.resolution, int) and shorter & (shorter - 1):
            raise ValueError(
                f"The resolution is {shorter}, but a discrete VAE needs a power of two. "
                f"Set data.resolution to {2 ** (shorter.bit_length() - 1)} or {2 ** shorter.bit_length()}."
            )
        if shorter < self.downsampling:
            raise ValueError(
                f"The resolution is {shorter}, too small for num_layers = {self.num_layers}, which divide each edge "
                f"by {self.downsampling}. Use at most {shorter.bit_length() - 1} layers, or larger images."
            )
        if divided(spec.resolution, self.downsampling) is None:
            raise ValueError(
                f"The resolution is {size_text(spec.resolution)}, but num_layers = {self.num_layers} divides each edge "
                f"by {self.downsampling}. Set data.resolution to multiples of that."
            )
        if self.layout == "openai" and not self.num_resnet_blocks:
            raise ValueError("layout openai is made of residual blocks. Set num_resnet_blocks to 1 or more.")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) != spec.channels:
                raise ValueError(
                    f"{name} has {len(values)} values, but the images have {spec.channels} channels. "
                    f"Set one for each channel, or leave {name} out."
                )
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"Every std must be above 0; got {list(self.std)}.")
        kinds = {None: DVAE, "levels": QuantisedDVAE, "vector_quantiser": VectorDVAE}
        return kinds[self.deterministic_key](self, spec)

    def logits_shape(self, spec: DataSpec) -> tuple[int, int, int]:
        """Return the shape [num_tokens, h, w] of the logits of an image of `spec`."""
        height, width = spec.size
        return self.num_tokens, height // self.downsampling, width // self.downsampling

    @property
    def latent_channels(self) -> int:
        """Return the number of channels of a latent: the length of an embedding."""
        return self.codebook_dim

    @property
    def downsampling(self) -> int:
        """Return the number of pixels along an edge of the image for each token along an edge of the grid."""
        return int(2**self.num_layers)

    def normalisation(self, spec: DataSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation of each channel, of pixels in [0, 1]. Pictures with 2 or 4 channels have
        alpha as the last."""
        alphas = int(spec.channels in (2, 4) and spec.levels is None)
        colours = spec.channels - alphas
        openai = self.layout == "openai"  # 0.8 p + 0.1
        usual_mean, usual_std = (
            ((-0.125,) * spec.channels, (1.25,) * spec.channels)
            if openai
            else ((0.5,) * colours + (0.0,) * alphas, (0.5,) * colours + (1.0,) * alphas)
        )
        return usual_mean if self.mean is None else self.mean, usual_std if self.std is None else self.std


class DVAE(nn.Module):
    """Discrete VAE: images [B, C, H, W] in [-1, 1] <-> tokens [B, h, w], h = H / 2^num_layers. The network normalises
    pixels, (p - mean) / std of p in [0, 1]; its input and the output of `decode` are not normalised.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, config: DVAEConfig, spec: DataSpec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.estimator: Estimator = config.estimator
        self.image_shape = (spec.channels, *spec.size)
        if config.layout == "openai":
            sizes = (config.hidden_dim, config.num_layers + 1, config.num_resnet_blocks)
            self.encoder = openai_dvae.encoder(spec.channels, self.encoded_channels, *sizes)
            self.codebook = self.build_codebook()
            self.decoder = openai_dvae.decoder(spec.channels, config.codebook_dim, *sizes)
        else:
            self._build_layers(config, spec.channels)
        # Constants, with contents even if the network is built on the meta device.
        constants = config.normalisation(spec)
        mean, std = (torch.tensor(values, device="cpu").view(-1, 1, 1) for values in constants)
        # Of x = 2p - 1: (p - mean) / std = scale x + shift.
        self.register_buffer("scale", 0.5 / std, persistent=False)
        self.register_buffer("shift", (0.5 - mean) / std, persistent=False)

    def _build_layers(self, config: DVAEConfig, channels: int) -> None:
        """Build DALLE-pytorch's encoder, codebook and decoder."""
        hidden, layers, blocks = config.hidden_dim, config.num_layers, config.num_resnet_blocks
        widths = [channels] + [hidden] * layers
        downs = [
            nn.Sequential(nn.Conv2d(c_in, c_out, 4, stride=2, padding=1), nn.ReLU()) for c_in, c_out in pairwise(widths)
        ]
        widths = [hidden if blocks else config.codebook_dim] + [hidden] * layers
        ups = [
            nn.Sequential(nn.ConvTranspose2d(c_in, c_out, 4, stride=2, padding=1), nn.ReLU())
            for c_in, c_out in pairwise(widths)
        ]
        entry = [nn.Conv2d(config.codebook_dim, hidden, 1)] if blocks else []
        self.encoder = nn.Sequential(
            *downs, *(ResBlock(hidden) for _ in range(blocks)), nn.Conv2d(hidden, self.encoded_channels, 1)
        )
        self.codebook = self.build_codebook()
        self.decoder = nn.Sequential(
            *entry, *(ResBlock(hidden) for _ in range(blocks)), *ups, nn.Conv2d(hidden, channels, 1)
        )

    @property
    def encoded_channels(self) -> int:
        """Return the number of output channels of the encoder."""
        return self.config.num_tokens

    def build_codebook(self) -> nn.Embedding | FiniteScalars | VectorQuantiser:
        """Build the embeddings of the tokens."""
        return nn.Embedding(self.config.num_tokens, self.config.codebook_dim)

    def forward(self, x: Tensor, gumbel: Tensor, temperature: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstruction and its target, both normalised, [B, C, H, W], and the logits [B, N, h, w].

        gumbel: standard Gumbel noise [B, N, h, w], which draws the tokens. temperature: [], above 0.
        """
        logits = self.logits(x)
        one_hot = relaxed_one_hot(logits, gumbel, temperature, self.estimator)
        return self.decoder(self.embedding(one_hot)), self.normalise(x), logits

    def logits(self, x: Tensor) -> Tensor:
        """Return log probabilities of the tokens up to a constant, float32 [B, N, h, w]. Raises the errors of
        `encoded`."""
        return self.encoded(x)

    def encoded(self, x: Tensor) -> Tensor:
        """Return the output of the encoder, float32 [B, `encoded_channels`, h, w].

        Raises ValueError for images of another shape than the network was built for.
        """
        if x.shape[1:] != self.image_shape:
            raise ValueError(
                f"Images have shape {list(x.shape[1:])} but the network was built for {list(self.image_shape)}. "
                f"Set data.channels and data.resolution to what it was trained with."
            )
        return self.encoder(self.normalise(x)).float()

    def embedding(self, one_hot: Tensor) -> Tensor:
        """Return the mean embedding [B, D, h, w] of tokens weighed by [B, N, h, w]."""
        return torch.einsum("bnhw,nd->bdhw", one_hot, self.codebook.weight.to(one_hot.dtype))

    def indices(self, x: Tensor) -> Tensor:
        """Return the most probable tokens of images, int64 [B, h, w]."""
        return self.logits(x).argmax(dim=1)

    def soft_latent(self, x: Tensor) -> Tensor:
        """Return the embedding expected under the distribution over tokens, [B, D, h, w].

        Gumbel noise at temperature 0 draws token n with probability softmax(logits)_n, whatever the temperature was.
        """
        return self.embedding(F.softmax(self.logits(x), dim=1))

    def hard_latent(self, indices: Tensor) -> Tensor:
        """Return the embeddings [B, D, h, w] of tokens [B, h, w]."""
        return self.codebook(indices).movedim(-1, 1)

    def decode(self, latent: Tensor) -> Tensor:
        """Decode a latent [B, D, h, w] to images [B, C, H, W], nominally in [-1, 1]."""
        return self.images(self.decoder(latent))

    def images(self, normalised: Tensor) -> Tensor:
        """Convert the output of the decoder to images, nominally in [-1, 1]."""
        return (normalised - self.shift) / self.scale

    def reconstructions(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Reconstruct images [B, C, H, W] from their expected embeddings, and from their most probable tokens. Returns
        the reconstructions by name, and these tokens, int64 [B, h, w]."""
        logits = self.logits(x)
        tokens = logits.argmax(dim=1)
        soft = self.embedding(F.softmax(logits, dim=1))
        return {"soft": self.decode(soft), "hard": self.decode(self.hard_latent(tokens))}, tokens

    def normalise(self, x: Tensor) -> Tensor:
        """Convert pixels in [-1, 1] to the network's normalisation."""
        return x * self.scale + self.shift


class QuantisedDVAE(DVAE):
    """Discrete VAE with deterministic tokens, which follow from the encoder's number for each channel of the latent: by
    finite scalar quantisation, tokens are combinations of levels."""

    codebook: FiniteScalars | VectorQuantiser

    @property
    def encoded_channels(self) -> int:
        return self.config.codebook_dim

    def build_codebook(self) -> FiniteScalars | VectorQuantiser:
        assert self.config.levels is not None
        return FiniteScalars(self.config.levels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]  # no noise
        """Return the reconstruction and its target, both normalised, [B, C, H, W], the tokens [B, h, w], and the output
        of the encoder, float32 [B, D, h, w]."""
        encoded = self.encoded(x)
        latent, tokens = self.codebook.quantize(encoded)
        return self.decoder(latent), self.normalise(x), tokens, encoded

    def indices(self, x: Tensor) -> Tensor:
        return self.codebook.quantize(self.encoded(x))[1]

    def soft_latent(self, x: Tensor) -> Tensor:
        """Return the codes of the tokens of images, [B, D, h, w]: this network has no distribution over them."""
        return self.hard_latent(self.indices(x))

    def reconstructions(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Reconstruct images [B, C, H, W] from their tokens. Returns the reconstructions by name, and the tokens, int64
        [B, h, w]."""
        tokens = self.indices(x)
        return {"hard": self.decode(self.hard_latent(tokens))}, tokens


class VectorDVAE(QuantisedDVAE):
    """Discrete VAE with vector quantisation: tokens are nearest codes."""

    codebook: VectorQuantiser

    def build_codebook(self) -> VectorQuantiser:
        config = self.config
        assert config.vector_quantiser is not None
        return VectorQuantiser(config.num_tokens, config.codebook_dim, config.vector_quantiser)

    def update_from(self, seen: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Update the codebook with the "tokens" [B, P], "encodings" [B, P, D] and "draws" [B, P] of a global batch.
        Returns the tensors that have changed."""
        self.codebook.update_from(*(seen[name].flatten(0, 1) for name in ("tokens", "encodings", "draws")))
        return self.codebook.weight, self.codebook.counts


class ResBlock(nn.Module):
    """Residual block: x + conv1(relu(conv3(relu(conv3(x)))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


def relaxed_one_hot(logits: Tensor, gumbel: Tensor, temperature: Tensor, estimator: Estimator) -> Tensor:
    """Sample a token for each position from softmax(logits), as weights [B, N, …] that sum to 1 over dimension 1.

    logits, gumbel: [B, N, …]; the token is the argmax of their sum (Gumbel-max). temperature: [], above 0.
    gumbel_softmax: softmax((logits + gumbel) / temperature), soft (Jang et al. 2017, equation 2). straight_through:
    one-hot, with the gradient of that (ibid., section 2.2). reinmax: one-hot, with the gradient of Liu et al. 2023,
    algorithm 2.
    """
    soft = F.softmax((logits + gumbel) / temperature, dim=1)
    if estimator == "gumbel_softmax":
        return soft
    hard = torch.zeros_like(soft).scatter_(1, soft.argmax(dim=1, keepdim=True), 1.0)
    if estimator == "straight_through":
        return _with_gradient(hard, soft)
    pi_0 = F.softmax(logits, dim=1)
    pi_1 = (hard + F.softmax(logits / temperature, dim=1)) / 2
    # The logits that give pi_1, moved with the gradient of the logits alone.
    shifted = logits + (pi_1.clamp(min=1e-20).log() - logits).detach()
    pi_2 = 2 * F.softmax(shifted, dim=1) - pi_0 / 2
    return _with_gradient(hard, pi_2)


def _with_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    """Return `value` with the gradient of `gradient`."""
    return value + (gradient - gradient.detach())
