"""A shell completes the commands and their options, and what it reads for that is made from them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from image_diffusion import completion
from image_diffusion.core import command


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "image-diffusion"
    path.write_text(completion.script())
    return path


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of some words."""
    line = " ".join(f"'{word}'" for word in words)
    asked = (
        f'source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _image_diffusion; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-uc", asked], check=True, capture_output=True, text=True)
    return done.stdout.split()


def test_commands_and_their_options_are_completed(script: Path) -> None:
    assert completed(script, "image-diffusion", "s") == ["sample", "sweep"]
    assert completed(script, "image-diffusion", "") == list(command.COMMANDS)
    assert completed(script, "image-diffusion", "sample", "--se") == ["--seed", "--set"]
    assert {"--config", "--set", "--data"} <= set(completed(script, "image-diffusion", "train", "-"))
    assert completed(script, "image-diffusion", "sample", "") == [], "files are"


def test_every_command_tells_its_options_and_does_nothing(script: Path) -> None:
    for name in command.COMMANDS:
        assert "--help" in completed(script, "image-diffusion", name, "--h")


def test_a_help_text_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.Parser(prog="x", description="One.\n\n    a b\n    c d\n").parse_args(["--help"])
    assert "\n    a b\n    c d\n" in capsys.readouterr().out
