"""Statistics of a reference set from a file, in the layouts that ADM and EDM publish."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from image_diffusion.core.files.atomic import atomic_write
from image_diffusion.core.files.npz import read_arrays
from image_diffusion.metrics.distances.moments import Gaussian

_KEYS = {"fd": ("mu", "sigma"), "spatial_fd": ("mu_s", "sigma_s")}


def is_statistics(path: Path) -> bool:
    """Return True if an .npz holds statistics (mu, sigma), not only images. Raises ValueError for other files."""
    if path.suffix == ".pkl":
        raise ValueError(
            f"{path} is a pickle, which can run code and is not read. "
            "Write its mu and sigma into an .npz with numpy.savez."
        )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return "mu" in arrays and "sigma" in arrays
    except FileNotFoundError:
        raise ValueError(f"The reference {path} does not exist.") from None
    except (zipfile.BadZipFile, ValueError, EOFError, TypeError) as error:
        raise ValueError(f"The reference {path} is not a whole .npz file: {error}. Write it again.") from None


def read_statistics(path: Path, detector_sha256: str) -> dict[str, Gaussian]:
    """Read {"fd": Gaussian} and, if the file has mu_s and sigma_s as in ADM's files, {"spatial_fd": Gaussian}.

    Raises ValueError if mu and sigma do not fit, or the file names a detector other than the one in use.
    """
    arrays = read_arrays(path)
    written_by = str(arrays["detector"]) if "detector" in arrays else detector_sha256
    if written_by != detector_sha256:
        raise ValueError(
            f"The statistics in {path} were measured with detector {written_by[:12]}, not {detector_sha256[:12]}. "
            "Measure them again with this detector."
        )
    count = int(arrays["count"]) if "count" in arrays else None
    gaussians = {}
    for name, (mean_key, covariance_key) in _KEYS.items():
        if mean_key not in arrays:
            continue
        mean, covariance = (arrays[key].astype(np.float64) for key in (mean_key, covariance_key))
        if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
            raise ValueError(
                f"{path}: {mean_key} {list(mean.shape)} and {covariance_key} {list(covariance.shape)} do not fit. "
                "Expected [D] and [D, D]."
            )
        if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
            raise ValueError(f"{path}: {mean_key} or {covariance_key} holds numbers that are not finite.")
        gaussians[name] = Gaussian(torch.from_numpy(mean), torch.from_numpy(covariance), count)
    return gaussians


def write_statistics(path: Path, statistics: Mapping[str, Gaussian], detector_sha256: str) -> None:
    """Write statistics for `read_statistics`, in the layout of EDM and ADM: mu and sigma of "fd", mu_s and sigma_s of
    "spatial_fd", the number of images, the detector's digest."""
    arrays: dict[str, np.ndarray | np.generic] = {
        "count": np.int64(statistics["fd"].count or 0),
        "detector": np.str_(detector_sha256),
    }
    for name, gaussian in statistics.items():
        mean_key, covariance_key = _KEYS[name]
        arrays |= {mean_key: gaussian.mean.numpy(), covariance_key: gaussian.covariance.numpy()}
    with atomic_write(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
