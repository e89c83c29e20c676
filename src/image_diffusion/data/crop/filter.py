"""Filter the images of a source: keep those of which a rule holds, before any of them is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from image_diffusion.data.crop.filter_expression import MissingValue, parse_rule
from image_diffusion.data.shards.records import UNWANTED, Quarantined
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.base import Listing


@runtime_checkable
class HasValues(Protocol):
    """Source that has further values of its images besides their classes."""

    def values_beside(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Return the values of each image under some names, by its name or by that without its extension. Raises
        ValueError where one of the names has no values, or they cannot be read."""
        ...


def apply_filter(source: Source, listing: Listing, keep: str | None) -> tuple[Listing, list[Quarantined]]:
    """Return the listing without the images that a rule leaves out, and these with the reason.

    Raises ValueError where the source has none of the values that the rule asks for, where they cannot be compared, or
    where no image is left.
    """
    if keep is None:
        return listing, []
    rule = parse_rule(keep)
    if not isinstance(source, HasValues):
        raise ValueError(
            f"data.keep needs values beside the images, and data.source.type: {source.type} has none. Use a table, "
            f"Parquet or Hugging Face columns, or .json files beside the images of a folder or a tar."
        )
    values_by_name = source.values_beside(rule.names)
    items, excluded = [], []
    for item in listing.items:
        values = values_by_name.get(item.name) or values_by_name.get(item.name.rpartition(".")[0]) or {}
        try:
            reason = None if rule.matches(values) else f"{UNWANTED}not {rule.text}"
        except MissingValue as error:
            reason = f"{UNWANTED}no {error}"
        except ValueError as error:
            raise ValueError(f"data.keep is {rule.text!r}, but of {item.name} {error}.") from None
        if reason is None:
            items.append(item)
        else:
            excluded.append(Quarantined(item.name, reason))
    if listing.items and not items:
        reason = excluded[0].reason
        raise ValueError(f"data.keep leaves none of {len(excluded):,} images; the first one has {reason!r}. Change it.")
    return replace(listing, items=items), excluded
