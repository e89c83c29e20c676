"""Settings of the data set that is made of a trained model's images."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from image_diffusion.core.config.base import Config
from image_diffusion.synthesis.scores import parse_requirement


class SynthesizeConfig(Config):
    """Data set of synthetic images, and the scores that it has to reach. Exactly one of `per_class` and `like` is set.
    The images are drawn as the section `sample` says, but for their number and classes."""

    per_class: int | None = Field(None, ge=1)
    """Images of each class that has training images; without classes, images in all."""
    like: Literal["train"] | None = None
    """train: as many images of each class as the training images have."""
    format: Literal["folders", "webdataset", "parquet"] = "folders"
    """Layout of the images: PNGs in a folder for each class (torchvision's ImageFolder), tars (webdataset), or Parquet
    files that contain the PNGs (datasets of Hugging Face)."""
    require: str = ""
    """Scores that the set has to reach to be released, as comparisons joined by `and`: `copies.upper < 0.05 and
    utility.gain.lower > 0`. Each score has value, lower and upper. Empty: it is always released."""
    classifier_seeds: int = Field(3, ge=2, le=20)
    """Classifiers that are trained for each point of the utility."""
    classifier_steps: int = Field(300, ge=1)
    """Steps of each of these classifiers, of 64 images."""

    @model_validator(mode="after")
    def _one_size_and_known_scores(self) -> Self:
        if (self.per_class is None) == (self.like is None):
            raise ValueError("synthesize takes exactly one of per_class and like. Set per_class: 1000, or like: train.")
        parse_requirement(self.require)
        return self
