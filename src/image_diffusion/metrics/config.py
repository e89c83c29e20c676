"""Settings of the evaluation of samples, and published results to compare its metrics with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from image_diffusion.core.config.base import Config
from image_diffusion.core.types import SamplesOf
from image_diffusion.metrics import DetectorConfig
from image_diffusion.metrics.features.classifier import InPipe
from image_diffusion.metrics.images.embedding_similarity import PromptJudge
from image_diffusion.metrics.images.likelihood import LikelihoodConfig
from image_diffusion.metrics.images.reconstruction import LpipsConfig


def _by_type(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


NamedDetector = Annotated[
    DetectorConfig,
    BeforeValidator(_by_type, json_schema_input_type=DetectorConfig | Literal["inpipe", "inception", "dinov2"]),
]
"""A detector as a section, or as its type alone if it needs no other key."""


class PublishedResult(Config):
    """Result that was published for the same kind of model."""

    metric: str
    """Name of the metric as used here: fid, inception_score, bits_per_dim."""
    value: float
    """Published value."""
    source: str = Field(min_length=1)
    """Source of the value."""
    differences: tuple[str, ...] = ()
    """Differences between the published protocol and this one, a sentence each."""


class EvaluateConfig(Config):
    """Detectors, reference and metrics of an evaluation."""

    detectors: tuple[NamedDetector, ...] = Field((InPipe(),), min_length=1)
    """Detectors, each as a section or, with default settings, as its type. Metrics are named after their detector; the
    first detector gives the headline."""
    reference: Literal["train", "validation"] = "train"
    """Split that samples are compared with; the other split gives the real-against-real floor."""
    against: SamplesOf | str | None = None
    """Reference to use instead of a split: the path of an .npz with statistics (ADM's or EDM's layout) or samples, or
    {experiment: name} for another experiment's samples. The metrics then have no floor."""
    neighbours: int = Field(3, ge=1, le=50)
    """Number k of neighbours of precision, recall, density and coverage."""
    neighbour_references: int = Field(10_000, ge=10)
    """Maximum number of reference images for precision and recall, of images on either side for kd, cmmd and mind, and
    of samples and held-out images for a detector's copies (ADM: 10,000)."""
    score_split: int = Field(5000, ge=10)
    """Samples in each split of the Inception Score."""
    infinity: bool = False
    """Also extrapolate the Fréchet distance to infinitely many samples."""
    cmmd: bool = False
    """Also measure CMMD, a kernel distance of embeddings of norm 1; meant for CLIP (type: transformers)."""
    two_sample: bool = True
    """Also run a two-sample test: how well samples can be distinguished from real images."""
    copies: bool = True
    """Also search for each sample's nearest training images, in pixels and in the features of each detector."""
    likelihood: LikelihoodConfig | None = None
    """Also measure the bits per dimension that the network assigns to real images; unset: no."""
    attributes: Literal["painted_digits", "slanted_digits"] | None = None
    """Also measure whether images have the requested attributes: painted_digits, those named in the prompts;
    slanted_digits, the numbers slant and size. Each requires data of the source of that name. Unset: no."""
    prompts: PromptJudge | None = None
    """Also measure how well images match their prompts, using a model that embeds both, such as {type: transformers,
    weights: FOLDER, name: siglip}; unset: no."""
    published: tuple[PublishedResult, ...] = ()
    """Published results, to compare with the measured ones in metrics.json and on the page."""
    lpips: LpipsConfig | None = None
    """Also measure LPIPS of a codec's reconstructions, with local weights; unset: no."""

    @property
    def least_samples(self) -> int:
        """Return the smallest number of images that can be evaluated, `neighbours` + 2."""
        return self.neighbours + 2

    @field_validator("detectors")
    @classmethod
    def _apart(cls, detectors: tuple[DetectorConfig, ...]) -> tuple[DetectorConfig, ...]:
        names = [detector.metric_name("fd") for detector in detectors]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"Two of them call their Fréchet distance {twice}. Name each detector once.")
        return detectors


def compare_with_published(
    cited: Sequence[PublishedResult], entries: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return each published value with the measured one: {"metric", "value", "source", "differences", "ours",
    "interval", "n", "inside"}, plain data; the last four are null without a value to compare.

    The interval in metrics.json is centred on the debiased value. A published value includes the bias of its number of
    samples, so the interval is shifted to our value with its bias. An unreliable value (`doubt`) is not compared.
    """
    compared = []
    for result in cited:
        entry = entries.get(result.metric, {})
        ours = None if entry.get("doubt") else entry.get("value")
        interval, inside = entry.get("interval") if ours is not None else None, None
        if interval is not None:
            debiased = entry.get("debiased")
            moved = 0.0 if debiased is None else ours - debiased
            interval = [bound + moved for bound in interval]
            inside = interval[0] <= result.value <= interval[1]
        measured = {"ours": ours, "interval": interval, "n": entry.get("n"), "inside": inside}
        compared.append(result.model_dump(mode="json") | measured)
    return compared
