"""Resources that the Slurm profile derives from the section `slurm` of config.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
import yte

ROOT = Path(__file__).parents[2]
SIGNAL = "--signal=TERM@120"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile reads config/config.yaml of the working folder."""
    (tmp_path / "config").mkdir()
    monkeypatch.chdir(tmp_path)


def profile(slurm: dict[str, Any]) -> dict[str, Any]:
    Path("config/config.yaml").write_text(yaml.safe_dump({"slurm": slurm}))
    found: dict[str, Any] = yte.process_yaml((ROOT / "workflow/profiles/slurm/profile.v9+.yaml").read_text())
    return found


def test_empty_slurm_settings_request_no_resources() -> None:
    found = profile({"gpu_type": "a100", "every_stage": None, "stages": None})
    assert "set-resources" not in found and found["default-resources"] == {"runtime": 60, "mem_mb": 8000}


@pytest.mark.parametrize("empty", [None, ""])
def test_empty_values_request_no_resources(empty: str | None) -> None:
    nothing = {"slurm_extra": empty, "qos": empty}
    found = profile({"every_stage": nothing, "stages": {"train": nothing}})
    assert "set-resources" not in found and found["default-resources"] == {"runtime": 60, "mem_mb": 8000}
    found = profile({"every_stage": {"qos": "long", "mem_mb": 0}, "stages": {"train": nothing}})
    assert found["set-resources"]["train"] == {"qos": "long", "mem_mb": 0}


def test_every_stage_applies_to_all_rules_and_single_stages_override_it() -> None:
    asked = profile({"every_stage": {"mem_mb": 1, "qos": "long"}, "stages": {"crop": {"mem_mb": 2}}})["set-resources"]
    text = "".join(path.read_text() for path in (ROOT / "workflow/rules").glob("*.smk"))
    assert sorted(asked) == sorted(re.findall(r"^(?:use rule \w+ as|rule) (\w+)", text, re.MULTILINE))
    assert asked.pop("crop") == {"mem_mb": 2, "qos": "long"}
    assert all(each == {"mem_mb": 1, "qos": "long"} for each in asked.values())


@pytest.mark.parametrize(
    ("extra", "asked"),
    [("--exclusive", f"--exclusive {SIGNAL}"), ("--signal=USR1@300 -x", "--signal=USR1@300 -x"), (None, None)],
)
def test_training_gets_a_signal_before_its_time_limit(extra: str | None, asked: str | None) -> None:
    given = {"slurm_extra": extra} if extra else {"qos": "long"}
    for slurm in ({"every_stage": given}, {"stages": {"train": given}}):
        assert profile(slurm)["set-resources"]["train"].get("slurm_extra") == asked
    shared = profile({"every_stage": given})["set-resources"]
    assert {each.get("slurm_extra") for each in shared.values()} == {asked}, "a job that stages share has one such text"
    assert f'slurm_extra="{SIGNAL}",' in (ROOT / "workflow/rules/train.smk").read_text()


def test_documented_example_uses_no_option_managed_by_the_plugin() -> None:
    from snakemake_executor_plugin_slurm import validation

    page = (ROOT / "docs/cluster.md").read_text()
    (example,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if block.startswith("slurm:")]
    for resources in profile(yaml.safe_load(example)["slurm"])["set-resources"].values():
        validation.validate_slurm_extra(type("Job", (), {"resources": type("Resources", (), resources)}))
