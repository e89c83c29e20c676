"""CLIP (Radford et al. 2021): images and captions -> one space. Needs the package transformers and a CLIP's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.weights import content_digest
from image_diffusion.core.process.errors import package

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


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
        folder = Path(self.weights).expanduser()
        name = str(folder) if folder.is_dir() else self.weights
        try:
            model = transformers.CLIPModel.from_pretrained(name)
            tokenizer = transformers.CLIPTokenizerFast.from_pretrained(name)
        except (OSError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"The CLIP '{self.weights}' could not be loaded: {reason} Without access to the Hugging Face Hub, copy "
                f"the model's folder to this machine and set pairs.clip.weights to its path."
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
