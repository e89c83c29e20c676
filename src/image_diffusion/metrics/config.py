"""Settings of the evaluation of samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import SamplesOf
from image_diffusion.metrics import DetectorConfig
from image_diffusion.metrics.features.classifier import InPipe
from image_diffusion.metrics.images.likelihood import LikelihoodConfig
from image_diffusion.metrics.images.lpips import LpipsConfig
from image_diffusion.metrics.images.prompt_alignment import PromptJudge
from image_diffusion.metrics.published_results import PublishedResult


def _by_type(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


NamedDetector = Annotated[
    DetectorConfig,
    BeforeValidator(_by_type, json_schema_input_type=DetectorConfig | Literal["inpipe", "inception", "dinov2"]),
]
"""A detector by its section, or by its type alone where that needs no key."""


class EvaluateConfig(Config):
    """Detectors, reference and metrics of an evaluation."""

    detectors: tuple[NamedDetector, ...] = Field((InPipe(),), min_length=1)
    """Detectors, each as a section or, with default settings, as its type. Metrics are named after their detector; the
    first detector gives the headline."""
    reference: Literal["train", "validation"] = "train"
    """Split that samples are compared with; the other split gives the real-against-real floor."""
    against: SamplesOf | str | None = None
    """Reference instead of that split: the path of an .npz with statistics (ADM's or EDM's layout) or samples, or
    {experiment: name} for another experiment's samples. The metrics then have no floor."""
    neighbours: int = Field(3, ge=1, le=50)
    """Number k of neighbours of precision, recall, density and coverage."""
    neighbour_references: int = Field(10_000, ge=10)
    """Reference images used at most for precision and recall, and on either side for kd, cmmd and mind; samples and
    held-out images at most for a detector's copies (ADM: 10,000)."""
    score_split: int = Field(5000, ge=10)
    """Samples in each split of the Inception Score."""
    infinity: bool = False
    """Also extrapolate the Fréchet distance to infinitely many samples."""
    cmmd: bool = False
    """Also measure CMMD, the kernel distance of embeddings of norm 1; meant for CLIP's (type: transformers)."""
    two_sample: bool = True
    """Also run a two-sample test: how well samples can be distinguished from real images."""
    copies: bool = True
    """Also search for each sample's nearest training images, in pixels and in the features of each detector."""
    likelihood: LikelihoodConfig | None = None
    """Also measure the bits per dimension that the network gives to real images; unset: not."""
    attributes: Literal["painted_digits", "slanted_digits"] | None = None
    """Also measure whether images have the attributes that they were asked for: painted_digits, those that their
    prompts name; slanted_digits, their numbers slant and size; each for data of that source. Unset: no."""
    prompts: PromptJudge | None = None
    """Also measure how well images agree with their prompts, with a model that embeds both, such as {type:
    transformers, weights: FOLDER, name: siglip}; unset: no."""
    published: tuple[PublishedResult, ...] = ()
    """Published results, to compare with the measured ones in metrics.json and on the page."""
    lpips: LpipsConfig | None = None
    """Also measure LPIPS of a codec's reconstructions, with local weights; unset: no."""

    @property
    def least_samples(self) -> int:
        """Return the least number of images that can be evaluated: each needs `neighbours` others, and one more."""
        return self.neighbours + 2

    @field_validator("detectors")
    @classmethod
    def _apart(cls, detectors: tuple[DetectorConfig, ...]) -> tuple[DetectorConfig, ...]:
        names = [detector.metric_name("fd") for detector in detectors]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"Two of them call their Fréchet distance {twice}. Name each detector once.")
        return detectors
