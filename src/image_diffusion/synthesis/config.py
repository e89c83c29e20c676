"""Settings of a data set of a trained model's images."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from image_diffusion.core.config.base import Config, Sparse
from image_diffusion.synthesis.scores import parse_requirement


class RejectConfig(Config):
    """Selection of the images. At least one reason for rejection is set. The first images that are not rejected form
    the set."""

    confidence: float = Field(0.0, ge=0, lt=1)
    """Reject images if the data set's own detector gives their class a lower probability; 0: reject none."""
    other_class: bool = False
    """Reject images that the detector assigns to another class than the requested one."""
    near_training: bool = False
    """Reject images that are nearer to a training image than 99 % of the held-out images are (or, with fewer than 100
    held-out images, than 99 % of the training images are to one another), as the score `copies` counts them."""
    drawn: float = Field(2.0, gt=1, le=100)
    """Number of images drawn per image of the set. If too few pass, the set is smaller."""

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
    """Data set of synthetic images, and the scores that it must reach. Exactly one of `per_class`, `like` and `table`
    is set. The section `sample` has the settings of the images, except their number, classes and numbers."""

    if_set: ClassVar[frozenset[str]] = frozenset({"table", "reject", "num_jobs"})

    per_class: int | None = Field(None, ge=1)
    """Number of images of each class with training images; without classes, number of all images."""
    like: Literal["train"] | None = None
    """train: as many images of each class as the training set has; with the numbers of the training images, if the
    network is conditioned on numbers."""
    table: str | None = None
    """Table with a row for each kind of image (`.csv`, `.tsv`, `.jsonl` or `.parquet`): the class in the column
    `label`, each number in its own column, and the number of images in the column `count`; 1 without that column."""
    format: Literal["folders", "webdataset", "parquet"] = "folders"
    """Layout of the images: PNGs in a folder for each class (torchvision's ImageFolder), tars (webdataset), or Parquet
    files that contain the PNGs (datasets of Hugging Face)."""
    reject: RejectConfig | None = None
    """Selection among the images drawn; unset: all images are kept."""
    require: str = ""
    """Scores that the set must reach to be released, as comparisons joined by `and`: `copies.upper < 0.05 and
    utility.gain.lower > 0`. Each score has value, lower and upper. Empty: the set is always released."""
    classifier_seeds: int = Field(3, ge=2, le=20)
    """Number of classifiers trained on each training set of the utility scores."""
    classifier_steps: int = Field(300, ge=1)
    """Training steps of each of these classifiers, with 64 images per step."""
    num_jobs: int = Field(1, ge=1, le=64)
    """Number of parallel jobs that draw the images. It does not change the images."""

    @model_validator(mode="after")
    def _one_size_and_known_scores(self) -> Self:
        if sum(size is not None for size in (self.per_class, self.like, self.table)) != 1:
            raise ValueError(
                "synthesize takes exactly one of per_class, like and table. Set per_class: 1000, like: train, or "
                "table: FILE."
            )
        parse_requirement(self.require)
        return self
