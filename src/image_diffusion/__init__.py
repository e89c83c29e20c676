"""Train image diffusion models from a folder of images: one graph from image to report."""

__version__ = "0.1.0"
