"""Workflow from images, or from external embeddings, to an evaluated prior."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import yaml
from projects import ROOT, Project, make_project

from image_diffusion.data.shards.reader import open_shards

pytestmark = pytest.mark.slow

STAGES = {"crop", "datasheet", "detect", "embed", "train", "evaluate"}


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Project with a finished `micro_prior`. Tests restore what they change."""
    project = make_project(tmp_path_factory.mktemp("prior") / "project")
    shutil.copy(ROOT / "tests" / "workflow" / "micro_prior.yaml", project / "config/experiments")
    config = project / "config/config.yaml"
    config.write_text(config.read_text().replace("experiments: [micro]", "experiments: [micro_prior]"))
    project.run()
    return project


def test_prior_results_exist_and_nothing_is_left_to_do(prior: Project) -> None:
    pairs = open_shards(prior / "results/datasets/dots-16/pairs-hashed", "all", in_background=True)
    assert pairs.num_samples == 64 and pairs.shape == (7, 128)
    assert (prior / "results/micro_prior/train/raw/weights.safetensors").is_file()
    assert not (prior / "results/micro_prior/samples").exists()
    assert prior.planned() == set()


def test_prior_is_evaluated_by_losses_and_similarities(prior: Project) -> None:
    result = json.loads((prior / "results/micro_prior/metrics.json").read_text())
    names = {"loss_train", "loss_validation", "loss_test", "loss_online_test", "baseline_similarity"}
    names |= {f"similarity_with_{what}_{n}" for what in ("image", "text", "unrelated_caption") for n in (2, 3)}
    assert names <= result["metrics"].keys() and result["protocol"]["split"] == "test"
    assert result["protocol"]["weights"]["system"] == "prior"
    page = (prior / "results/micro_prior/report/index.html").read_text()
    assert "similarity_with_image_3" in page and "Predicted and real image embeddings" in page


def test_edit_reruns_its_stage_and_later_ones(prior: Project) -> None:
    path = prior / "config/experiments/micro_prior.yaml"
    before = path.read_text()
    try:
        prior.edit(lambda experiment: experiment["prediction"].update(num_steps=[4]), "micro_prior")
        assert prior.planned() & STAGES == {"evaluate"}
        prior.edit(lambda experiment: experiment["pairs"].update(num_tokens=3), "micro_prior")
        assert prior.planned() & STAGES == {"embed", "train", "evaluate"}
    finally:
        path.write_text(before)
        prior.planned()


def test_captions_that_are_edited_in_place_are_embedded_again(prior: Project) -> None:
    path = prior / "config/experiments/micro_prior.yaml"
    before, table = path.read_text(), prior / "captions.csv"
    images = sorted((prior / "images").rglob("*.png"))
    rows = [f"{image.relative_to(prior / 'images')},number {image.stem}" for image in images]
    table.write_text("\n".join(["path,caption", *rows]) + "\n")
    captions = {"type": "table", "path": "captions.csv"}
    target = "results/datasets/dots-16/pairs-hashed/manifest.json"
    try:
        prior.edit(lambda experiment: experiment["pairs"].update(captions=captions), "micro_prior")
        prior.run(target)
        first = (prior / target).read_bytes()
        assert prior.planned(target) == set()
        table.write_text(table.read_text().replace("number 000", "zero"))
        assert prior.planned() & STAGES == {"embed", "train", "evaluate"}
        prior.run(target)
        assert (prior / target).read_bytes() != first
    finally:
        path.write_text(before)
        table.unlink()
        prior.run(target)


def test_external_embeddings_need_no_crops_and_rerun_when_changed(prior: Project) -> None:
    folder, rows = prior / "embeddings", np.random.default_rng(0).standard_normal((64, 8)).astype("float32")
    path, before = (
        prior / "config/experiments/micro_prior.yaml",
        (prior / "config/experiments/micro_prior.yaml").read_text(),
    )
    for name in ("img_emb", "text_emb"):
        (folder / name).mkdir(parents=True)
        np.save(folder / name / f"{name}_0.npy", rows)
    source = {"type": "embeddings", "path": str(folder), "metadata": None}
    try:
        prior.edit(
            lambda experiment: experiment.update(
                data={"name": "others", "source": source, "resolution": 1, "num_shards": 2}, pairs={"type": "files"}
            ),
            "micro_prior",
        )
        target = "results/datasets/others-1/pairs-files/manifest.json"
        assert prior.planned() & STAGES == {"embed", "train", "evaluate"}
        prior.run(target)
        assert prior.planned(target) == set()
        np.save(folder / "img_emb" / "img_emb_0.npy", rows + 1)
        assert prior.planned(target) == {"embed"}
        np.save(folder / "img_emb" / "img_emb_0.npy", rows[:63])
        done = prior.snakemake("--dry-run", target)
        assert done.returncode and "img_emb_0.npy has 63 rows but" in done.stdout
    finally:
        path.write_text(before)
        shutil.rmtree(folder)
        prior.planned()


def test_decoder_draws_images_from_embeddings_of_prior(prior: Project) -> None:
    """Workflow from captions to enlarged images; an edit of the prior reruns only the later stages."""
    path, decoder, upsampler = (
        prior / f"config/experiments/{name}.yaml" for name in ("micro_prior", "decoder", "upsampler")
    )
    before = path.read_text()
    sections = yaml.safe_load((ROOT / "tests/workflow/micro.yaml").read_text())
    sections["system"] |= {"condition": {"type": "embedding"}}
    sections |= {"pairs": yaml.safe_load(before)["pairs"]}
    sections["train"] |= {"steps": 2, "flip_probability": 0}
    sections["sample"] |= {"num_samples": 4, "embeddings": {"experiment": "micro_prior"}}
    sections["evaluate"] = {**sections.get("evaluate", {}), "neighbours": 2}
    decoder.write_text(yaml.safe_dump(sections))
    drawn = "results/decoder/samples/samples.npz", "--config", "experiments=[decoder]"
    larger = yaml.safe_load((ROOT / "tests/workflow/micro.yaml").read_text())
    network = {"channels": 32, "multipliers": [1], "num_res_blocks": 1, "attention_resolutions": []}
    larger["system"] = {"type": "iddpm", "network": network}
    larger["system"]["condition"] = [{"type": "label"}, {"type": "image", "from": "self", "shrink": 2}]
    larger["data"]["resolution"], larger["train"]["steps"] = 32, 2
    larger["sample"] |= {"num_samples": 4, "small_images": {"experiment": "decoder"}}
    larger["evaluate"] = sections["evaluate"]
    upsampler.write_text(yaml.safe_dump(larger))
    enlarged = "results/upsampler/samples/samples.npz", "--config", "experiments=[upsampler]"
    made = {"prompts": ["a photo of a light", "a photo of a dark"], "num_samples": 4, "num_candidates": 1}
    made |= {"batch_size": 2, "embeddings_per_job": 2, "sampler": {"type": "ddim", "num_steps": 2}}

    def rules(target: tuple[str, ...] = drawn) -> list[str]:
        out = prior.snakemake("--dry-run", *target).stdout
        return sorted(re.findall(r"^rule (\w+):", out, re.MULTILINE))

    try:
        prior.edit(lambda experiment: experiment.update(sample=made), "micro_prior")
        assert rules() == ["sample", "sample_embeddings", "sample_part", "sample_part", "train"]
        one_graph = ["crop", "sample", "sample", "sample_embeddings", "sample_part", "sample_part", "train", "train"]
        assert rules(enlarged) == one_graph
        prior.run(*enlarged)
        with np.load(prior / enlarged[0]) as samples:
            assert samples["arr_0"].shape == (4, 32, 32, 3) and samples["arr_1"].tolist() == [1, 0, 1, 0]
        with np.load(prior / drawn[0]) as samples:
            assert samples["arr_0"].shape == (4, 16, 16, 3) and samples["arr_1"].tolist() == [1, 0, 1, 0]
        folder, images = prior / "results/micro_prior/samples", (prior / drawn[0]).read_bytes()
        assert rules() == [] and not list(folder.glob("part-*"))
        embeddings = (folder / "img_emb/img_emb_0.npy").read_bytes()
        (folder / "img_emb/img_emb_0.npy").write_bytes(embeddings[:-1] + b"\x01")
        prior.run(*drawn)
        assert (folder / "img_emb/img_emb_0.npy").read_bytes() == embeddings
        assert (prior / drawn[0]).read_bytes() == images
        prior.edit(lambda experiment: experiment["sample"].update(first_seed=3), "micro_prior")
        assert rules() == ["sample", "sample_embeddings", "sample_part", "sample_part"]
        assert rules(enlarged) == ["sample", "sample", "sample_embeddings", "sample_part", "sample_part"]
        prior.edit(lambda experiment: experiment["train"].update(steps=9), "micro_prior")
        assert rules() == ["sample", "sample_embeddings", "sample_part", "sample_part", "train"]
        prior.edit(lambda experiment: experiment["sample"].pop("embeddings"), "decoder")
        assert rules() == ["sample"], "real embeddings need no prior"
    finally:
        path.write_text(before)
        decoder.unlink()
        upsampler.unlink()
        prior.planned()
