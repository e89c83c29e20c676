"""Latents as extract_features.py of chuanyangjin/fast-DiT writes them: two folders of `.npy` files.

    imagenet256_features/0.npy, …    float32 [1, c, h, w], drawn once and multiplied with 0.18215
    imagenet256_labels/0.npy, …      int64 [1]

Each image was mirrored by chance before it was encoded, once and for all, so there are no mirror images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from image_diffusion.data.sources.folder import Folder
from image_diffusion.data.sources.latents import Encoded, LatentSource, array_in, listed, sha256_of
from image_diffusion.data.sources.listing import Found, Item, Listing

_FEATURES, _LABELS = "_features", "_labels"


class FastDiTLatents(LatentSource):
    """Latents that were drawn once and scaled, without mirror images. There are no images to crop."""

    type: Literal["fastdit_latents"] = "fastdit_latents"
    """Latents as fast-DiT's extract_features.py writes them; path: the folder with NAME_features and NAME_labels."""
    scale: float = Field(0.18215, gt=0)
    """What they were multiplied with, which is divided out: the codec scales them itself."""

    def found(self) -> Iterator[Found]:
        for folder in self._folders():
            for each in Folder(path=str(Path(self.path, folder)), classes="none").found():
                yield replace(each, folder=f"{folder}/{each.folder}")

    def settings(self) -> dict[str, object]:
        return {"scale": self.scale}

    def listing(self) -> Listing:
        folders = self._folders()
        features, labels = (
            {item.name for item in Folder(path=str(Path(self.path, folder)), classes="none").listing().items}
            for folder in folders
        )
        if odd := sorted(features ^ labels):
            has, lacks = folders if odd[0] in features else reversed(folders)
            raise ValueError(
                f"{self.path}/{has}/{odd[0]} is there, but {self.path}/{lacks}/{odd[0]} is missing. Copy both."
            )
        return listed(
            {name: self._label(Path(self.path, folders[1], name)) for name in features},
            {name: (folders[0], name) for name in features},
            self.path,
        )

    def encoded(self, item: Item) -> Encoded:
        path = Path(self.path, *map(str, item.address))
        data = _bytes(path)
        array = array_in(data, str(path))
        if array.ndim != 4 or len(array) != 1 or array.dtype.kind != "f":
            raise ValueError(f"{path} holds {array.dtype} {list(array.shape)}, not one latent, floats [1, c, h, w].")
        return Encoded([array.astype("float64") / self.scale], sha256_of(data))

    def _folders(self) -> tuple[str, str]:
        """The names of both folders."""
        found = sorted(path.name for path in Path(self.path).glob(f"*{_FEATURES}") if path.is_dir())
        if len(found) != 1:
            raise ValueError(
                f"data.source.path: {self.path} holds {len(found)} folders NAME{_FEATURES}, not one. Give the folder "
                f"in which NAME{_FEATURES} and NAME{_LABELS} lie."
            )
        labels = found[0].removesuffix(_FEATURES) + _LABELS
        if not Path(self.path, labels).is_dir():
            raise ValueError(f"data.source.path: {self.path}/{labels} is missing. Copy it beside {found[0]}.")
        return found[0], labels

    def _label(self, path: Path) -> int:
        array = array_in(_bytes(path), str(path))
        if array.shape != (1,) or array.dtype.kind not in "iu":
            raise ValueError(f"{path} holds {array.dtype} {list(array.shape)}, not one class, an integer [1].")
        return int(array[0])


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}. Copy it again.") from None
