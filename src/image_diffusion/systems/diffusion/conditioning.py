"""Condition of an image diffusion: one part or several. A part is a class, a text, an image embedding, numbers or
another image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from torch import Tensor

from image_diffusion.core.config.base import OneOrSeveral, single_value
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec, SamplesOf
from image_diffusion.data.config import DataConfig
from image_diffusion.data.shards.reader import Shards
from image_diffusion.systems.diffusion.conditions.base import (
    ConditionInputs,
    SamplingRequest,
    ServedModel,
    check_names,
    check_unused,
    joined,
    labels_of,
    read_rows,
)
from image_diffusion.systems.diffusion.conditions.encoded import EmbeddingCondition, TextCondition
from image_diffusion.systems.diffusion.conditions.image import ImageCondition, ImagePart
from image_diffusion.systems.diffusion.conditions.paired_image import PairedImageCondition
from image_diffusion.systems.diffusion.conditions.vector import LabelCondition, NumbersCondition
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.sampling import Column

AnyImage = Annotated[ImageCondition | PairedImageCondition, Field(discriminator="source")]
_Vector = NumbersCondition | AnyImage
Part = LabelCondition | TextCondition | EmbeddingCondition | _Vector


def _fitting(value: Any) -> Any:
    """Return the parts. Raises ValueError for those that do not go together."""
    parts = value if isinstance(value, tuple) else (value,)
    types = [part.type for part in parts]
    if twice := next((name for name in types if types.count(name) > 1), None):
        raise ValueError(f"{twice} is named twice. Name each part once.")
    return value


_EXAMPLE = "a part, such as {type: label}"

OnePart = Annotated[Part, Field(discriminator="type")]
OneVector = Annotated[LabelCondition | _Vector, Field(discriminator="type")]

AnyCondition = Annotated[OneOrSeveral[OnePart], single_value(_EXAMPLE), AfterValidator(_fitting)]
"""One part, or a list of parts that apply together. A list of one part equals that part."""

VectorCondition = Annotated[OneOrSeveral[OneVector], single_value(_EXAMPLE), AfterValidator(_fitting)]
"""One part or a list, of the types that every network takes: added to the embedding of the time, or to the input."""


@dataclass(frozen=True)
class Conditions:
    """Condition of parts that apply together. Each part may read a set of shards in addition to the images."""

    parts: tuple[Part, ...]

    @classmethod
    def written_as(cls, written: Part | tuple[Part, ...]) -> Conditions:
        """Return the condition that a configuration contains."""
        return cls(written if isinstance(written, tuple) else (written,))

    @property
    def type(self) -> str:
        """Return the types of the parts, as a configuration has them."""
        types = [part.type for part in self.parts]
        return types[0] if len(types) == 1 else f"[{', '.join(types)}]"

    @property
    def takes_classes(self) -> bool:
        """True if the class of an image is one of the parts."""
        return any(part.takes_classes for part in self.parts)

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of the section sample that provide conditions."""
        return frozenset().union(*(part.keys for part in self.parts))

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the kinds of the additional shards, in the order of the parts."""
        return tuple(part.reads for part in self.parts if part.reads is not None)

    @property
    def image(self) -> ImagePart | None:
        """Return the part that is an image; None without one."""
        return next((part for part in self.parts if isinstance(part, ImagePart)), None)

    def check(self, section: str, settings: SampleConfig, pairs: Sequence[Any] = ()) -> None:
        """Raise ValueError for settings that no part uses, and for classes in rows if the network takes no classes.
        pairs: the sets of the section pairs."""
        for part in self.parts:
            part.check(section, self._settings_for_part(part, settings), _set_of_part(part, pairs))
        if settings.conditions is not None and not isinstance(settings.conditions, str):
            key = f"{section}.conditions"
            rows = read_rows(settings.conditions, key)
            check_names(rows, self._names([_set_of_part(part, pairs) for part in self.parts]), key)
            self._check_classes(section, settings, bool(labels_of(rows, key)))

    def _check_classes(self, section: str, settings: SampleConfig, names_classes: bool) -> None:
        """Raise ValueError for rows that name classes if the network takes none, or if the settings name classes,
        too."""
        if names_classes and not self.takes_classes:
            raise ValueError(
                f"{section}.conditions names a label, but the network takes no classes. Leave it out, or add "
                f"{{type: label}} to system.condition."
            )
        if names_classes and settings.labels != "balanced":
            raise ValueError(f"{section}.labels is set, and {section}.conditions names a label. Leave one of them out.")

    def check_pairs(self, pairs: Sequence[Any], data: DataConfig) -> None:
        """Raise ValueError where the sets of the section pairs do not fit the parts or the data."""
        for part in self.parts:
            part.check_pairs(_set_of_part(part, pairs), data)

    def spec(self, spec: DataSpec, joined_sets: Mapping[str, Shards]) -> DataSpec:
        """Return the data spec of the network, with the conditions of every part. joined_sets: the additional sets, by
        kind."""
        specs = [part.spec(spec, joined_sets.get(part.reads or "")) for part in self.parts]
        classes = max(of_part.num_classes for of_part in specs)
        conditions = {name: shape for of_part in specs for name, shape in of_part.conditions.items()}
        return spec.model_copy(update={"num_classes": classes, "conditions": conditions})

    def training_conditions(self, stored: Mapping[str, Tensor], streams: Streams, spec: DataSpec) -> dict[str, Tensor]:
        """Return the conditions of samples other than the class, by name. stored: their entries in the additional
        shards, by kind. spec: of the network."""
        conditions = dict[str, Tensor]()
        for part in self.parts:
            if part.reads is not None:
                conditions |= part.training_conditions(stored[part.reads], streams, spec)
        return conditions

    def draws(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Return the source of the conditions that the settings do not contain. Raises ValueError for two sources."""
        drawing = self.drawing(settings)
        if len({str(source) for _, source in drawing}) > 1:
            unset = next(part.source_key for part, source in drawing if source == "validation")
            named = next(part.source_key for part, source in drawing if source != "validation")
            raise ValueError(
                f"sample.{unset} is unset, so held-out images provide the {unset}, but sample.{named} names others. "
                f"Set both, or none."
            )
        return drawing[0][1] if drawing else None

    def drawing(self, settings: SampleConfig) -> list[tuple[Part, SamplesOf | str]]:
        """Return the parts with conditions that the settings do not contain, and the source of each."""
        return [(part, source) for part in self.parts if (source := part.draws(settings)) is not None]

    def draws_images(self, settings: SampleConfig) -> SamplesOf | str | None:
        """Return the source of the images of the image part; None without one."""
        return None if self.image is None else self.image.draws_images(settings)

    def pictures(self, settings: SampleConfig) -> list[Path]:
        """Return the image files that the settings name."""
        return [path for part in self.parts for path in part.pictures(settings)]

    def served(self, model: ServedModel) -> dict[str, Column] | None:
        """Return the columns of a request of a served model: the seed, and those of every part. None if a part cannot
        be in a request. Raises ValueError for two columns of the same name."""
        columns = {"seed": Column("long", required=True, example=(0, 1))}
        for part in self.parts:
            of_part = part.served(replace(model, pairs=_description_of_set(part, model.pairs)))
            if of_part is None:
                return None
            if twice := columns.keys() & of_part.keys():
                raise ValueError(f"pairs.columns names {twice.pop()}, which is another column of a request")
            columns |= of_part
        return columns

    def sampling_request(self, inputs: ConditionInputs) -> SamplingRequest:
        """Return the conditions of the images to be made: those of every part, and the classes of the rows."""
        settings = inputs.settings
        check_unused("sample", settings, self.keys)
        described = [_description_of_set(part, inputs.pairs) for part in self.parts]
        if inputs.rows is None and settings.conditions is not None:
            rows = read_rows(settings.conditions, inputs.key)
            check_names(rows, self._names(described), inputs.key)
            inputs = replace(inputs, rows=rows)
        classes = labels_of(inputs.rows or [], inputs.key)
        self._check_classes("sample", settings, bool(classes))
        requests = [
            part.sampling_request(replace(inputs, settings=self._settings_for_part(part, settings), pairs=pairs))
            for part, pairs in zip(self.parts, described, strict=True)
        ]
        request = joined(requests)
        if not classes:
            return request
        return replace(request, classes=[classes[i % len(classes)] for i in range(len(inputs.seeds))], labels=None)

    def _names(self, pairs: Sequence[Any]) -> list[str]:
        """Return the columns of rows that the parts read. pairs: the set of each part, from the section pairs or from a
        manifest."""
        return [name for part, of_part in zip(self.parts, pairs, strict=True) for name in part.names(of_part)]

    def _settings_for_part(self, part: Part, settings: SampleConfig) -> SampleConfig:
        """Return the settings for a part: the keys of other parts have their defaults."""
        hidden = {key: SampleConfig.model_fields[key].default for key in self.keys - part.keys}
        return settings.model_copy(update=hidden)


def _description_of_set(part: Part, pairs: Mapping[str, Any] | None) -> Any:
    """Return the description in the manifests, by kind, of the set that a part reads; None without one."""
    return (pairs or {}).get(part.reads or "")


def _set_of_part(part: Part, pairs: Sequence[Any]) -> Any:
    """Return the set of the section pairs that a part reads; None without one."""
    return next((of_kind for of_kind in pairs if of_kind.kind == part.reads), None)
