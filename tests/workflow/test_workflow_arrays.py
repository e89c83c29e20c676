"""A folder of OME-TIFFs through every stage: three systems learn five channels of 12 bits, and samples are counts of
the same channels."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tifffile
import yaml
from projects import ROOT, Project, make_project

from image_diffusion.data.sources.drawn_cells import CHANNELS, CLASSES, drawn

pytestmark = pytest.mark.slow

U_NET = {"channels": 32, "multipliers": [1, 2], "num_res_blocks": 1, "attention_resolutions": [], "num_heads": 2}
NETWORKS = {"iddpm": U_NET, "rin": {"width": 32, "patch": 4, "depth": 1, "num_latents": 8, "latent_width": 32}}

DATA = {
    "name": "cells",
    "source": {"type": "folder", "path": "plates"},
    "resolution": 16,
    "dtype": "uint16",
    "channels": list(CHANNELS),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = make_project(tmp_path_factory.mktemp("arrays") / "project")
    for number in range(96):
        path = made / "plates" / CLASSES[number % 3] / f"{number:03}.ome.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"axes": "CYX", "Channel": {"Name": list(CHANNELS)}}
        tifffile.imwrite(path, drawn(number), ome=True, metadata=metadata, photometric="minisblack")
    (made / "plates" / "resting" / "broken.tif").write_bytes(b"II*\0 and no more")

    def change(experiment: dict[str, Any]) -> None:
        experiment["data"] |= DATA
        experiment["train"] |= {"steps": 4, "flip_probability": 0.5}
        experiment["export"] = {"format": "pipeline"}

    made.edit(change)
    made.run("--config", "experiments=[micro]")
    return made


def test_crops_keep_counts_and_the_manifest_has_the_range(project: Project) -> None:
    crops = project / "results/datasets/cells-16/crops"
    manifest = json.loads((crops / "manifest.json").read_text())
    assert (manifest["shape"], manifest["dtype"]) == ([5, 16, 16], "uint16")
    assert manifest["levels"]["channels"] == list(CHANNELS)
    assert all(80 < low < 110 for low in manifest["levels"]["low"])
    assert all(high > 1000 for high in manifest["levels"]["high"])
    assert (crops / "channels.png").is_file()
    assert "broken.tif,damaged" in (crops / "quarantine.csv").read_text()


def test_samples_are_counts_with_the_names_of_the_channels(project: Project) -> None:
    folder = project / "results/micro/samples"
    samples = np.load(folder / "samples.npz")["arr_0"]
    assert samples.dtype == np.uint16
    assert samples.shape[1:] == (16, 16, 5)
    with tifffile.TiffFile(folder / "samples.ome.tif") as file:
        assert np.array_equal(file.asarray(), samples.transpose(0, 3, 1, 2))
        assert file.ome_metadata is not None
        assert all(f'Name="{name}"' in file.ome_metadata for name in CHANNELS)
    described = json.loads((folder / "samples.json").read_text())
    assert "samples.ome.tif" in described["files"]


def test_channels_are_compared_with_real_ones(project: Project) -> None:
    metrics = json.loads((project / "results/micro/metrics.json").read_text())
    assert {"channel_intensity", "channel_spectrum", "channel_correlation", "inpipe_fd"} <= metrics["metrics"].keys()
    assert metrics["channels"].keys() == set(CHANNELS)


def test_the_exported_pipeline_gives_the_same_counts(project: Project) -> None:
    diffusers = pytest.importorskip("diffusers")
    folder = str(project / "results/micro/diffusers")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)
    sample = yaml.safe_load((project / "results/micro/config/sample.yaml").read_text())["sample"]
    described = json.loads((project / "results/micro/samples/samples.json").read_text())["settings"]
    stored = np.load(project / "results/micro/samples/samples.npz")
    made = pipeline(
        seeds=[0, 1, 2],
        class_labels=stored["arr_1"][:3].tolist(),
        guidance_scale=described["guidance"]["guidance_scale"],
        sampler=described["sampler"],
        batch_size=sample["batch_size"],
        output_type="np",
    ).images
    assert made.dtype == np.uint16
    assert np.abs(made.astype(int) - stored["arr_0"][:3].astype(int)).max() <= 1
    pictures = pipeline(seeds=[0], class_labels=[0], sampler=described["sampler"]).images
    assert (pictures[0].mode, pictures[0].size) == ("RGB", (16, 16))


@pytest.mark.parametrize("system", ["iddpm", "rin"])
def test_other_systems_learn_arrays_too(project: Project, system: str) -> None:
    path = project / "config/experiments/micro.yaml"
    experiment = yaml.safe_load(path.read_text())
    experiment["system"] = {"type": system, "network": NETWORKS[system]}
    path.with_name(f"{system}.yaml").write_text(yaml.safe_dump(experiment))
    project.run(f"results/{system}/metrics.json", "--config", f"experiments=[{system}]")
    assert np.load(project / f"results/{system}/samples/samples.npz")["arr_0"].dtype == np.uint16


def test_trained_codec_encodes_arrays_as_latents_and_tokens(project: Project) -> None:
    names = ("micro_dvae", "micro_latent", "micro_tokens")
    for name in names:
        experiment = yaml.safe_load((ROOT / "tests" / "workflow" / f"{name}.yaml").read_text())
        experiment["data"] |= DATA
        if name == "micro_dvae":
            experiment |= {"export": {"format": "pipeline"}}
        (project / f"config/experiments/{name}.yaml").write_text(yaml.safe_dump(experiment))
    targets = [f"results/{name}/metrics.json" for name in names]
    project.run(*targets, "results/micro_dvae/diffusers", "--config", f"experiments=[{','.join(names)}]")
    for name in ("micro_latent", "micro_tokens"):
        samples = np.load(project / f"results/{name}/samples/samples.npz")["arr_0"]
        assert (samples.dtype, samples.shape[1:]) == (np.uint16, (16, 16, 5))
        assert (project / f"results/{name}/samples/samples.ome.tif").is_file()
    metrics = json.loads((project / "results/micro_dvae/metrics.json").read_text())["metrics"]
    assert 5 < metrics["psnr_soft"]["value"] < 40
    manifest = json.loads((project / "results/datasets/cells-16/micro_dvae/manifest.json").read_text())
    assert manifest["levels"]["channels"] == list(CHANNELS)
    diffusers = pytest.importorskip("diffusers")
    folder = str(project / "results/micro_dvae/diffusers")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)
    images = np.stack([drawn(number)[:, :16, :16].transpose(1, 2, 0) for number in range(2)])
    decoded = pipeline(images, output_type="np").images
    assert (decoded.dtype, decoded.shape) == (np.uint16, images.shape)


def test_array_training_resumes_bit_exactly(project: Project) -> None:
    before, after = project.weights_after_resuming("micro")
    assert after == before


def test_changed_range_reruns_training_but_not_crops(project: Project) -> None:
    shards = project / "results/datasets/cells-16/crops"
    before = {path.name: path.stat().st_mtime_ns for path in shards.glob("*.tar")}
    project.edit(lambda experiment: experiment["data"].update(range=[0, 4095]))
    assert "train" in project.planned("--config", "experiments=[micro]")
    project.run("results/datasets/cells-16/crops/manifest.json")
    assert {path.name: path.stat().st_mtime_ns for path in shards.glob("*.tar")} == before
    assert json.loads((shards / "manifest.json").read_text())["levels"]["high"] == [4095] * 5
