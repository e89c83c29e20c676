"""Agreement of images with their prompts, by a model that embeds both in one space, such as a CLIP or a SigLIP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from image_diffusion.metrics.distances.jackknife import mean_estimate
from image_diffusion.metrics.features.base import Detector, detect
from image_diffusion.metrics.features.pretrained import Transformers
from image_diffusion.metrics.images.embedding_similarity import cosine, other_captions, retrieval
from image_diffusion.metrics.samples import Samples

_AT_ONCE = 64


class PromptJudge(Transformers):
    """Model of the package transformers that embeds images and texts: CLIP, SigLIP."""

    def build_both(self, device: str = "cpu") -> PromptEncoder:
        """Load both towers. Raises ValueError if the package or the weights are missing, or the model has no text
        tower."""
        import transformers  # `load` of the base class explains how to install it

        images, model, where = self.load(device)
        if not hasattr(model, "get_text_features"):
            raise ValueError(f"evaluate.prompts: {self.weights} embeds no words. Name a CLIP or a SigLIP.")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(where)
        except (OSError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"evaluate.prompts: {self.weights} has no tokenizer: {reason}") from None
        return PromptEncoder(images, model, tokenizer)


class PromptEncoder:
    """Encoder of prompts. images: the detector of the model's vision tower."""

    def __init__(self, images: Detector, model: Any, tokenizer: Any) -> None:
        self.images, self._model, self._tokenizer = images, model, tokenizer

    @torch.inference_mode()
    def texts(self, prompts: list[str]) -> Tensor:
        """Embed N prompts -> float32 [N, dim] on the CPU. Prompts longer than the model's limit are cut."""
        device, parts = next(self._model.parameters()).device, []
        for start in range(0, len(prompts), _AT_ONCE):
            read = self._tokenizer(
                prompts[start : start + _AT_ONCE],
                padding="max_length",  # as in SigLIP's training; a CLIP ignores the padding
                truncation=True,
                max_length=self._model.config.text_config.max_position_embeddings,
                return_tensors="pt",
            ).to(device)
            output: Any = self._model.get_text_features(**read)
            parts.append(getattr(output, "pooler_output", output).float().cpu())  # the type depends on the release
        return torch.cat(parts)


def check_prompted(samples: Samples) -> None:
    """Raise ValueError for samples without prompts."""
    if len(samples.protocol.get("prompts", [])) != samples.num_samples:
        raise ValueError(
            "evaluate.prompts is set, but the samples have no prompts. Evaluate a model that takes prompts, or "
            "embeddings made from captions; or leave it out."
        )


def evaluate_prompted(samples: Samples, encoder: PromptEncoder) -> dict[str, Any]:
    """Return entries of metrics.json by name, with the suffix of the detector.

    prompt_similarity: the cosine of image and prompt, which is CLIPScore without its factor 2.5 and its cut at 0.
    other_prompt_similarity: the cosine of the image and another prompt, if there are several. prompt_retrieval_at_1,
    …_at_5: the share of images whose prompt is among the k nearest distinct prompts.
    """
    prompts: list[str] = samples.protocol["prompts"]
    different = sorted(set(prompts))
    numbers = {prompt: number for number, prompt in enumerate(different)}
    number = torch.tensor([numbers[prompt] for prompt in prompts])
    texts = encoder.texts(different)
    features = detect(encoder.images, samples, "images beside prompts").features
    pairs = {"prompt_similarity": texts[number]}
    if (others := other_captions(number[:, None])) is not None:
        pairs["other_prompt_similarity"] = texts[number[torch.from_numpy(others)]]
    entries = {name: mean_estimate(cosine(features, text), -1, 1) for name, text in pairs.items()}
    retrievals = retrieval(features, number, texts, torch.arange(len(texts)), "prompts")
    entries |= {f"prompt_{name}": entry for name, entry in retrievals.items()}
    return {encoder.images.metric_name(name): entry.as_dict() for name, entry in entries.items()}
