"""A weights folder: what `train` hands on. Tensors in safetensors, everything else in JSON, both checked on reading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from image_diffusion.core.files import atomic_write, read_json, write_json
from image_diffusion.core.verify import damaged, describe

FORMAT = 1


def save_weights(
    folder: Path, tensors: Mapping[str, Tensor], model: Mapping[str, Any], permit: Callable[[], None] = lambda: None
) -> None:
    """Write weights.safetensors and model.json, the second last: a folder with a model.json is whole.

    tensors: by parameter name, any device. model: plain data that rebuilds the network; the format number and the
    sha256 of the weights are added to it. permit: raises if nothing may be written here any more.
    """

    def replace() -> None:
        permit()
        (folder / "model.json").unlink(missing_ok=True)

    data = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    path, sha256 = folder / "weights.safetensors", hashlib.sha256(data).hexdigest()
    with atomic_write(path, replace) as file:
        file.write(data)
    write_json(folder / "model.json", {"format": FORMAT, **model, "sha256": sha256})
    describe(folder, [path])


def read_model(folder: Path) -> dict[str, Any]:
    """The model.json of a weights folder. Raises ValueError when it is missing or of another format."""
    model: dict[str, Any] = read_json(folder / "model.json")
    if model.get("format") != FORMAT:
        raise ValueError(f"{folder}/model.json has format {model.get('format')}; this version reads format {FORMAT}.")
    return model


def read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the model.json of a weights folder. Raises ValueError when the files do not belong together."""
    model = read_model(folder)
    path = folder / "weights.safetensors"
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Run the train stage again.")
    if damaged(folder, {path.name: model["sha256"]}):
        raise ValueError(f"{path} is not the file that {folder}/model.json describes. Run the train stage again.")
    try:
        return safetensors.torch.load_file(path), model
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}.") from None


def content_digest(tensors: Mapping[str, Tensor]) -> str:
    """Of all tensors of a network: another file under the same name is another network."""
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
