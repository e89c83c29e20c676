"""One graph from images through a discrete VAE to what its latents and its tokens are for, each of them evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from projects import ROOT, Project, make_project

from image_diffusion.data.shards.reader import open_shards

pytestmark = pytest.mark.slow

FROM_THE_CODEC_ON = {"train", "evaluate", "encode", "sample", "track", "report", "summary"}


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project in which `micro_latent`, `micro_tokens`, and the `micro_dvae` that both need, have been made."""
    project = make_project(tmp_path_factory.mktemp("latent") / "project")
    for name in ("micro_dvae", "micro_latent", "micro_tokens"):
        shutil.copy(ROOT / "tests" / "workflow" / f"{name}.yaml", project / "config/experiments")
    config = project / "config/config.yaml"
    config.write_text(config.read_text().replace("experiments: [micro]", "experiments: [micro_latent, micro_tokens]"))
    project.run()
    return project


def test_every_stage_of_both_was_made_and_nothing_is_left_to_do(latent: Project) -> None:
    codec, diffusion = latent / "results/micro_dvae", latent / "results/micro_latent"
    assert (latent / "results/datasets/dots-16/micro_dvae/manifest.json").is_file()
    for path in (codec / "metrics.json", diffusion / "metrics.json", diffusion / "samples/samples.npz"):
        assert path.is_file()
    assert not (codec / "samples").exists()
    assert latent.planned() == set()


def test_the_codec_has_written_its_data_set_as_tokens(latent: Project) -> None:
    tokens = open_shards(latent / "results/datasets/dots-16/micro_dvae-tokens", "all", in_background=True)
    assert tokens.manifest["kind"] == "tokens" and tokens.manifest["num_tokens"] == 8
    assert tokens.shape == (4, 4) and tokens.num_samples == 64 and tokens.classes == ["dark", "light"]
    assert sum(tokens.manifest["token_counts"]) == 2 * 64 * 16


def test_a_transformer_over_those_tokens_makes_images_and_tells_their_bits(latent: Project) -> None:
    made = latent / "results/micro_tokens"
    metrics = json.loads((made / "metrics.json").read_text())
    assert metrics["metrics"]["bits_per_token"]["value"] == pytest.approx(3, abs=0.5), "of 8 tokens, hardly trained"
    assert metrics["protocol"]["bits_per_token"]["how"].startswith("a bound")
    assert metrics["metrics"]["inpipe_fd"]["value"] is not None
    assert np.load(made / "samples/samples.npz")["arr_0"].shape == (12, 16, 16, 3)
    assert (made / "samples/steps.png").is_file() and (made / "tracked.json").is_file()


def test_the_codec_is_judged_by_its_reconstructions(latent: Project) -> None:
    result = json.loads((latent / "results/micro_dvae/metrics.json").read_text())
    for name in ("psnr_hard", "ssim_soft", "inpipe_reconstruction_fd_hard", "codebook_perplexity", "dead_codes"):
        assert result["metrics"][name]["value"] is not None
    model = json.loads((latent / "results/micro_dvae/train/model.json").read_text())
    assert result["protocol"]["weights"] == {"sha256": model["sha256"], "step": 4, "system": "dvae"}


def test_its_page_and_the_report_of_the_graph_show_the_reconstructions(latent: Project, tmp_path: Path) -> None:
    page = (latent / "results/micro_dvae/report/index.html").read_text()
    for shown in ("The worst reconstructions", "Use of the codebook", "inpipe_reconstruction_fd_hard"):
        assert shown in page
    latent.run("--report", str(tmp_path / "report.html"))
    assert "evaluation/worst.png" in (tmp_path / "report.html").read_text()


def test_editing_the_codec_makes_everything_after_it_again(latent: Project) -> None:
    path = latent / "config/experiments/micro_dvae.yaml"
    before = path.read_text()
    try:
        latent.edit(lambda experiment: experiment["train"].update(seed=1), "micro_dvae")
        assert latent.planned() == FROM_THE_CODEC_ON
    finally:
        path.write_text(before)
        latent.planned()
