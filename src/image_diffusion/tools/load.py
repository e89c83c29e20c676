"""A trained model as a function, in Python: `image_diffusion.load`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas

from image_diffusion.codecs.base import Codec
from image_diffusion.core.devices import best_device
from image_diffusion.experiments.experiment import load_sections
from image_diffusion.systems.sampling import Column, Predict
from image_diffusion.training.load_model import load_codec, load_model
from image_diffusion.workflow.trained_files import find_trained


def load(trained: str | Path, results: str | Path = "results", **settings: Any) -> Predict:
    """Return the function that makes images with a trained model, on a GPU if available::

        make = image_diffusion.load("mine", guidance={"guidance_scale": 2})
        images = make({"seed": range(8), "class": "daisy"})

    It takes a table, as a dictionary of columns or a DataFrame, and returns an image for each row, uint8 [N, H, W, C];
    for a model of arrays, in the dtype of the data. The column `seed` is required. Further columns are conditions:
    `class` (a name) or `label` (a number), `prompt`, `image` (the bytes of a file), or the columns of the model's own
    conditions. For an autoencoder, it takes images and returns their reconstructions.

    trained: an experiment, its folder, or a folder of weights. results: the folder of all results. settings: keys of
    the section `sample`, which override those of the experiment. Raises ValueError for missing weights, for settings
    that do not fit them, and for a model with inputs that a table cannot contain.
    """
    files = find_trained(str(trained), Path(results))
    model = load_model(files.weights.parent)
    sampling = model.system.sampling()
    served = sampling.served(model.spec, model.classes, model.pairs)
    if served is None:
        raise ValueError(
            f"{files.weights.parent} needs more than a table of seeds and conditions. Use image-diffusion sample."
        )

    def codec() -> Codec:
        return load_codec(model, files.codec_weights.parent if files.codec_weights else None, best_device())

    section = weaker = None
    if "sample" in model.system.sections:
        changes = [f"sample.{key}={json.dumps(value)}" for key, value in settings.items()]
        section = load_sections(files.config, ["sample"], model.system.sections, changes)["sample"]
        if folder := getattr(section, "weaker_weights", None):
            weaker = load_model(Path(folder))
    elif settings:
        names = ", ".join(settings)
        raise ValueError(f"A system of type {model.system.type} has no section sample. Leave {names} out.")
    predict = sampling.predictor(model, section, codec, weaker)
    return predict if served.images is not None else lambda table: predict(_checked(table, served.columns))


def _checked(request: Any, columns: Mapping[str, Column]) -> pandas.DataFrame:
    """Return a request as a table. Raises ValueError for an unknown or a missing column."""
    table = pandas.DataFrame(request)
    if unknown := [str(name) for name in table if name not in columns]:
        raise ValueError(f"Unknown column {unknown[0]!r}. The model takes {', '.join(columns)}.")
    if missing := [name for name, column in columns.items() if column.required and name not in table]:
        raise ValueError(f"The column {missing[0]!r} is missing. The model takes {', '.join(columns)}.")
    return table
