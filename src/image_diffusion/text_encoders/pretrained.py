"""Text encoders of the package transformers, and CLIP (Radford et al. 2021), which embeds images and captions in one
space; given by the name or the folder of their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.weights import content_digest
from image_diffusion.core.process.errors import package

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of CLIP's images


class PretrainedText(Config):
    """A text encoder that transformers loads. A subclass names the model class."""

    type: str
    weights: str = Field(min_length=1)
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""

    model_class: ClassVar[str]
    """Class of transformers."""
    has_pooler: ClassVar[bool] = False
    """True if the model pools its hidden states to a caption's embedding; otherwise, that is the mean of the tokens."""
    max_length: ClassVar[int | None] = None
    """Number of tokens that the model always reads; None: the number of stored tokens."""
    attends_to_padding: ClassVar[bool] = False
    """True if the model was trained without an attention mask, so that it reads the padding too."""

    def build(self, device: torch.device, num_tokens: int) -> TransformerText:
        """Load the encoder. Raises ValueError when the package or the weights are missing or do not fit."""
        try:
            import transformers
        except ImportError:
            raise ValueError(
                f"pairs.encoder.type is {self.type}, which needs {package('transformers', 'text')} Or set it to "
                "hashed, which needs no package."
            ) from None
        name = _local(self.weights)
        try:
            model = getattr(transformers, self.model_class).from_pretrained(name)
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        except Exception as error:  # the Hub, files and the tokenizer raise different exceptions
            raise ValueError(
                f"The text encoder '{self.weights}' could not be loaded: {_reason(error)} Without access to the "
                f"Hugging Face Hub, copy the model's folder to this machine and set pairs.encoder.weights to its path."
            ) from None
        return TransformerText(self, model.to(device).eval(), tokenizer, num_tokens)


class ClipText(PretrainedText):
    """Text tower of a CLIP (Radford et al. 2021)."""

    type: Literal["clip"] = "clip"
    """A CLIP's text tower: 77 tokens."""
    weights: str = Field("openai/clip-vit-large-patch14", min_length=1)
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""
    model_class: ClassVar[str] = "CLIPTextModel"
    has_pooler: ClassVar[bool] = True
    max_length: ClassVar[int | None] = 77


class SiglipText(PretrainedText):
    """Text tower of a SigLIP (Zhai et al. 2023), which reads 64 tokens whatever the caption."""

    type: Literal["siglip"] = "siglip"
    """A SigLIP's text tower: 64 tokens."""
    weights: str = Field("google/siglip-base-patch16-224", min_length=1)
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""
    model_class: ClassVar[str] = "SiglipTextModel"
    has_pooler: ClassVar[bool] = True
    max_length: ClassVar[int | None] = 64
    attends_to_padding: ClassVar[bool] = True


class T5Text(PretrainedText):
    """Encoder of a T5 (Raffel et al. 2020), as Imagen and Stable Diffusion 3 read captions."""

    type: Literal["t5"] = "t5"
    """A T5's encoder; a caption's embedding is the mean of its tokens."""
    weights: str = Field("google/t5-v1_1-base", min_length=1)
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""
    model_class: ClassVar[str] = "T5EncoderModel"


class AutoText(PretrainedText):
    """Any language model that transformers loads as an `AutoModel`: its last hidden states."""

    type: Literal["auto"] = "auto"
    """Any AutoModel; a caption's embedding is the mean of its tokens."""
    model_class: ClassVar[str] = "AutoModel"


class TransformerText:
    """Frozen transformer that implements `TextEncoder`. Captions longer than it reads, or than is kept, are
    truncated."""

    def __init__(self, config: PretrainedText, model: nn.Module, tokenizer: Any, num_tokens: int) -> None:
        self._model, self._tokenizer, self._has_pooler = model, tokenizer, config.has_pooler
        self.num_tokens, self._length = num_tokens, config.max_length or num_tokens
        self._attends_to_padding = config.attends_to_padding
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if num_tokens > self._length:
            raise ValueError(
                f"pairs.num_tokens is {num_tokens}, but '{config.weights}' reads {self._length} tokens. Set it to "
                f"{self._length} or less."
            )
        self.identity: dict[str, Any] = {
            "type": config.type,
            "weights": config.weights,
            "sha256": content_digest(model.state_dict()),
            "num_tokens": num_tokens,
        }
        if config.attends_to_padding:
            self.identity["attends_to_padding"] = True
        embedded, tokens = self(["a"])
        self.dim = embedded.shape[1]
        if tokens.shape[2] != self.dim:
            raise ValueError(
                f"'{config.weights}' encodes tokens in {tokens.shape[2]} dimensions but captions in {self.dim}. Choose "
                f"another text encoder."
            )

    @torch.inference_mode()
    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        device = next(self._model.parameters()).device
        read = self._tokenizer(
            captions,
            padding="max_length",  # a fixed length, so that no caption depends on the others in the batch
            truncation=True,
            max_length=self._length,
            return_attention_mask=True,
            return_tensors="pt",
        ).to(device)
        mask = read["attention_mask"]  # [B, L]
        output = self._model(input_ids=read["input_ids"], attention_mask=None if self._attends_to_padding else mask)
        mask = mask.bool()
        tokens = output.last_hidden_state.float() * mask[..., None]
        embedding = output.pooler_output.float() if self._has_pooler else tokens.sum(1) / mask.sum(1, keepdim=True)
        return embedding.cpu(), tokens[:, : self.num_tokens].cpu()


class ClipConfig(Config):
    """Weights of a CLIP."""

    weights: str = "openai/clip-vit-large-patch14"
    """Name on the Hugging Face Hub, or path of a local folder in transformers' layout."""

    def build(self, device: torch.device, num_tokens: int) -> Clip:
        """Build the model. Raises ValueError when the package or the weights are missing."""
        try:
            import transformers
        except ImportError:
            raise ValueError(
                f"CLIP embeddings need {package('transformers', 'text')} Or set pairs.type to hashed, which needs no "
                "package."
            ) from None
        name = _local(self.weights)
        try:
            model = transformers.CLIPModel.from_pretrained(name)
            tokenizer = transformers.CLIPTokenizerFast.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"The CLIP '{self.weights}' could not be loaded: {_reason(error)} Without access to the Hugging Face "
                f"Hub, copy the model's folder to this machine and set pairs.clip.weights to its path."
            ) from None
        return Clip(model.to(device).eval(), tokenizer, self.weights, num_tokens)


class Clip:
    """CLIP with embeddings of norm 1, float32, on the CPU. num_tokens: number of token encodings per caption."""

    def __init__(self, model: Any, tokenizer: Any, name: str, num_tokens: int) -> None:
        self._model, self._tokenizer, self.num_tokens = model, tokenizer, num_tokens
        self.dim: int = model.config.projection_dim
        self._size: int = model.config.vision_config.image_size
        self._length: int = model.config.text_config.max_position_embeddings
        width = model.config.text_config.hidden_size
        if num_tokens and width != self.dim:
            raise ValueError(
                f"The CLIP '{name}' encodes tokens in {width} dimensions but embeds in {self.dim}; the prior needs one "
                f"dimension. Set pairs.num_tokens to 0, or choose another CLIP."
            )
        self.identity: dict[str, Any] = {
            "type": "clip",
            "weights": name,
            "sha256": content_digest(model.state_dict()),
            "num_tokens": num_tokens,
        }

    @torch.inference_mode()
    def images(self, images: Tensor) -> Tensor:
        """Encode uint8 [B, 3, H, W] -> [B, dim]. Resized to the model's side, bicubic and antialiased."""
        device = next(self._model.parameters()).device
        x = images.to(device, torch.float32) / 255
        x = F.interpolate(x, (self._size, self._size), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
        mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (_MEAN, _STD))
        pooled = self._model.vision_model(pixel_values=(x - mean) / std).pooler_output
        return F.normalize(self._model.visual_projection(pooled).float(), dim=1).cpu()

    @torch.inference_mode()
    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """Encode N captions -> embeddings [N, dim] and encodings [N, num_tokens, dim], rows of zeros after the last
        token.

        Captions longer than the model's context are truncated."""
        device = next(self._model.parameters()).device
        read = self._tokenizer(
            captions, padding="max_length", truncation=True, max_length=self._length, return_tensors="pt"
        ).to(device)
        output = self._model.text_model(input_ids=read["input_ids"], attention_mask=read["attention_mask"])
        texts = F.normalize(self._model.text_projection(output.pooler_output).float(), dim=1).cpu()
        if not self.num_tokens:
            return texts, texts.new_zeros(len(texts), 0, self.dim)
        tokens = output.last_hidden_state.float() * read["attention_mask"][..., None]
        return texts, F.pad(tokens, (0, 0, 0, self.num_tokens - tokens.shape[1])).cpu()


def _local(weights: str) -> str:
    """Return the path of a local folder, or the name on the Hub."""
    folder = Path(weights).expanduser()
    return str(folder) if folder.is_dir() else weights


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
