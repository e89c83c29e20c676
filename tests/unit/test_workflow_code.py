"""The digest of a stage's code: what runs counts, how it is worded does not."""

import re
from pathlib import Path

import pytest

from image_diffusion.workflow.code import code_digest


def package(folder: Path, **files: str) -> Path:
    for name, text in {
        "__init__": "",
        "verb": "from image_diffusion.part import f",
        "part": "def f(): return 1",
    }.items():
        path = folder / "image_diffusion" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, text))
    return folder


def verb_digest(folder: Path, **files: str) -> str:
    return code_digest("image_diffusion.verb", package(folder, **files))


@pytest.mark.parametrize(
    "part",
    ["def f(): return 1  # why", "def f():\n\n    return 1", "'''Text.'''\ndef f():\n    '''More.'''\n    return 1"],
)
def test_wording_does_not_count(tmp_path: Path, part: str) -> None:
    assert verb_digest(tmp_path / "a") == verb_digest(tmp_path / "b", part=part)


@pytest.mark.parametrize("files", [{"part": "def f(): return 2"}, {"verb": "from image_diffusion import part"}])
def test_what_runs_counts(tmp_path: Path, files: dict[str, str]) -> None:
    assert verb_digest(tmp_path / "a") != verb_digest(tmp_path / "b", **files)


def test_a_module_imported_by_name_is_followed(tmp_path: Path) -> None:
    by_name = "from image_diffusion import part"
    before = verb_digest(tmp_path / "a", verb=by_name)
    assert before != verb_digest(tmp_path / "b", verb=by_name, part="def f(): return 2")


def test_a_module_nobody_imports_does_not_count(tmp_path: Path) -> None:
    (package(tmp_path / "b") / "image_diffusion" / "other.py").write_text("x = 1")
    assert verb_digest(tmp_path / "a") == code_digest("image_diffusion.verb", tmp_path / "b")


def test_a_missing_module_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no module"):
        code_digest("image_diffusion.nothing", package(tmp_path))


RULES = sorted((Path(__file__).parents[2] / "workflow/rules").glob("*.smk"))


def test_every_rule_of_a_stage_that_is_made_again_carries_the_digest_of_its_code() -> None:
    again = {"sample", "evaluate", "sweep", "ema", "export", "detect", "reference", "datasheet"}
    commands = []
    for rule in "\n".join(path.read_text() for path in RULES).split("\nrule ")[1:]:
        for stage in again & {*re.findall(r"python -m image_diffusion\.(\w+) ", rule)}:
            assert f'code=code["{stage}"]' in rule, rule.split(":")[0]
            commands.append(stage)
    assert again == set(commands)
