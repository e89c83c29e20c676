"""Which images of a source are kept: those of which a rule holds, before any of them is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from image_diffusion.data.records import UNWANTED, Quarantined
from image_diffusion.data.rules import Untold, parse_rule
from image_diffusion.data.sources import Source
from image_diffusion.data.sources.listing import Listing


@runtime_checkable
class TellsValues(Protocol):
    """A source that tells more of its images than their classes."""

    def values_beside(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """What is told of each image under some names, by its name or by that without its extension. Raises ValueError
        where nothing is told under one of them, or it cannot be read."""
        ...


def chosen(source: Source, listing: Listing, keep: str | None) -> tuple[Listing, list[Quarantined]]:
    """The listing without the images that a rule leaves out, and these with the reason.

    Raises ValueError where the source tells nothing that the rule asks for, where that cannot be compared, or where no
    image is left.
    """
    if keep is None:
        return listing, []
    rule = parse_rule(keep)
    if not isinstance(source, TellsValues):
        raise ValueError(
            f"data.keep needs values beside the images, and data.source.type: {source.type} has none. Use a table, "
            f"Parquet or Hugging Face columns, or .json files beside the images of a folder or a tar."
        )
    told = source.values_beside(rule.names)
    kept, left_out = [], []
    for item in listing.items:
        values = told.get(item.name) or told.get(item.name.rpartition(".")[0]) or {}
        try:
            reason = None if rule.holds(values) else f"{UNWANTED}not {rule.text}"
        except Untold as error:
            reason = f"{UNWANTED}no {error}"
        except ValueError as error:
            raise ValueError(f"data.keep is {rule.text!r}, but of {item.name} {error}.") from None
        if reason is None:
            kept.append(item)
        else:
            left_out.append(Quarantined(item.name, reason))
    if listing.items and not kept:
        reason = left_out[0].reason
        raise ValueError(f"data.keep leaves none of {len(left_out):,} images; the first one has {reason!r}. Change it.")
    return replace(listing, items=kept), left_out
