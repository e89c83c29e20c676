"""Latents on disk as other tools write them: given numbers in the layouts of EDM2, LightningDiT and fast-DiT.

The layouts follow each tool's own code: `encode` in NVlabs/edm2's dataset_tool.py, extract_features.py of
hustvl/LightningDiT, extract_features.py of chuanyangjin/fast-DiT.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[np.float32]


def write_edm2(path: Path, mean_std: Array, labels: list[int] | None) -> Path:
    """Write means and deviations [n, 2c, h, w] to a zip file or a folder, by the suffix of the path."""
    members: dict[str, bytes] = {}
    for number, each in enumerate(mean_std):
        file = io.BytesIO()
        np.save(file, each)
        members[f"{number:08d}"[:5] + f"/img-mean-std-{number:08d}.npy"] = file.getvalue()
    told = None if labels is None else [[name, label] for name, label in zip(members, labels, strict=True)]
    members["dataset.json"] = json.dumps({"labels": told}).encode()
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return path
    for name, data in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def write_lightningdit(folder: Path, latents: Array, flipped: Array, labels: list[int], size: int = 10) -> Path:
    """Write latents [n, c, h, w] and those of mirrored images, `size` in a file; no statistics, which nothing reads."""
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, len(labels), size)):
        part = slice(start, start + size)
        tensors = {"latents": latents[part].copy(), "latents_flip": flipped[part].copy()}
        tensors["labels"] = np.array(labels[part], np.int64)
        about = {"total_size": str(len(labels[part])), "dtype": "torch.float32", "device": "cpu"}
        save_file(tensors, folder / f"latents_rank00_shard{number:03d}.safetensors", metadata=about)
    return folder


def write_fastdit(folder: Path, latents: Array, labels: list[int]) -> Path:
    """Write latents [n, c, h, w], multiplied by 0.18215 in float32 as the tool does."""
    for name in ("imagenet256_features", "imagenet256_labels"):
        (folder / name).mkdir(parents=True)
    for number, (latent, label) in enumerate(zip(latents, labels, strict=True)):
        np.save(folder / f"imagenet256_features/{number}.npy", latent[np.newaxis] * np.float32(0.18215))
        np.save(folder / f"imagenet256_labels/{number}.npy", np.array([label]))
    return folder
