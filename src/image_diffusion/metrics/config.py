"""How samples are judged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from image_diffusion.core.config import Config
from image_diffusion.core.types import SamplesOf
from image_diffusion.metrics import DetectorConfig
from image_diffusion.metrics.cited import Cited
from image_diffusion.metrics.detector import InPipe
from image_diffusion.metrics.likelihood import LikelihoodConfig
from image_diffusion.metrics.lpips import LpipsConfig
from image_diffusion.metrics.prompted import PromptJudge


def _by_type(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


NamedDetector = Annotated[
    DetectorConfig,
    BeforeValidator(_by_type, json_schema_input_type=DetectorConfig | Literal["inpipe", "inception", "dinov2"]),
]
"""A detector by its section, or by its type alone where that needs no key."""


class EvaluateConfig(Config):
    """The detector, the reference, and what is measured."""

    detectors: tuple[NamedDetector, ...] = Field((InPipe(),), min_length=1)
    """What looks at the images, each by its section or, with its defaults, by its type alone. The names of the metrics
    say which it was; the first gives the headline."""
    reference: Literal["train", "validation"] = "train"
    """The split that samples are compared with; the other split gives the real-against-real floor."""
    against: SamplesOf | str | None = None
    """What samples are compared with in place of that split: the path of an .npz, of statistics (ADM's or EDM's layout)
    or of samples; or {experiment: name}, another experiment's samples. There is then no real-against-real floor."""
    neighbours: int = Field(3, ge=1, le=50)
    """k of precision, recall, density and coverage."""
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
    """Also test how well samples can be told from real images."""
    copies: bool = True
    """Also search for each sample's nearest training images, in pixels and as each detector sees them."""
    likelihood: LikelihoodConfig | None = None
    """Also measure the bits per dimension that the network gives to real images; unset: not."""
    attributes: Literal["painted_digits"] | None = None
    """Also measure whether images have what their prompts name: painted_digits, for digits of that source; unset:
    not."""
    prompts: PromptJudge | None = None
    """Also measure how well images agree with their prompts, by a model that embeds both: {type: transformers, weights:
    FOLDER, name: siglip}, say; unset: not."""
    published: tuple[Cited, ...] = ()
    """Figures that others published, to stand beside ours in metrics.json and on the page."""
    lpips: LpipsConfig | None = None
    """Also measure how different a codec's reconstructions look, where the weights are at hand; unset: not."""

    @field_validator("detectors")
    @classmethod
    def _apart(cls, detectors: tuple[DetectorConfig, ...]) -> tuple[DetectorConfig, ...]:
        names = [each.metric_name("fd") for each in detectors]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"Two of them call their Fréchet distance {twice}. Name each detector once.")
        return detectors
