"""Whether images agree with their prompts, by a model that embeds both in one space, such as a CLIP or a SigLIP."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from image_diffusion.metrics.encoders import Transformers
from image_diffusion.metrics.features import Detector, detect
from image_diffusion.metrics.intervals import mean_estimate
from image_diffusion.metrics.moments import block_of_each
from image_diffusion.metrics.retrieval import retrieval
from image_diffusion.metrics.samples import Samples
from image_diffusion.metrics.similarity import cosine, other_captions

_AT_ONCE = 64


class PromptJudge(Transformers):
    """A model of the package transformers that embeds images and words: CLIP, SigLIP."""

    def build_both(self, device: str = "cpu") -> PromptEncoder:
        """Load both towers. Raises ValueError when the package or the weights are not at hand, or read no words."""
        import transformers  # the base says how to install it

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
    """images: the detector of the model's vision tower."""

    def __init__(self, images: Detector, model: Any, tokenizer: Any) -> None:
        self.images, self._model, self._tokenizer = images, model, tokenizer

    @torch.inference_mode()
    def texts(self, prompts: list[str]) -> Tensor:
        """N prompts -> float32 [N, dim] on the CPU. Longer ones than the model reads are cut."""
        device, parts = next(self._model.parameters()).device, []
        for start in range(0, len(prompts), _AT_ONCE):
            read = self._tokenizer(
                prompts[start : start + _AT_ONCE],
                padding="max_length",  # as SigLIP was trained; a CLIP reads nothing after the end of a text
                truncation=True,
                max_length=self._model.config.text_config.max_position_embeddings,
                return_tensors="pt",
            ).to(device)
            found: Any = self._model.get_text_features(**read)
            parts.append(getattr(found, "pooler_output", found).float().cpu())  # which of both depends on the release
        return torch.cat(parts)


def check_prompted(samples: Samples) -> None:
    """Raise ValueError for samples without prompts."""
    if len(samples.protocol.get("prompts", [])) != samples.num_samples:
        raise ValueError(
            "evaluate.prompts is set, but the samples have no prompts. Judge those of a model that is told words, or "
            "embeddings made from captions; or leave it out."
        )


def evaluate_prompted(samples: Samples, encoder: PromptEncoder) -> dict[str, Any]:
    """Entries of metrics.json by name, which ends as those of the detector do.

    prompt_similarity: the cosine of image and prompt, which is CLIPScore without its factor 2.5 and its cut at 0.
    other_prompt_similarity: that of the image and another of the prompts, where there are several.
    prompt_retrieval_at_1, …_at_5: the share of images whose prompt is among the k nearest of all different ones.
    """
    prompts: list[str] = samples.protocol["prompts"]
    different = sorted(set(prompts))
    number = torch.tensor([different.index(each) for each in prompts])
    texts = encoder.texts(different)
    seen = detect(encoder.images, samples, "images beside prompts").features
    pairs = {"prompt_similarity": texts[number]}
    if (others := other_captions(number[:, None])) is not None:
        pairs["other_prompt_similarity"] = texts[number[torch.from_numpy(np.asarray(others))]]
    block = block_of_each(len(seen))
    entries = {name: mean_estimate(cosine(seen, text), block, -1, 1) for name, text in pairs.items()}
    found = retrieval(seen, number, texts, torch.arange(len(texts)), "prompts")
    entries |= {f"prompt_{name}": each for name, each in found.items()}
    return {encoder.images.metric_name(name): each.as_dict() for name, each in entries.items()}
