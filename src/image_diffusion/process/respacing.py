"""Selection of the timesteps that a shorter process keeps (Nichol & Dhariwal 2021, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

Respacing = str | int | Sequence[int]
"""Timesteps to keep: their number, 250 or "250"; numbers in equal sections, [10, 15, 20] or "10,15,20"; "ddim50" with
DDIM's integer stride; "" for all."""


def space_timesteps(num_timesteps: int, respacing: Respacing) -> list[int]:
    """Return the timesteps kept of 0 … num_timesteps - 1, ascending.

    Sections are as equal as they can be, the first ones longer; each keeps its first and last timestep and spreads the
    others evenly. "ddimN" keeps every s-th timestep for the smallest s that leaves N. Raises ValueError when a section
    has fewer timesteps than requested, when no stride leaves N, or when the text is not a list of counts.
    """
    if respacing == "":
        return list(range(num_timesteps))
    if isinstance(respacing, str) and respacing.startswith("ddim"):
        return _strided(num_timesteps, respacing)
    counts = _counts(respacing)
    if sum(counts) == 0:
        raise ValueError(f"Respacing {respacing!r} keeps no timestep. Keep at least 1.")

    timesteps: list[int] = []
    size, longer = divmod(num_timesteps, len(counts))
    start = 0
    for section, count in enumerate(counts):
        section_size = size + (section < longer)
        timesteps += [start + offset for offset in _spread(section_size, count, respacing)]
        start += section_size
    return timesteps


def _spread(size: int, count: int, respacing: Respacing) -> list[int]:
    """Return `count` of 0 … size - 1, including both ends. The stride is summed in floating point, and halves round to
    even: published samples depend on this, and i * stride keeps other timesteps for 300 in sections of 10, 15, 20."""
    if count > size:
        raise ValueError(
            f"Respacing {respacing!r} asks for {count} timesteps of a section that has {size}. Use at most {size}."
        )
    stride = 1.0 if count <= 1 else (size - 1) / (count - 1)
    offsets, position = [], 0.0
    for _ in range(count):
        offsets.append(round(position))
        position += stride
    return offsets


def _strided(num_timesteps: int, respacing: str) -> list[int]:
    count = _integer(respacing.removeprefix("ddim"), respacing)
    for stride in range(1, num_timesteps):
        timesteps = list(range(0, num_timesteps, stride))
        if len(timesteps) == count:
            return timesteps
    advice = f'Use "{count}" for uneven strides.' if 0 < count <= num_timesteps else f"Use at most {num_timesteps}."
    raise ValueError(f"Respacing {respacing!r}: no integer stride keeps {count} of {num_timesteps} timesteps. {advice}")


def _counts(respacing: Respacing) -> list[int]:
    if isinstance(respacing, int):
        counts = [respacing]
    elif isinstance(respacing, str):
        counts = [_integer(part, respacing) for part in respacing.split(",")]
    else:
        counts = list(respacing)
    if not counts or min(counts) < 0:
        raise ValueError(f'Respacing {respacing!r} is not a list of counts. Use 250, [10, 15, 20] or "ddim50".')
    return counts


def _integer(text: str, respacing: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"Respacing {respacing!r} is not a list of counts: {text!r} is not an integer. "
            'Use "250", "10,15,20" or "ddim50".'
        ) from None
