"""What every network of images asks of its inputs."""

from __future__ import annotations

from torch import Tensor

from image_diffusion.core.types import DataSpec


def check_inputs(spec: DataSpec, x: Tensor, label: Tensor | None, **told: Tensor) -> None:
    """Raise ValueError where x [B, C, H, W], its label or what else is told of it is not what a network was built for.

    spec: what it was built for; a network without classes takes no label, one with classes needs it.
    """
    expected = (spec.channels, spec.resolution, spec.resolution)
    if tuple(x.shape[1:]) != expected:
        raise ValueError(
            f"x has {size_of(x.shape[1:])} (channels x height x width) but the network was built for "
            f"{size_of(expected)}. Use data of the codec and resolution it was trained with."
        )
    if (label is None) != (spec.num_classes == 0):
        raise ValueError(
            f"The network was built for {spec.num_classes} classes but was called "
            f"{'without' if label is None else 'with'} labels. "
            f"{'Give cond label, int64 [B].' if label is None else 'Leave them out.'}"
        )

    expected_told, given = dict(spec.conditions), {name: tuple(each.shape[1:]) for name, each in told.items()}
    if given != expected_told:
        raise ValueError(
            f"The network was built to be told {_told(expected_told)}, but was called with {_told(given)}. Use the "
            f"text encoder it was trained with."
        )


def _told(shapes: dict[str, tuple[int, ...]]) -> str:
    return " and ".join(f"{name} of {size_of(shape)}" for name, shape in sorted(shapes.items())) or "nothing more"


def size_of(shape: tuple[int, ...]) -> str:
    """A shape as people write it: 3 x 32 x 32."""
    return " x ".join(str(number) for number in shape)
