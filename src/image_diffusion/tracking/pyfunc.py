"""A trained model as MLflow serves it: seeds and labels -> images; of a codec, images -> what it leaves of them.

    model = mlflow.pyfunc.load_model("models:/image-diffusion.digits-32.inpipe_fd@best")
    images = model.predict(pandas.DataFrame({"seed": [0, 1, 2], "label": [3, 3, 7]}))    # uint8 [3, H, W, C]

MLflow calls `_load_pyfunc`; nothing is pickled. The folder it names holds weights.safetensors and model.json as `train`
wrote them, sample.yaml, and in `codec` and `weaker` the weights folders of the models that those need.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from image_diffusion.codecs.codec import Codec
from image_diffusion.core.config import load, parse
from image_diffusion.core.devices import best_device
from image_diffusion.core.types import DataSpec
from image_diffusion.core.weights import read_model
from image_diffusion.experiment import SampleStage
from image_diffusion.systems import CodecSystem, System
from image_diffusion.systems.diffusion import DiffusionSystem
from image_diffusion.systems.generation import Generator, SampleConfig, requested_labels
from image_diffusion.systems.reconstruction import reconstruct
from image_diffusion.training.model import Model, load_codec, load_model

if TYPE_CHECKING:
    import pandas
    from mlflow.models import ModelSignature


class Images:
    """Makes images as `sample` does: each from its own seed."""

    def __init__(self, model: Model, settings: SampleConfig, codec: Codec, weaker: Model | None) -> None:
        device = best_device()
        other = weaker.network.to(device) if weaker is not None else None
        network = model.network.to(device)
        self._generator = Generator(network, model.system, model.spec, codec, settings, other)
        self._settings, self._classes = settings, model.classes

    def predict(self, rows: pandas.DataFrame, params: dict[str, Any] | None = None) -> NDArray[np.uint8]:
        """Images, uint8 [N, H, W, C]. rows: "seed" and, of a model with classes, "label", the number of the class;
        without it the classes that `sample` would give the seeds."""
        seeds = torch.tensor(rows["seed"].to_numpy(np.int64))
        wanted: str | list[int | str] = self._settings.labels
        if "label" in rows:
            wanted = [int(label) for label in rows["label"]]
        labels = requested_labels(wanted, len(seeds), self._classes, seeds)
        size = self._settings.batch_size
        parts = zip(seeds.split(size), [None] * len(seeds) if labels is None else labels.split(size), strict=False)
        return torch.cat([self._generator(*part) for part in parts]).permute(0, 2, 3, 1).contiguous().numpy()


class Reconstructions:
    """Encodes and decodes images."""

    def __init__(self, model: Model, decoded: str) -> None:
        self._network, self._decoded = model.network.to(best_device()), decoded

    def predict(self, images: NDArray[np.uint8], params: dict[str, Any] | None = None) -> NDArray[np.uint8]:
        """The images, uint8 [N, H, W, C], as they are decoded from their latents."""
        found = reconstruct(self._network, torch.tensor(images).permute(0, 3, 1, 2))
        return found.decoded[self._decoded].permute(0, 2, 3, 1).cpu().contiguous().numpy()


def _load_pyfunc(path: str) -> Images | Reconstructions:
    folder = Path(path)
    model = load_model(folder)
    if isinstance(model.system, CodecSystem):
        return Reconstructions(model, model.system.decoded)
    codec = load_codec(model, folder / "codec", best_device())
    weaker = load_model(folder / "weaker") if (folder / "weaker").is_dir() else None
    return Images(model, load(SampleStage, folder / "sample.yaml").sample, codec, weaker)


def signature(folder: Path) -> ModelSignature | None:
    """What the model in a weights folder takes and gives; None for one that makes nothing of seeds or images alone,
    such as a network that enlarges images."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    described, where = read_model(folder), f"{folder}/model.json"
    system = parse(System, described["system"], where)
    spec = parse(DataSpec, described["spec"], where)
    images = Schema([TensorSpec(np.dtype("uint8"), (-1, -1, -1, -1))])
    if isinstance(system, CodecSystem):
        sides = (spec.resolution, spec.resolution, spec.channels)
        return ModelSignature(inputs=Schema([TensorSpec(np.dtype("uint8"), (-1, *sides))]), outputs=images)
    if isinstance(system, DiffusionSystem) and system.low_resolution is None:
        label = [ColSpec("long", "label", required=False)] if described["classes"] else []
        return ModelSignature(inputs=Schema([ColSpec("long", "seed"), *label]), outputs=images)
    return None
