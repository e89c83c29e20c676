"""Settings of the data set that is made of a trained model's images."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from image_diffusion.core.config.base import Config, Sparse
from image_diffusion.synthesis.scores import parse_requirement


class RejectConfig(Config):
    """Selection of the images. At least one reason to reject an image is set; of those that pass, the first ones fill
    the set."""

    confidence: float = Field(0.0, ge=0, lt=1)
    """Reject images to whose class the data set's own detector gives a lower probability; 0: none."""
    other_class: bool = False
    """Reject images that the detector recognises as another class than the one that was asked for."""
    near_training: bool = False
    """Reject images that lie nearer to a training image than 99 % of the held-out images, or of the training images to
    one another where fewer than 100 are held out: what the score `copies` counts."""
    drawn: float = Field(2.0, gt=1, le=100)
    """Images that are drawn for each one of the set. A set of which too few pass is smaller."""

    @model_validator(mode="after")
    def _has_a_reason(self) -> Self:
        if not (self.confidence or self.other_class or self.near_training):
            raise ValueError(
                "synthesize.reject names no reason. Set confidence: 0.5, other_class: true or near_training: true."
            )
        return self

    @property
    def needs_classes(self) -> bool:
        """True if the images are selected by their classes."""
        return self.confidence > 0 or self.other_class


class SynthesizeConfig(Sparse):
    """Data set of synthetic images, and the scores that it has to reach. Exactly one of `per_class`, `like` and `table`
    is set. The images are drawn as the section `sample` says, but for their number, classes and numbers."""

    if_set: ClassVar[frozenset[str]] = frozenset({"table", "reject", "num_jobs"})

    per_class: int | None = Field(None, ge=1)
    """Images of each class that has training images; without classes, images in all."""
    like: Literal["train"] | None = None
    """train: as many images of each class as the training images have; with the numbers of the training images, if the
    network is conditioned on numbers."""
    table: str | None = None
    """Table with a row for each kind of image (`.csv`, `.tsv`, `.jsonl` or `.parquet`): the class in the column
    `label`, numbers in columns of their own, and in the column `count` how many images, 1 if it is missing."""
    format: Literal["folders", "webdataset", "parquet"] = "folders"
    """Layout of the images: PNGs in a folder for each class (torchvision's ImageFolder), tars (webdataset), or Parquet
    files that contain the PNGs (datasets of Hugging Face)."""
    reject: RejectConfig | None = None
    """Selection of the images that were drawn; unset: all of them."""
    require: str = ""
    """Scores that the set has to reach to be released, as comparisons joined by `and`: `copies.upper < 0.05 and
    utility.gain.lower > 0`. Each score has value, lower and upper. Empty: it is always released."""
    classifier_seeds: int = Field(3, ge=2, le=20)
    """Classifiers that are trained for each point of the utility."""
    classifier_steps: int = Field(300, ge=1)
    """Steps of each of these classifiers, of 64 images."""
    num_jobs: int = Field(1, ge=1, le=64)
    """Jobs that draw the images, side by side. Does not change them."""

    @model_validator(mode="after")
    def _one_size_and_known_scores(self) -> Self:
        if sum(size is not None for size in (self.per_class, self.like, self.table)) != 1:
            raise ValueError(
                "synthesize takes exactly one of per_class, like and table. Set per_class: 1000, like: train, or "
                "table: FILE."
            )
        parse_requirement(self.require)
        return self
