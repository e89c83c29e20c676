"""Weights folder, the output of `train`: tensors in safetensors, other data in JSON, both verified on reading."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from image_diffusion.core.files.atomic import atomic_write, read_json, write_json
from image_diffusion.core.files.checksums import damaged, describe
from image_diffusion.core.process.errors import log_line

FORMAT = 1

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Prefixes that torch.compile, FSDP and activation checkpointing add to the names of a wrapped module."""

_PREFIXES = re.compile(r"(module|ema|model|net)\.")
"""Names of attributes for a network in DataParallel, AveragedModel, and training programs."""


def save_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    model: Mapping[str, Any],
    check_owner: Callable[[], None] = lambda: None,
) -> None:
    """Write weights.safetensors and then model.json, so that a folder with a model.json is complete.

    tensors: by parameter name, any device. model: plain data that rebuilds the network; the format number and the
    sha256 of the weights are added to it. check_owner: raises an exception if the folder must not be written.
    """

    def replace() -> None:
        check_owner()
        (folder / "model.json").unlink(missing_ok=True)

    data = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    path, sha256 = folder / "weights.safetensors", hashlib.sha256(data).hexdigest()
    with atomic_write(path, replace) as file:
        file.write(data)
    write_json(folder / "model.json", {"format": FORMAT, **model, "sha256": sha256})
    describe(folder, [path])


def read_model(folder: Path) -> dict[str, Any]:
    """Return the model.json of a weights folder. Raises ValueError if it is missing or of another format."""
    model: dict[str, Any] = read_json(folder / "model.json")
    if model.get("format") != FORMAT:
        raise ValueError(f"{folder}/model.json has format {model.get('format')}; this version reads format {FORMAT}.")
    return model


def read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the model.json of a weights folder. Raises ValueError if they do not fit together."""
    model = read_model(folder)
    path = folder / "weights.safetensors"
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Run the train stage again.")
    if damaged(folder, {path.name: model["sha256"]}):
        raise ValueError(f"{path} does not match the sha256 in {folder}/model.json. Run the train stage again.")
    try:
        return safetensors.torch.load_file(path), model
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}. Run the train stage again.") from None


def content_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of all tensors of a network, which distinguishes files of the same name."""
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def without_wrappers(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file with the parameter names of the network itself, and print the dropped prefixes.

    `_orig_mod.` (torch.compile), `_fsdp_wrapped_module.` and `_checkpoint_wrapped_module.` are dropped anywhere in a
    name; `module.`, `ema.`, `model.` and `net.`, also nested, if every tensor has them. Entries that are mappings, as
    in a training state, are processed separately. A mapping in which names would become duplicates is unchanged.
    content: tensors and plain data by name. path: the file, for the message.
    """
    entries = {
        name: _unwrapped(value) if isinstance(value, Mapping) else (value, ()) for name, value in content.items()
    }
    unwrapped, dropped = _unwrapped({name: value for name, (value, _) in entries.items()})
    all_dropped = dict.fromkeys([*dropped, *(prefix for _, prefixes in entries.values() for prefix in prefixes)])
    if all_dropped:
        log_line(f"{path}: the prefixes {', '.join(all_dropped)} of a wrapper are dropped from the names of tensors.")
    return unwrapped


def _unwrapped(content: Mapping[Any, Any]) -> tuple[dict[Any, Any], tuple[str, ...]]:
    """Return the content of one mapping without prefixes of wrappers, and the dropped prefixes."""
    names = {name: name for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    dropped = dict.fromkeys(wrapper for name in names for wrapper in _WRAPPERS.findall(name))
    names = {name: _WRAPPERS.sub("", name) for name in names}
    counter = {"n_averaged"} if len(names) > 1 else set()  # an entry of AveragedModel next to module.
    while prefixes := {_first(short) for name, short in names.items() if name not in counter}:
        if len(prefixes) > 1 or None in prefixes:
            break
        prefix = str(prefixes.pop())
        dropped[prefix] = None
        names = {name: short.removeprefix(prefix) for name, short in names.items()}
    if len(set(names.values())) < len(names):
        return dict(content), ()
    if "module." in dropped:
        names = {name: short for name, short in names.items() if name not in counter}
        content = {name: value for name, value in content.items() if name not in counter}
    return {names.get(name, name): value for name, value in content.items()}, tuple(dropped)


def _first(name: str) -> str | None:
    """Return the prefix of a name that a wrapper may have added; None if there is none."""
    match = _PREFIXES.match(name)
    return match[0] if match else None
