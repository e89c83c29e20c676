"""Plans: read back as written, and found by the wildcards of a job."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from image_diffusion.experiments.resolve import load_all, write_stages
from image_diffusion.workflow.plans import Plan, Plans, plan_file, read_plan
from plans import a_plan, a_set, plans_of, write_plans

ROOT = Path(__file__).resolve().parents[2]


def test_plan_has_exactly_the_keys_that_configure_writes(tmp_path: Path) -> None:
    for name, (_, experiment) in load_all([ROOT / "config/experiments/demo.yaml"]).items():
        write_stages(name, experiment, tmp_path)
        written = json.loads(plan_file(tmp_path, name).read_text())
        assert list(written) == [field.name for field in fields(Plan)]
        assert asdict(read_plan(plan_file(tmp_path, name))) == written


def test_dependencies_are_read_after_their_experiment(tmp_path: Path) -> None:
    upsampler = a_plan("large", small_images_experiment="small", codec_experiment="codec")
    write_plans(tmp_path, upsampler, a_plan("small", against_experiment="other"), a_plan("codec"), a_plan("other"))
    assert list(Plans.read(tmp_path, ["large", "small"]).by_name) == ["large", "codec", "small", "other"]


def test_experiments_compared_with_each_other_are_read_once(tmp_path: Path) -> None:
    write_plans(tmp_path, a_plan("one", against_experiment="two"), a_plan("two", against_experiment="one"))
    assert list(Plans.read(tmp_path, ["one"]).by_name) == ["one", "two"]


def test_plans_are_found_by_wildcards() -> None:
    plain = a_plan("plain")
    latent = a_plan("latent", codec="vae", codec_experiment="vae")
    paired = a_plan("paired", dataset="faces-32", pairs={"hashed": a_set()})
    plans = plans_of(plain, latent, paired)
    assert plans.plan_for({"experiment": "plain"}) is plain
    assert plans.plan_for({"dataset": "dots-16"}).dataset == "dots-16"
    assert plans.plan_for({"dataset": "dots-16", "codec": "vae"}) is latent
    assert plans.plan_for({"dataset": "faces-32", "pairs": "hashed"}) is paired


def test_discrete_vae_tokens_are_encoded_with_its_own_weights() -> None:
    configs = {"crop": "crop.yaml", "tokens": "tokens.yaml", "train": "train.yaml"}
    plans = plans_of(a_plan("dvae", tokens="dvae-tokens", configs=configs))
    of_tokens = plans.plan_for({"dataset": "dots-16", "codec": "dvae-tokens"})
    assert of_tokens.codec_experiment == "dvae"
    assert of_tokens.configs == {"crop": "crop.yaml", "encode": "tokens.yaml"}


def test_wildcard_patterns_match_only_existing_names() -> None:
    plans = plans_of(a_plan("a.b"), a_plan("c", codec="vae"), a_plan("d", codec="rvq"))
    assert re.fullmatch(plans.pattern("experiment"), "a.b")
    assert not re.fullmatch(plans.pattern("experiment"), "axb")
    assert plans.pattern("codec") == "rvq|vae"
    assert plans.pattern("pairs") == "none"


@pytest.mark.parametrize("text", ["", "[]", '{"experiment": "one"}'])
def test_a_damaged_plan_is_named(tmp_path: Path, text: str) -> None:
    path = plan_file(tmp_path, "one")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        Plans.read(tmp_path, ["one"])
