"""What a stage loads before its first line of work: seconds, for every job and every restart."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = ["matplotlib", "scipy", "sklearn", "pandas", "pyarrow", "diffusers", "transformers", "torchvision", "mlflow"]


@pytest.mark.parametrize("verb", ["configure", "train", "sample", "encode", "track", "follow"])
def test_a_stage_loads_nothing_that_it_may_not_need(verb: str) -> None:
    code = f"import sys, image_diffusion.{verb}; print([name for name in {SLOW} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"
