"""File names read from untrusted files never lead outside a folder."""

from __future__ import annotations

import json
import os
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel

from crops import crops_of_twelve
from image_diffusion.core.files.atomic import digest, read_json, write_json
from image_diffusion.core.files.checksums import check_files
from image_diffusion.core.names import FileName, Sha256, TarName, carried_files, inside
from image_diffusion.data.shards.manifest import Manifest
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.sources.arrow import HuggingFace
from image_diffusion.stages import ema
from image_diffusion.tracking.plan import _carried
from image_diffusion.training.checkpoint.checkpoint import Damaged, read_checkpoint
from image_diffusion.workflow.damage import Damage
from tiny_models import write_model

OUTSIDE = ["/etc/passwd", "../x", "a/../../x", "..", "", ".", "a/..", "x\0y"]
ZEROS = "0" * 64


@pytest.mark.parametrize("name", ["a", "shard-00000.tar", "evaluation/cat and dog.png", "…", "a..b", "a\nb"])
def test_name_inside_the_folder_is_joined(tmp_path: Path, name: str) -> None:
    assert inside(tmp_path, name) == tmp_path / name == inside(tmp_path, name, follow=True)


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
def test_name_outside_the_folder_is_rejected(tmp_path: Path, name: str, follow: bool) -> None:
    with pytest.raises(ValueError, match="is not the name of a file inside") as error:
        inside(tmp_path, name, follow)
    assert "\n" not in str(error.value)


def test_link_outside_the_folder_is_rejected_unless_the_content_is_checked(tmp_path: Path) -> None:
    (folder := tmp_path / "set").mkdir()
    (tmp_path / "secret").write_text("s")
    (folder / "file").symlink_to(tmp_path / "secret")
    (folder / "folder").symlink_to(tmp_path)
    for name in ("file", "folder/secret"):
        with pytest.raises(ValueError, match="is not the name of a file inside"):
            inside(folder, name)
        assert inside(folder, name, follow=True) == folder / name
    (folder / "own").symlink_to("file.real")
    assert inside(folder, "own") == folder / "own"
    (tmp_path / "linked").symlink_to(folder)
    assert inside(tmp_path / "linked", "own")


READ_FROM_OTHERS: tuple[type[BaseModel], ...] = (Manifest,)
"""Models parsed from untrusted JSON; the models that they contain are checked too."""

NO_FILES = {
    *("name", "crops", "precision", "classes", "flags", "crop", "codec", "pairs", "passed_over", "channels"),
    "missing_numbers",
}
"""Text fields that name no file: titles, digests, names of classes, flags, channels and columns, kinds of files,
identities that are only compared."""


def _texts(annotation: Any) -> Iterator[Any]:
    """Yield each string type within a type, with its constraints; skip Literal."""
    if annotation is str:
        yield None
    elif typing.get_origin(annotation) is typing.Annotated and typing.get_args(annotation)[0] is str:
        yield annotation
    elif typing.get_origin(annotation) is not Literal:
        for each in typing.get_args(annotation):
            yield from _texts(each)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for each in typing.get_type_hints(annotation).values():
            yield from _models(each)
    for each in typing.get_args(annotation):
        yield from _models(each)


def test_every_field_that_names_a_file_has_a_file_name_type() -> None:
    models = {model for root in READ_FROM_OTHERS for model in _models(root)}
    assert len(models) == 5
    names = []
    for model in models:
        hints = typing.get_type_hints(model, include_extras=True)
        for field in model.model_fields:
            for text in _texts(hints[field]):
                assert text in (FileName, TarName, Sha256) or field in NO_FILES, f"{model.__name__}.{field}"
                names += [field] * (text in (FileName, TarName))
    assert sorted(names) == ["carried", "file", "files"]


def test_files_carried_by_weights_must_be_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, 1)
    folder = tmp_path / "train"
    model = read_json(folder / "model.json")
    (tmp_path / "secret").write_text("s")
    (folder / "linked").symlink_to(tmp_path / "secret")
    assert carried_files(folder, model) == {}
    for name in ("../secret", str(tmp_path / "secret"), "linked"):
        write_json(folder / "model.json", model | {"carried": {name: ZEROS}})
        with pytest.raises(ValueError, match="should match pattern|is not the name of a file"):
            _carried(folder)
        assert Damage("").fault_of(folder / "model.json") is not None
        monkeypatch.setattr(ema, "weights_at", lambda *_: ({"w": torch.zeros(1)}, read_json(folder / "model.json")))
        out = tmp_path / "out" / "weights.safetensors"
        arguments = [f"--state={folder}/state", f"--weights={folder}/weights.safetensors", f"--output={out}"]
        monkeypatch.setattr(sys, "argv", ["ema", *arguments])
        with pytest.raises(ValueError, match="should match pattern|is not the name of a file"):
            ema.main()
    assert not (tmp_path / "out").exists()


def test_file_carried_by_shards_must_be_in_their_folder_and_intact(tmp_path: Path) -> None:
    folder = crops_of_twelve(tmp_path)
    (tmp_path / "secret").write_text("s")
    sha256 = "043a718774c572bd8a25adbeb1bfcd5c0256ae11cecf9f9c3f925d0e52beaf89"
    manifest = read_json(folder / "manifest.json") | {"carried": {"text.safetensors": sha256}}
    write_json(folder / "manifest.json", manifest)
    (folder / "text.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="is not the name of a file inside"):
        open_shards(folder).carried()
    (folder / "text.safetensors").unlink()
    (folder / "text.safetensors").write_text("another")
    with pytest.raises(ValueError, match=r"text\.safetensors is damaged"):
        open_shards(folder).carried()


def test_shards_may_be_links_as_in_a_download_cache(tmp_path: Path) -> None:
    folder = crops_of_twelve(tmp_path)
    before = open_shards(folder, "all").hold()
    for path in folder.glob("*.tar"):
        path.rename(tmp_path / path.name)
        path.symlink_to(os.path.relpath(tmp_path / path.name, folder))
    assert torch.equal(open_shards(folder, "all").hold()._table, before._table)


def test_compared_files_must_be_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the name of a file inside"):
        check_files(tmp_path, {"/dev/zero": ZEROS}, "")


def test_files_of_a_checkpoint_must_be_in_its_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "step-0000001").mkdir()
    content = {"format": 1, "step": 1, "examples_seen": 1, "reports_due": [], "extra": {}, "identity": {}}
    record = content | {"files": {"../x.safetensors": {"sha256": ZEROS, "bytes": 1}}}
    (folder / "checkpoint.json").write_text(json.dumps(record | {"digest": digest(record)}))
    with pytest.raises(Damaged, match="is not the name of a file inside"):
        read_checkpoint(folder)


def test_splits_of_a_data_set_must_be_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["../elsewhere"]}))
    with pytest.raises(ValueError, match="is not the name of a file inside"):
        HuggingFace(path=str(tmp_path)).files()
