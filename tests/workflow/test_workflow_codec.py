"""Workflow from images through a discrete VAE to models of its latents and of its tokens, each of them evaluated."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from projects import ROOT, Project, make_project

from image_diffusion.core.files.atomic import read_json, write_json
from image_diffusion.data.shards.reader import open_shards

pytestmark = pytest.mark.slow

FROM_THE_CODEC_ON = {"train", "evaluate", "encode", "sample", "track", "report", "summary"}


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Project with finished `micro_latent`, `micro_tokens`, and the `micro_dvae` that both need."""
    project = make_project(tmp_path_factory.mktemp("latent") / "project")
    for name in ("micro_dvae", "micro_latent", "micro_tokens"):
        shutil.copy(ROOT / "tests" / "workflow" / f"{name}.yaml", project / "config/experiments")
    config = project / "config/config.yaml"
    config.write_text(config.read_text().replace("experiments: [micro]", "experiments: [micro_latent, micro_tokens]"))
    project.run()
    return project


def test_codec_and_diffusion_results_exist_and_nothing_is_left_to_do(latent: Project) -> None:
    codec, diffusion = latent / "results/micro_dvae", latent / "results/micro_latent"
    assert (latent / "results/datasets/dots-16/micro_dvae/manifest.json").is_file()
    for path in (codec / "metrics.json", diffusion / "metrics.json", diffusion / "samples/samples.npz"):
        assert path.is_file()
    assert not (codec / "samples").exists()
    assert latent.planned() == set()


def test_codec_encodes_data_set_as_tokens(latent: Project) -> None:
    tokens = open_shards(latent / "results/datasets/dots-16/micro_dvae-tokens", "all", in_background=True)
    assert tokens.manifest["kind"] == "tokens" and tokens.manifest["num_tokens"] == 8
    assert tokens.shape == (4, 4) and tokens.num_samples == 64 and tokens.classes == ["dark", "light"]
    assert sum(tokens.manifest["token_counts"]) == 2 * 64 * 16


def test_token_transformer_draws_images_and_reports_bits_per_token(latent: Project) -> None:
    made = latent / "results/micro_tokens"
    metrics = json.loads((made / "metrics.json").read_text())
    assert metrics["metrics"]["bits_per_token"]["value"] == pytest.approx(3, abs=0.5), "of 8 tokens, hardly trained"
    assert metrics["protocol"]["bits_per_token"]["how"].startswith("a bound")
    assert metrics["metrics"]["inpipe_fd"]["value"] is not None
    assert np.load(made / "samples/samples.npz")["arr_0"].shape == (12, 16, 16, 3)
    assert (made / "samples/steps.png").is_file() and (made / "tracked.json").is_file()


def test_codec_is_evaluated_by_its_reconstructions(latent: Project) -> None:
    result = json.loads((latent / "results/micro_dvae/metrics.json").read_text())
    for name in ("psnr_hard", "ssim_soft", "inpipe_reconstruction_fd_hard", "codebook_perplexity", "dead_codes"):
        assert result["metrics"][name]["value"] is not None
    model = json.loads((latent / "results/micro_dvae/train/model.json").read_text())
    assert result["protocol"]["weights"] == {"sha256": model["sha256"], "step": 4, "system": "dvae"}


def test_codec_page_and_snakemake_report_show_reconstructions(latent: Project, tmp_path: Path) -> None:
    page = (latent / "results/micro_dvae/report/index.html").read_text()
    for shown in ("The worst reconstructions", "Use of the codebook", "inpipe_reconstruction_fd_hard"):
        assert shown in page
    latent.run("--report", str(tmp_path / "report.html"))
    assert "evaluation/worst.png" in (tmp_path / "report.html").read_text()


def test_editing_codec_reruns_all_later_stages(latent: Project) -> None:
    path = latent / "config/experiments/micro_dvae.yaml"
    before = path.read_text()
    try:
        latent.edit(lambda experiment: experiment["train"].update(seed=1), "micro_dvae")
        assert latent.planned() == FROM_THE_CODEC_ON
    finally:
        path.write_text(before)
        latent.planned()


def test_latents_of_an_earlier_codec_are_encoded_again_whatever_their_time(latent: Project) -> None:
    """As if the codec had been trained again while a clock was wrong."""
    for name in ("micro_dvae", "micro_dvae-tokens"):
        path = latent / f"results/datasets/dots-16/{name}/manifest.json"
        before, times = path.read_bytes(), path.stat()
        try:
            manifest = read_json(path)
            write_json(path, manifest | {"codec": manifest["codec"] | {"sha256": "0" * 64}})
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            planned = latent.snakemake("--dry-run").stdout
            assert "is made again: it was encoded with other weights than those in results/micro_dvae/train" in planned
            assert "rule encode:" in planned
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert latent.planned() == set()
