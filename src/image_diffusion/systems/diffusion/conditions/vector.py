"""Conditions that are added to the embedding of the time: the class of an image, and its numbers, such as an age or an
angle, which the stage `embed` has stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from image_diffusion.core.number_columns import NumberColumns, numbers_of
from image_diffusion.core.process.errors import log_line_once
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import NUMBERS, DataSpec, SamplesOf
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards.reader import Shards
from image_diffusion.systems.diffusion.conditions.base import (
    ConditionInputs,
    ConditionPart,
    SamplingRequest,
    ServedModel,
    held_out,
    read_rows,
    rows_of,
)
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.sampling import Column


class LabelCondition(ConditionPart):
    """Condition on the class of an image, if the data have classes."""

    type: Literal["label"] = "label"
    """Condition on the class of the image, or no condition."""

    takes_classes: ClassVar[bool] = True
    keys: ClassVar[frozenset[str]] = frozenset({"labels"})

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        if settings.prompts is not None or settings.negative_prompt:
            raise ValueError(
                f"{section}.prompts or {section}.negative_prompt is set, but the network takes classes, not words. "
                f"Leave them out, or set system.condition.type to text."
            )
        super().check(section, settings, pairs)

    def served(self, model: ServedModel) -> dict[str, Column]:
        """Return the columns of the number and the name of a class, if the data have classes."""
        if not model.classes:
            return {}
        return {"label": Column("long"), "class": Column("string", example=(model.classes[0], model.classes[-1]))}

    def sampling_request(self, inputs: ConditionInputs) -> SamplingRequest:
        """Return the conditions of the samples other than classes: none."""
        return SamplingRequest()


class NumbersCondition(ConditionPart):
    """Condition on numbers: columns of a table (section pairs), on the scale of their ranges in the training images.
    The network also learns from images with missing numbers."""

    type: Literal["numbers"] = "numbers"
    """Numbers of an image."""

    keys: ClassVar[frozenset[str]] = frozenset({"conditions"})
    reads: ClassVar[str] = "numbers"
    pairs_example: ClassVar[str] = "{type: numbers, table: FILE.csv, columns: [age]}"
    source_key: ClassVar[str] = "conditions"
    source_advice: ClassVar[str] = "write some"

    def check(self, section: str, settings: SampleConfig, pairs: Any = None) -> None:
        """Raise ValueError for settings without effect, and for rows with names or values that do not fit."""
        if settings.prompts is not None or settings.negative_prompt:
            raise ValueError(
                f"{section}.prompts or {section}.negative_prompt is set, but the network takes numbers, not words. "
                f"Write {section}.conditions, such as {{age: [20, 40]}}."
            )
        if settings.labels != "balanced":
            raise ValueError(f"{section}.labels is set, but the network takes numbers. Leave it out.")
        super().check(section, settings, pairs)
        if settings.conditions is not None and not isinstance(settings.conditions, str):
            key = f"{section}.conditions"
            numbers_of(read_rows(settings.conditions, key), key, self.names(pairs))

    def check_pairs(self, pairs: Any, data: DataConfig) -> None:
        pairs.check(data.source)

    def spec(self, spec: DataSpec, pairs: Shards | None) -> DataSpec:
        """Return the data spec of the network: no classes, numbers of [columns, 2]."""
        assert pairs is not None
        return spec.model_copy(update={"num_classes": 0, "conditions": {NUMBERS: tuple(pairs.shape)}})

    def training_conditions(self, stored: Tensor, streams: Streams, spec: DataSpec) -> dict[str, Tensor]:
        """Return the numbers of each image [B, columns, 2], as they are stored."""
        return {NUMBERS: stored.float()}

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Return the source of the numbers: held-out images, if no rows are set."""
        return "validation" if settings.conditions is None else None

    def names(self, pairs: Any) -> tuple[str, ...]:
        return _described(pairs).names if pairs is None or isinstance(pairs, Mapping) else tuple(pairs.columns)

    def served(self, model: ServedModel) -> dict[str, Column]:
        """Return an optional column for each number. Its example has the ends of its range."""
        columns = _described(model.pairs)
        return {name: Column("double", example=ends) for name, ends in zip(columns.names, columns.ranges, strict=True)}

    def sampling_request(self, inputs: ConditionInputs) -> SamplingRequest:
        """Return the numbers of the samples: each row in turn, or those of held-out images, chosen by seed. Raises
        ValueError for a request without any of the columns."""
        columns, asked, key = _described(inputs.pairs), inputs.rows, inputs.key
        if asked is None:
            images = held_out(inputs.source, "conditions")
            rows, labels, origin = rows_of(images, inputs.seeds)
            scaled = images.gather_of(self.reads, rows)
            values = [dict[str, float | None](of_image) for of_image in columns.values(scaled)]
            return _request(columns, values, scaled, origin, labels=labels)
        if inputs.is_request and not any(row.keys() & set(columns.names) for row in asked):
            raise ValueError(f"{key} has no column of numbers. Add some of {', '.join(columns.names)}.")
        values = numbers_of(asked, key, columns.names)
        if phrases := columns.outside(values):
            log_line_once(f"warning: {key} asks for {', '.join(phrases)}: the network has seen no such image.")
        if names := columns.never_missing(values):
            log_line_once(
                f"warning: {key} leaves out {', '.join(names)}, which no training image lacks: the network has learnt "
                f"no missing number."
            )
        values = [values[row % len(asked)] for row in range(len(inputs.seeds))]
        return _request(columns, values, columns.scaled(values), {})


def _described(pairs: Mapping[str, Any] | None) -> NumberColumns:
    if pairs is None:
        raise ValueError("The model does not say which numbers it was trained on. Train it again.")
    return NumberColumns.described(pairs)


def _request(
    columns: NumberColumns,
    values: Sequence[Mapping[str, float | None]],
    scaled: Tensor,
    described: dict[str, Any],
    **more: Any,
) -> SamplingRequest:
    """Return the request for images with these numbers, which are also the titles."""
    shown = [
        [f"{name} {value:.10g}" for name in columns.names if (value := row.get(name)) is not None] for row in values
    ]
    titles = [", ".join(numbers) or "no number" for numbers in shown]
    conditions = {name: [row.get(name) for row in values] for name in columns.names}
    ranges = dict(zip(columns.names, map(list, columns.ranges), strict=True))
    numbers = {"conditions": {"values": conditions, "ranges": ranges, **described}}
    return SamplingRequest(titles, {NUMBERS: scaled.float()}, described=numbers, **more)
