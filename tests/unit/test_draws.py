"""The kernel that draws on a GPU gives the numbers of a CPU: seen through Triton's interpreter and in its code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from image_diffusion.core import draws

INTERPRETED = """
import math
import torch
from image_diffusion.core import draws, streams

assert draws.triton.runtime.interpreter.InterpretedFunction is type(draws._draw)
sample = torch.tensor([0, 3, 2**31 + 5, 2**33 + 7, 2**62])
epoch = torch.tensor([0, 1, 2**31 - 1, 5, 9])
keys = [(0, 0), (2**32 - 1, 2**32 - 1), (5, 2**31), (2**31 + 1, 77)]
cases = [("uniform", 1), ("normal", 1), ("gumbel", 1), ("integers", 1), ("integers", 1000), ("integers", 2**31)]
for count in (0, 1, 2, 15, 1024, 1027):
    for rows in (slice(0), slice(1), slice(5)):
        for key in keys:
            for kind, high in cases:
                given = kind, key, epoch[rows], sample[rows], count, high
                ours, theirs = draws.draw(*given), streams._by_pytorch(*given)
                assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, given
                if kind in ("uniform", "integers"):
                    assert torch.equal(ours, theirs), given
                else:  # float64 logarithms and sines of two libraries, rounded to float32
                    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0)
print("same")
"""


def test_the_kernel_draws_the_numbers_of_a_cpu(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, check=False, capture_output=True, text=True
    )
    assert done.stdout == "same\n", done.stderr


@pytest.mark.parametrize("kind", draws._KINDS)
def test_the_kernel_only_reads_ids_and_writes_numbers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an H100 or H200, of a draw of whole rows: 16 bytes at a time, and nothing spilled from the registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = dict.fromkeys(("high", "count", "lanes", "rows"), "i32")
    types = {"out": "*i64" if kind == "integers" else "*fp32", "epoch": "*i64", "sample": "*i64", "seed": "i64"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 5)}
    source = ASTSource(
        fn=draws._draw,
        signature=types | numbers | {"KIND": "constexpr", "LANES": "constexpr"},
        constexprs={"KIND": draws._KINDS[kind], "LANES": draws._LANES},
        attrs=aligned,
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["ptx"]
    assert code.count(".entry") == 1
    stores = re.findall(r"\bst\.global\.\S+", code)
    assert set(stores) == {"st.global.v2.b64" if kind == "integers" else "st.global.v4.b32"}
    per_thread = draws._LANES // 128  # 4 warps of 32
    assert len(re.findall(r"\bld\.global\.b64", code)) == 2 * per_thread  # an epoch and a sample for each counter
