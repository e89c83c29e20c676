"""Train image diffusion models from a folder of images: one graph from image to report."""


def __getattr__(name: str) -> str:
    """`__version__`, which is looked up when it is asked for: stages start often, and ask for it seldom."""
    if name != "__version__":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("image-diffusion")
    except PackageNotFoundError:  # sources that nobody has installed
        return "0"
