"""Train image diffusion models from a folder of images: one graph from image to report."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `load` or `__version__`; they are resolved lazily, because stages start often and need neither."""
    from importlib import import_module, metadata

    if name == "load":
        return import_module("image_diffusion.tools.load").load
    if name != "__version__":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    try:
        return metadata.version("image-diffusion")
    except metadata.PackageNotFoundError:  # sources that are not installed
        return "0"
