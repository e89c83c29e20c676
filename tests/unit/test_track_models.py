"""Logged models are self-contained: they make images with the code and weights of their own folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import setuptools
import torch
from PIL import Image

from image_diffusion.core.config.base import dump, parse, read_yaml, to_yaml
from image_diffusion.core.files.atomic import read_json, write_json
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.journal.writer import Journal
from image_diffusion.core.types import DataSpec
from image_diffusion.experiments.experiment import load_sections
from image_diffusion.systems.codec.autoencoder import AutoencoderSystem
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.sampling import SamplingInputs
from image_diffusion.text_encoders.hashing import HashedText
from image_diffusion.tracking.plan import FinalWeights, Request
from image_diffusion.tracking.pyfunc import _load_pyfunc, usage
from image_diffusion.training.load_model import load_codec, load_model
from tiny_models import write_model


def write_pyfunc(*arguments: Any) -> None:
    """Call the function of the same name, imported late since its module imports MLflow."""
    from image_diffusion.tracking.models import write_pyfunc as write

    write(*arguments)


USE = """
import sys, mlflow, numpy, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
numpy.save(sys.argv[2], model.predict(pandas.DataFrame({"seed": [5, 6, 7], "label": [0, 1, 1]})))
print(sys.modules["image_diffusion"].__file__)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The content of `data/model` of a logged model: a weights folder and its sampling configuration."""
    write_model(tmp_path, step=10)
    (tmp_path / "config" / "sample.yaml").rename(tmp_path / "train" / "sample.yaml")
    return tmp_path / "train"


def test_logged_model_does_not_depend_on_earlier_imports(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """setuptools vendors packages, whose versions MLflow took for installed once setuptools was imported."""

    files = {path.name: path for path in folder.iterdir()}
    taken = usage(folder)
    assert taken is not None
    vendored = Path(setuptools.__file__).parent / "_vendor"
    weights = FinalWeights("key", "tiny", "run", 10, 0, {}, files)
    written = []
    for name, others in (("plain", []), ("after", [str(vendored)])):
        monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(vendored)] + others)
        write_pyfunc(tmp_path / name, "m-1", weights, taken)
        assert (str(vendored) in sys.path) == bool(others)
        made = (each for each in (tmp_path / name).rglob("*") if each.is_file())
        written.append({each.relative_to(tmp_path / name): each.read_bytes() for each in made})
    assert list(vendored.glob("wheel-*.dist-info")) and written[0] == written[1]


def test_logged_model_loads_in_mlflow_with_its_own_code(folder: Path, tmp_path: Path) -> None:
    import pandas

    files = {path.name: path for path in folder.iterdir()}
    taken = usage(folder)
    assert taken is not None
    write_pyfunc(tmp_path / "model", "m-1", FinalWeights("key", "tiny", "run", 10, 0, {}, files), taken)
    (tmp_path / "model/data").mkdir(exist_ok=True)
    folder.rename(tmp_path / "model/data/model")
    command = [sys.executable, "-c", USE, str(tmp_path / "model"), str(tmp_path / "images.npy")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "model/code/image_diffusion.zip" in done.stdout.splitlines()[-1]
    images = np.load(tmp_path / "images.npy")
    assert (images.shape, images.dtype) == ((3, 8, 8, 3), np.uint8)
    here = _load_pyfunc(str(tmp_path / "model/data/model"))
    rows = pandas.DataFrame({"seed": [7, 5], "label": [1, 0]})
    np.testing.assert_allclose(here.predict(rows), images[[2, 0]], atol=1)  # type: ignore[arg-type]
    assert not [path for path in (tmp_path / "model").rglob("*") if path.suffix in (".pkl", ".pt", ".bin")]


def test_seeds_without_labels_get_the_labels_of_the_sample_stage(folder: Path) -> None:
    import pandas

    conditioned(folder, [{"type": "label"}], {})
    model = _load_pyfunc(str(folder))
    given = model.predict(pandas.DataFrame({"seed": [0, 1], "label": [0, 1]}))  # type: ignore[arg-type]
    assert np.array_equal(model.predict(pandas.DataFrame({"seed": [0, 1]})), given)  # type: ignore[arg-type]
    alone = model.predict(pandas.DataFrame({"seed": [1]}))  # type: ignore[arg-type]
    np.testing.assert_allclose(alone[0], given[1], atol=1)
    assert np.array_equal(asked(folder, seed=[1, -1]), asked(folder, seed=[1, -1], label=[1, 1]))
    sample = folder / "sample.yaml"
    chosen = read_yaml(sample)["sample"] | {"first_seed": 5, "labels": [1, 0, 0]}
    sample.write_text(to_yaml({"sample": chosen}))
    assert np.array_equal(asked(folder, seed=[6, 5]), asked(folder, seed=[6, 5], label=[0, 1]))


def test_unknown_labels_are_rejected(folder: Path) -> None:
    import pandas

    with pytest.raises(ValueError, match="names the class 2, but the classes are 0 to 1: dark, light"):
        _load_pyfunc(str(folder)).predict(pandas.DataFrame({"seed": [0], "label": [2]}))  # type: ignore[arg-type]


def test_empty_tables_and_rows_without_class_are_rejected(folder: Path) -> None:
    import pandas

    model = _load_pyfunc(str(folder))
    with pytest.raises(ValueError, match="The table has no rows. Give a row for each image."):
        model.predict(pandas.DataFrame({"seed": np.array([], np.int64)}))  # type: ignore[arg-type]
    for column in ({"class": ["light", None]}, {"label": [1, np.nan]}):
        with pytest.raises(ValueError, match=r"Row 1 has no class. Name one in each row, or leave out the column '"):
            model.predict(pandas.DataFrame({"seed": [0, 1], **column}))  # type: ignore[arg-type]


def test_classes_are_given_by_number_or_name_but_not_both(folder: Path) -> None:
    import pandas

    model = _load_pyfunc(str(folder))
    numbered = model.predict(pandas.DataFrame({"seed": [3, 4], "label": [1, 0]}))  # type: ignore[arg-type]
    named = pandas.DataFrame({"seed": [3, 4], "class": ["light", "dark"]})
    assert np.array_equal(model.predict(named), numbered)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Give one of the two"):
        model.predict(named.assign(label=[1, 0]))  # type: ignore[arg-type]
    taken = usage(folder)
    assert taken is not None and [each.name for each in taken.signature.inputs] == ["seed", "label", "class"]


def test_text_conditioned_model_takes_prompts(folder: Path) -> None:
    import pandas

    system = DiTSystem.model_validate(
        {"condition": {"type": "text"}, "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}}
    )
    encoder = HashedText().build(torch.device("cpu"), 4)
    spec = DataSpec(channels=3, resolution=8, conditions={"text": (5, HashedText().dim)})
    pairs = {"encoder": dump(HashedText()), "num_tokens": 4, "text": encoder.identity}
    described = read_json(folder / "model.json") | {"system": dump(system), "spec": dump(spec), "pairs": pairs}
    network = system.build_network(spec)
    torch.nn.init.normal_(network.final_layer.linear.weight)
    save_weights(folder, network.state_dict(), described)
    taken = usage(folder)
    assert taken is not None and [(each.name, each.required) for each in taken.signature.inputs] == [
        ("seed", True),
        ("prompt", True),
    ]
    model = _load_pyfunc(str(folder))
    both = model.predict(pandas.DataFrame({"seed": [1, 1], "prompt": ["a dog", "a cat"]}))  # type: ignore[arg-type]
    alone = model.predict(pandas.DataFrame({"seed": [1], "prompt": ["a cat"]}))  # type: ignore[arg-type]
    np.testing.assert_allclose(both[1], alone[0], atol=1)


NUMBERS: dict[str, Any] = {"columns": ["age", "dose"], "ranges": [[20, 60], [0, 1]]}
MASKS: dict[str, Any] = {
    "labels": {"ground": 0, "cell": 1000},
    "crop": {"resolution": 8, "channels": 1, "crop": {"type": "resize"}},
}


def conditioned(folder: Path, condition: list[dict[str, Any]], shapes: dict[str, Any], pairs: Any = None) -> None:
    """Replace the model in a folder by a random one with other conditions."""
    network = {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}
    system = DiTSystem.model_validate({"condition": condition, "network": network})
    classes = 2 if {"type": "label"} in condition else 0
    spec = DataSpec(channels=3, resolution=8, num_classes=classes, conditions=shapes)
    described = read_json(folder / "model.json") | {"system": dump(system), "spec": dump(spec)}
    built = system.build_network(spec)
    for parameter in built.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    save_weights(folder, built.state_dict(), described | ({"pairs": pairs} if pairs is not None else {}))


def asked(folder: Path, **columns: list[Any]) -> Any:
    """Return the images of a request."""
    import pandas

    return _load_pyfunc(str(folder)).predict(pandas.DataFrame(columns))  # type: ignore[arg-type]


def sampled(folder: Path, **settings: Any) -> Any:
    """Return the images that `sample` makes, [N, H, W, C]."""
    model = load_model(folder)
    config = load_sections(folder / "sample.yaml", ["sample"], model.system.sections)["sample"]
    config = parse(type(config), dump(config) | {"num_samples": 2} | settings, "sample")
    inputs = SamplingInputs(model, config, load_codec(model, None, torch.device("cpu")), load_model)
    return model.system.sampling().maker(inputs)(slice(0, 2)).permute(0, 2, 3, 1).numpy()


def signature(folder: Path) -> list[tuple[str, str, bool]]:
    taken = usage(folder)
    assert taken is not None
    return [(each.name, each.type.name, each.required) for each in taken.signature.inputs]


def test_number_conditioned_model_takes_a_column_per_number(folder: Path) -> None:
    conditioned(folder, [{"type": "label"}, {"type": "numbers"}], {"numbers": [2, 2]}, NUMBERS)
    assert signature(folder) == [
        ("seed", "long", True),
        ("label", "long", False),
        ("class", "string", False),
        ("age", "double", False),
        ("dose", "double", False),
    ]
    rows = [{"label": "light", "age": 30, "dose": 0.5}, {"label": "dark", "age": 50}]
    named = asked(folder, seed=[0, 1], age=[30.0, 50.0], dose=[0.5, float("nan")], **{"class": ["light", "dark"]})
    assert np.array_equal(named, sampled(folder, conditions=rows)) and named.dtype == np.uint8
    without = asked(folder, seed=[1], age=[50.0], **{"class": ["dark"]})
    np.testing.assert_allclose(without[0], named[1], atol=1)
    other = asked(folder, seed=[0, 1], age=[40.0, 50.0], dose=[0.5, float("nan")], **{"class": ["light", "dark"]})
    assert not np.array_equal(other[0], named[0]) and np.array_equal(other[1], named[1])
    with pytest.raises(ValueError, match=r"^The request: age of row 1: 'old' is no number. Give a number, or null.$"):
        asked(folder, seed=[0, 1], age=[30, "old"])
    for others in ({"Age": [30.0, 50.0]}, {}):
        with pytest.raises(ValueError, match=r"^The request has no column of numbers. Add some of age, dose.$"):
            asked(folder, seed=[0, 1], **others)


def test_number_columns_with_reserved_names_are_rejected(folder: Path) -> None:
    pairs = {"columns": ["seed", "dose"], "ranges": [[0, 1], [0, 1]]}
    conditioned(folder, [{"type": "numbers"}], {"numbers": [2, 2]}, pairs)
    with pytest.raises(ValueError, match="^pairs.columns names seed, which is another column of a request$"):
        usage(folder)


def png(pixels: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


@pytest.mark.parametrize(("degradation", "channels"), [({"shrink": 2}, 3), ({"gray": True}, 1), ({"hole": {}}, 4)])
def test_image_conditioned_model_takes_image_files(
    folder: Path, tmp_path: Path, degradation: dict[str, Any], channels: int
) -> None:
    side = 4 if "shrink" in degradation else 8
    condition = [{"type": "label"}, {"type": "image", "from": "self", **degradation}]
    conditioned(folder, condition, {"image": [channels, side, side]})
    assert signature(folder)[-1] == ("image", "binary", True)
    pixels = np.random.default_rng(0).integers(0, 256, (2, side, side, channels), dtype=np.uint8)
    files = [png(image.squeeze(2) if channels == 1 else image) for image in pixels]
    images = asked(folder, seed=[0, 1], image=files, label=[1, 0])
    np.savez(tmp_path / "asked.npz", pixels, np.array([1, 0]))
    inputs = {"num_samples": 2, "small_images": str(tmp_path / "asked.npz")}
    assert np.array_equal(images, sampled(folder, **inputs))
    for name, file in zip("ab", files, strict=True):
        (tmp_path / f"{name}.png").write_bytes(file)
    rows = [{"image": str(tmp_path / "a.png"), "label": 1}, {"image": str(tmp_path / "b.png"), "label": 0}]
    assert np.array_equal(images, sampled(folder, conditions=rows))
    assert not np.array_equal(images, asked(folder, seed=[0, 1], image=files[::-1], label=[1, 0]))


def test_invalid_image_files_give_one_line_errors(folder: Path) -> None:
    conditioned(folder, [{"type": "image", "from": "self", "shrink": 2}], {"image": [3, 4, 4]})
    good, noise = (png(np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)) for side in (4, 32))
    for files, message in (
        (
            [good, png(np.zeros((6, 5, 3), np.uint8))],
            "image of row 1 has 5 x 6 pixels, but the network takes images of",
        ),
        ([noise[: len(noise) // 2], good], "image of row 0 cannot be read: damaged"),
        ([good, b"GIF89a"], "image of row 1 cannot be read: "),
        ([good, None], "1 of 2 rows name an image. Give one to each row"),
        (["/etc/hostname", good], "image of row 0 is of type str. Give the bytes of an image file."),
    ):
        with pytest.raises(ValueError, match=f"^The request: {message}") as caught:
            asked(folder, seed=[0, 1], image=files)
        assert len(str(caught.value).splitlines()) == 1
    conditioned(folder, [{"type": "image", "from": "self", "hole": {}}], {"image": [5, 8, 8]})
    with pytest.raises(ValueError, match="images of 5 channels, and pictures have 1 to 4"):
        usage(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classes", "masks"])
def test_served_model_answers_its_input_example(folder: Path, tmp_path: Path, kind: str) -> None:
    import pandas

    if kind == "masks":
        condition = [{"type": "label"}, {"type": "image", "from": "pairs"}]
        conditioned(folder, condition, {"image": [2, 8, 8]}, MASKS)
    files, taken = {path.name: path for path in folder.iterdir()}, usage(folder)
    assert taken is not None
    write_pyfunc(tmp_path / "model", "m-1", FinalWeights("key", "tiny", "run", 10, 0, {}, files), taken)
    (tmp_path / "model/data").mkdir(exist_ok=True)
    folder.rename(tmp_path / "model/data/model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", "model", "--env-manager", "local"]
    with (tmp_path / "served.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--port", port], cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until = time.monotonic() + 240
        while server.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5)
                break
            time.sleep(0.3)
        asked = (tmp_path / "model/serving_input_example.json").read_bytes()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations", asked, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            images = np.array(json.load(answer)["predictions"])
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    here = _load_pyfunc(str(tmp_path / "model/data/model"))
    columns: dict[str, Any] = {"seed": [0, 1], "class": ["dark", "light"]}
    if kind == "masks":  # the first label and the last one
        columns["image"] = [png(np.full((8, 8), value, np.uint16)) for value in (0, 1000)]
    expected = here.predict(pandas.DataFrame(columns))  # type: ignore[arg-type]
    assert images.shape == (2, 8, 8, 3)
    np.testing.assert_allclose(images, expected, atol=1)


def test_a_codec_takes_images(tmp_path: Path) -> None:
    network = {"block_channels": [4, 8], "latent_channels": 2, "norm_groups": 2}
    system = AutoencoderSystem.model_validate({"network": network})
    spec = DataSpec(channels=3, resolution=8)
    described = {"system": dump(system), "spec": dump(spec), "classes": [], "step": 1, "examples_seen": 1, "codec": {}}
    save_weights(tmp_path, system.build_network(spec).state_dict(), described)
    images = torch.arange(2 * 8 * 8 * 3).reshape(2, 8, 8, 3).to(torch.uint8).numpy()
    decoded = _load_pyfunc(str(tmp_path)).predict(images)  # type: ignore[arg-type]
    assert (decoded.shape, decoded.dtype) == (images.shape, np.uint8)
    taken = usage(tmp_path)
    assert taken is not None and taken.signature.inputs.inputs[0].shape == (-1, 8, 8, 3)


def test_swept_checkpoints_are_logged_as_models_with_their_metrics(folder: Path, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    from image_diffusion.tracking.tracker import Tracker

    for step in (3, 5, 10):  # 3: left by an earlier sweep
        shutil.copytree(folder, tmp_path / f"sweep/checkpoint/{step}/weights")
        content = read_json(folder / "model.json") | {"step": step, "sha256": f"{step:064d}"}
        write_json(tmp_path / f"sweep/checkpoint/{step}/weights/model.json", content)
    with Journal.open(tmp_path / "journal", "train") as journal:
        journal.metrics({"loss": 1.0}, 10)
    with Journal.open(tmp_path / "journal", "sweep-checkpoint") as journal:
        for step in (5, 10):
            journal.metrics({"fid": 100.0 / step}, step)
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for _ in range(2):
        Tracker(store, "x").send(Request(tmp_path))
    found = MlflowClient(store).search_logged_models(["1"])
    swept = {each.name: each for each in found if "step" in each.name}
    assert set(swept) == {f"{tmp_path.name} at step {step}" for step in (5, 10)} and len(found) == 3
    for step in (5, 10):
        model = swept[f"{tmp_path.name} at step {step}"]
        assert [(each.key, each.value, each.step) for each in model.metrics] == [("fid", 100.0 / step, step)]
        assert model.tags["step"] == str(step) and model.tags["pyfunc"] == "yes"


def test_the_same_code_gives_the_same_zip(tmp_path: Path) -> None:
    from image_diffusion.tracking.models import zip_package  # imports MLflow

    for name in ("a.zip", "b.zip"):
        zip_package(tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert "image_diffusion/tracking/pyfunc.py" in zipfile.ZipFile(tmp_path / "a.zip").namelist()
