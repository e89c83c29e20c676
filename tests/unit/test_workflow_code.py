"""Digests of the code of stages: they depend on executed code, not on comments and docstrings."""

import re
import shutil
from pathlib import Path

import pytest

from image_diffusion.core import native
from image_diffusion.workflow.code_digest import Modules, package_digest, scripts_digest, stage_digests


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


def digest_of_verb(folder: Path) -> str:
    return Modules(folder).digest(["image_diffusion.verb"])


def verb_digest(folder: Path, **files: str) -> str:
    return digest_of_verb(package(folder, **files))


@pytest.mark.parametrize(
    "part",
    ["def f(): return 1  # why", "def f():\n\n    return 1", "'''Text.'''\ndef f():\n    '''More.'''\n    return 1"],
)
def test_comments_and_docstrings_do_not_change_the_digest(tmp_path: Path, part: str) -> None:
    assert verb_digest(tmp_path / "a") == verb_digest(tmp_path / "b", part=part)


@pytest.mark.parametrize("files", [{"part": "def f(): return 2"}, {"verb": "from image_diffusion import part"}])
def test_code_changes_the_digest(tmp_path: Path, files: dict[str, str]) -> None:
    assert verb_digest(tmp_path / "a") != verb_digest(tmp_path / "b", **files)


def test_a_module_imported_by_name_is_followed(tmp_path: Path) -> None:
    by_name = "from image_diffusion import part"
    before = verb_digest(tmp_path / "a", verb=by_name)
    assert before != verb_digest(tmp_path / "b", verb=by_name, part="def f(): return 2")


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("own/plugin.py", "from .helper import GAIN"),
        ("own/plugin.py", "from . import helper"),
        ("own/plugin.py", "from ..own.helper import GAIN"),
        ("own/plugin/__init__.py", "from ..helper import GAIN"),
    ],
)
def test_a_relative_import_is_followed(tmp_path: Path, module: str, text: str) -> None:
    root = package(tmp_path, verb="import image_diffusion.own.plugin") / "image_diffusion"
    (root / module).parent.mkdir(parents=True)
    (root / "own/__init__.py").touch()
    (root / module).write_text(text)
    (root / "own/helper.py").write_text("GAIN = 1")
    before = digest_of_verb(tmp_path)
    (root / "own/helper.py").write_text("GAIN = 2")
    assert digest_of_verb(tmp_path) != before


def test_syntax_errors_name_the_module(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^.*/image_diffusion/part.py: line 2: .*\. Correct it\.$"):
        verb_digest(tmp_path, part="\nx = (")


def test_unimported_modules_do_not_change_the_digest(tmp_path: Path) -> None:
    (package(tmp_path / "b") / "image_diffusion" / "other.py").write_text("x = 1")
    assert verb_digest(tmp_path / "a") == digest_of_verb(tmp_path / "b")


def with_data(folder: Path, **data: str) -> str:
    """Return the digest of a stage whose module `part` uses compiled code and has a table."""
    package(folder, part='LIBRARY = "fast.compiled"')
    for name, text in data.items():
        (folder / "image_diffusion" / name.replace("_", ".")).write_text(text)
    return digest_of_verb(folder)


@pytest.mark.parametrize("changed", ["fast_c", "part_csv"])
def test_native_code_and_tables_change_the_digest(tmp_path: Path, changed: str) -> None:
    data = {"fast_c": "int f;", "part_csv": "a,b"}
    before = with_data(tmp_path / "a", **data)
    assert before == with_data(tmp_path / "b", **data)
    whole = package_digest(tmp_path / "b")
    assert before != with_data(tmp_path / "b", **(data | {changed: "other"}))
    assert package_digest(tmp_path / "b") != whole
    (tmp_path / "b/image_diffusion" / changed.replace("_", ".")).unlink()
    assert before != digest_of_verb(tmp_path / "b")


def test_compiled_files_and_unused_data_do_not_change_the_digest(tmp_path: Path) -> None:
    before = with_data(tmp_path / "a", fast_c="int f;")
    assert before == with_data(tmp_path / "b", fast_c="int f;", fast_compiled="ELF", other_csv="x", verb_pyc="x")


@pytest.mark.parametrize(
    ("file", "stages"),
    [
        ("core/random/philox.c", {"train", "sample", "evaluate"}),
        ("data/crop/resize.c", {"crop"}),
        ("data/sources/entries.c", {"crop"}),
        ("core/journal/metric_definitions.csv", {"pages"}),
        ("tracking/runs.py", {"track"}),
    ],
)
def test_package_files_change_the_digests_of_their_stages(tmp_path: Path, file: str, stages: set[str]) -> None:
    root = Path(__file__).parents[2]

    def digests(source: Path) -> dict[str, str]:
        return {**stage_digests(source), "pages": scripts_digest(root / "workflow/scripts", source)}

    shutil.copytree(root / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    before = digests(tmp_path / "src")
    with (tmp_path / "src/image_diffusion" / file).open("a") as opened:
        opened.write("\nCHANGED = 1\n")
    after = digests(tmp_path / "src")
    assert stages <= {stage for stage in before if before[stage] != after[stage]} < before.keys()


def test_damaged_or_outdated_compiled_files_are_not_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built, source = tmp_path / "fast.compiled", tmp_path / "fast.c"
    source.write_text("int f;")
    built.write_bytes(b"compiled" * 100)
    assert "is damaged" in str(native.fault_of(built))
    native.seal(built, source)
    whole = built.read_bytes()
    native.seal(built, source)
    assert built.read_bytes() == whole and native.fault_of(built) is None
    for place in range(len(whole)):
        built.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert "is damaged" in str(native.fault_of(built))
        assert native.load(built) is None
    for size in (0, 1, 100, len(whole) - 1):
        built.write_bytes(whole[:size])
        assert "is damaged" in str(native.fault_of(built))
    assert f"note: {built} is damaged and is not used" in capsys.readouterr().err
    built.write_bytes(whole)
    source.write_text("int g;")
    assert "was compiled from another fast.c" in str(native.fault_of(built))
    source.unlink()  # as in an installed package without sources
    assert native.fault_of(built) is None


def test_compiled_files_of_this_checkout_are_sealed() -> None:
    for built in (Path(__file__).parents[2] / "src").rglob("*.compiled"):
        assert native.fault_of(built) is None


RULES = sorted((Path(__file__).parents[2] / "workflow/rules").glob("*.smk"))


def test_rules_of_rerunnable_stages_carry_the_code_digest() -> None:
    again = {"sample", "evaluate", "sweep", "ema", "export", "detect", "reference", "datasheet", "synthesize", "track"}
    commands = []
    for rule in "\n".join(path.read_text() for path in RULES).split("\nrule ")[1:]:
        for stage in again & {*re.findall(r"python -m image_diffusion (\w+) ", rule)}:
            assert f'code=code["{stage}"]' in rule, rule.split(":")[0]
            commands.append(stage)
    assert again == set(commands)


def test_rule_files_have_a_size_limit() -> None:
    lines = [line for path in RULES for line in path.read_text().splitlines()]
    assert len(lines) <= 900 and max(map(len, lines)) <= 120
