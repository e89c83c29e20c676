"""A trained model as served by MLflow: seeds and conditions -> images; for a codec, images -> reconstructions.

    model = mlflow.pyfunc.load_model("models:/image-diffusion.digits-32.inpipe_fd@best")
    images = model.predict(pandas.DataFrame({"seed": [0, 1, 2], "class": ["3", "3", "7"]}))    # uint8 [3, H, W, C]

MLflow calls `_load_pyfunc`; nothing is pickled. The folder it names holds weights.safetensors and model.json as `train`
wrote them, sample.yaml, and in `codec` and `weaker` the weights folders of the models that those need. `embeds`
is such a folder with a sample.yaml: that of the prior whose embeddings a decoder draws, which then takes captions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from image_diffusion.codecs.base import Codec
from image_diffusion.core.config.base import parse
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.weights import read_model
from image_diffusion.core.types import DataSpec
from image_diffusion.experiments.experiment import load_sections
from image_diffusion.systems import AnySystem
from image_diffusion.systems.base import System
from image_diffusion.systems.pairs.inputs import pairs_by_kind
from image_diffusion.systems.sampling import Predict
from image_diffusion.training.load_model import load_codec, load_model

if TYPE_CHECKING:
    import pandas
    from mlflow.models import ModelSignature


class Answers:
    """Model interface that MLflow calls."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Return images [N, H, W, C], uint8 or in the arrays' dtype, for a table of conditions or for images."""
        return self._predict(model_input)


def _load_pyfunc(path: str) -> Answers:
    folder = Path(path)
    model = load_model(folder)
    system = model.system

    def codec() -> Codec:
        return load_codec(model, folder / "codec", best_device())

    weaker = load_model(folder / "weaker") if (folder / "weaker").is_dir() else None
    embed = None
    if (folder / "embeds").is_dir():
        other = load_model(folder / "embeds")
        embed = other.system.sampling().embedder(other, _sampling(folder / "embeds", other.system))
    return Answers(system.sampling().predictor(model, _sampling(folder, system), codec, weaker, embed))


def _sampling(folder: Path, system: System) -> Any:
    """Return the section `sample` from a folder; None if it is missing."""
    path = folder / "sample.yaml"
    return load_sections(path, ["sample"], system.sections)["sample"] if path.is_file() else None


@dataclass(frozen=True)
class Usage:
    """Inputs and outputs of a model, and an example of its inputs."""

    signature: ModelSignature
    example: pandas.DataFrame | NDArray[np.uint8]


def usage(folder: Path, embeds: bool = False) -> Usage | None:
    """Return the usage of the model in a weights folder; None if a request cannot state its inputs, such as those of a
    decoder of embeddings alone. embeds: True if the model that makes embeddings of captions is included. Raises
    ValueError for a model that no request fits."""
    import pandas
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    described, where = read_model(folder), f"{folder}/model.json"
    system: System = parse(AnySystem, described["system"], where)
    spec = parse(DataSpec, described["spec"], where)
    pairs = pairs_by_kind(described.get("pairs"), system.joined_kinds or ("pairs",))
    served = system.sampling().served(spec, described["classes"], pairs, embeds)
    if served is None:
        return None
    columns = [ColSpec(column.kind, name, required=column.required) for name, column in served.columns.items()]
    example: Any = pandas.DataFrame({name: column.example for name, column in served.columns.items() if column.example})
    if served.images is not None:
        columns = [TensorSpec(np.dtype(served.dtype), (-1, *served.images))]
        example = np.zeros((1, *served.images), served.dtype)
    images = Schema([TensorSpec(np.dtype(served.dtype), (-1, -1, -1, -1))])
    return Usage(ModelSignature(inputs=Schema(columns), outputs=images), example)
