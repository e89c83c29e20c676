"""Pretrained autoencoders: a folder in diffusers' layout, or a name on the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from image_diffusion.codecs.base import on_device
from image_diffusion.core.files.atomic import digest, sha256_file

_FILES = (
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model-*-of-*.safetensors",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model-*-of-*.bin",
)
"""Names of diffusers' files of weights, by priority."""


def folder_of(weights: str, subfolder: str | None = None) -> Path | None:
    """Return the local folder that `weights` names; None for a name on the Hub."""
    folder = Path(weights).expanduser()
    return folder / (subfolder or "") if folder.is_dir() else None


def settings_of(weights: str, subfolder: str | None, key: str) -> Mapping[str, Any]:
    """Read the config.json of an autoencoder. From the Hub, only this file is downloaded, once.

    key: configuration key, for errors. Raises ValueError when the file is neither present nor available.
    """
    folder = folder_of(weights, subfolder)
    where = f"{weights}/{subfolder}" if subfolder else weights
    if folder is not None:
        if not (folder / "config.json").is_file():
            inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
            advice = f" Its folders {', '.join(inside)} do: name one." if inside else ""
            raise ValueError(f"{key} is {where}, which holds no config.json.{advice} Use the folder of an autoencoder.")
        text = (folder / "config.json").read_text(encoding="utf-8")
    else:
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download(weights, "config.json", subfolder=subfolder)
        except (OSError, ValueError) as error:
            raise unavailable_error(weights, key, error) from None
        text = Path(path).read_text(encoding="utf-8")
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}/config.json is damaged: {error}. Copy it again.") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{where}/config.json is not the configuration of a network. Use the folder of one.")
    return settings


def load_pretrained(
    network: Any, weights: str, subfolder: str | None, device: torch.device, dtype: torch.dtype, key: str
) -> Any:
    """Load an autoencoder of a diffusers class in evaluation mode. Raises ValueError when it is not available."""
    place = str(folder_of(weights) or weights)
    try:
        vae = network.from_pretrained(place, torch_dtype=dtype, subfolder=subfolder)
    except (OSError, ValueError, RuntimeError) as error:
        raise unavailable_error(weights, key, error) from None
    return on_device(vae, device)


def content_of(weights: str, subfolder: str | None) -> dict[str, Any]:
    """Return plain data that identifies the weights: the content of a folder, whatever its path; or the name on the
    Hub. Raises ValueError for a folder without weights."""
    folder = folder_of(weights, subfolder)
    if folder is None:
        return {"weights": weights, "subfolder": subfolder}
    files = _weights_in(folder)
    if not files:
        raise ValueError(f"{folder} holds no {_FILES[0]}. Use a folder that diffusers wrote.")
    settings = settings_of(weights, subfolder, "codec.weights")
    relevant = {name: value for name, value in settings.items() if not name.startswith("_") or name == "_class_name"}
    stamps = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return {"config": digest(relevant), "sha256": [_sha256(*stamp) for stamp in stamps]}


def files_of(weights: str, subfolder: str | None = None) -> list[Path]:
    """Return the files of a local autoencoder; none for a name on the Hub."""
    folder = folder_of(weights, subfolder)
    return [] if folder is None else [folder / "config.json", *_weights_in(folder)]


def _weights_in(folder: Path) -> list[Path]:
    return next((files for pattern in _FILES if (files := sorted(folder.glob(pattern)))), [])


@lru_cache
def _sha256(path: Path, size: int, time: int) -> str:
    return sha256_file(path)


def unavailable_error(weights: str, key: str, error: Exception) -> ValueError:
    """Return the error for an autoencoder that cannot be loaded."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(
        f"The autoencoder '{weights}' could not be loaded: {reason} Without access to the Hugging Face Hub, copy "
        f"the model's folder (config.json and diffusion_pytorch_model.safetensors) to this machine and set "
        f"{key} to its path."
    )
