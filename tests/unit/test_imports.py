"""Modules that a stage imports at its start, which costs seconds in every job and restart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from image_diffusion.core.process.commands import module_of

ROOT = Path(__file__).resolve().parents[2]

SLOW = [
    "matplotlib",
    "scipy",
    "sklearn",
    "pandas",
    "pyarrow",
    "diffusers",
    "transformers",
    "peft",
    "torchvision",
    "mlflow",
]


@pytest.mark.parametrize("verb", ["configure", "train", "sample", "encode", "track"])
def test_stages_import_no_optional_slow_modules(verb: str) -> None:
    code = f"import sys, {module_of(verb)}; print([name for name in {SLOW} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"


def test_checking_experiments_imports_no_compiler_or_slow_library() -> None:
    code = (
        "import sys; from pathlib import Path; from image_diffusion.experiments.resolve import load_all;"
        "[load_all([path]) for path in Path('config/experiments').glob('*.yaml')];"
        f"print([name for name in {[*SLOW, 'torch._dynamo', 'sympy']} if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert loaded.strip() == "[]"


def test_imported_objects_are_frozen_for_the_garbage_collector() -> None:
    code = "import gc; from image_diffusion.core.process.command import run; run(lambda: print(gc.get_freeze_count()))"
    frozen = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(frozen) > 10_000
