"""Text encoders of the package transformers, from the Hub or a folder; distinguished by their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from image_diffusion.core.files.weights import content_digest
from image_diffusion.text_encoders.base import TextEncoder

Pool = Callable[[Any, Tensor], Tensor]
"""Function of the output of the model, and which tokens [B, L] are a caption's -> one embedding a caption, [B, dim]."""


def load_text(
    kind: str, weights: str, model_class: str, pool: Pool, device: torch.device, num_tokens: int, max_length: int | None
) -> TextEncoder:
    """Load a text encoder by its name on the Hugging Face Hub, or from a folder in transformers' layout. kind: the
    value of `pairs.encoder.type`. model_class: of transformers. max_length: number of tokens that the model reads;
    None: as many as are kept. Raises ValueError when the package or the weights are missing or do not fit.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"pairs.encoder.type is {kind}, which needs the package transformers. Run: python -m pip install "
            f"'image-diffusion[text]'. Or set it to hashed, which needs no package."
        ) from None
    folder = Path(weights).expanduser()
    name = str(folder) if folder.is_dir() else weights
    try:
        model = getattr(transformers, model_class).from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of the Hub, of files, of what the tokenizer needs: each raises its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"The text encoder '{weights}' could not be loaded: {reason} Without access to the Hugging Face Hub, copy "
            f"the model's folder to this machine and set pairs.encoder.weights to its path."
        ) from None
    return TransformerText(model.to(device).eval(), tokenizer, kind, weights, pool, num_tokens, max_length)


class TransformerText:
    """Frozen transformer that implements `TextEncoder`. Captions longer than it reads, or than is kept, are
    truncated."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        kind: str,
        weights: str,
        pool: Pool,
        num_tokens: int,
        max_length: int | None,
    ) -> None:
        self._model, self._tokenizer, self._pool = model, tokenizer, pool
        self.num_tokens, self._length = num_tokens, max_length or num_tokens
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if num_tokens > self._length:
            raise ValueError(
                f"pairs.num_tokens is {num_tokens}, but '{weights}' reads {self._length} tokens. Set it to "
                f"{self._length} or less."
            )
        self.identity: dict[str, Any] = {
            "type": kind,
            "weights": weights,
            "sha256": content_digest(model.state_dict()),
            "num_tokens": num_tokens,
        }
        embedded, tokens = self(["a"])
        self.dim = embedded.shape[1]
        if tokens.shape[2] != self.dim:
            raise ValueError(
                f"'{weights}' encodes tokens in {tokens.shape[2]} dimensions but captions in {self.dim}. Choose "
                f"another text encoder."
            )

    @torch.inference_mode()
    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        device = next(self._model.parameters()).device
        read = self._tokenizer(
            captions,
            padding="max_length",  # always as many, so that no caption depends on those beside it
            truncation=True,
            max_length=self._length,
            return_attention_mask=True,
            return_tensors="pt",
        ).to(device)
        output = self._model(input_ids=read["input_ids"], attention_mask=read["attention_mask"])
        mask = read["attention_mask"].bool()  # [B, L]
        tokens = output.last_hidden_state.float() * mask[..., None]
        return self._pool(output, mask).float().cpu(), tokens[:, : self.num_tokens].cpu()


def mean_of_tokens(output: Any, mask: Tensor) -> Tensor:
    """Return the mean of a caption's tokens, [B, dim]."""
    weights = mask[..., None].float()
    mean: Tensor = (output.last_hidden_state.float() * weights).sum(1) / weights.sum(1)
    return mean


def pooled(output: Any, mask: Tensor) -> Tensor:
    """Return the model's own pooled embedding of a caption, [B, dim]."""
    embedding: Tensor = output.pooler_output
    return embedding
