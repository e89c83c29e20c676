"""The GPU kernel and the compiled CPU code draw the same numbers as PyTorch's operations. The GPU kernel is
checked in Triton's interpreter and in its PTX."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from image_diffusion.core.random import philox_cpu, philox_gpu, streams

CASES = """
import torch
from image_diffusion.core.random import streams

sample = torch.tensor([0, 3, 2**31 + 5, 2**33 + 7, 2**62])
epoch = torch.tensor([0, 1, 2**31 - 1, 5, 9])
keys = [(0, 0), (2**32 - 1, 2**32 - 1), (5, 2**31), (2**31 + 1, 77)]
cases = [("uniform", 1), ("normal", 1), ("gumbel", 1), ("integers", 1), ("integers", 1000), ("integers", 2**31)]
for count in (0, 1, 2, 15, 1024, 1027):
    for rows in (slice(0), slice(1), slice(5)):
        for key in keys:
            for kind, high in cases:
                given = kind, key, epoch[rows], sample[rows], count, high
                ours, theirs = draw(*given), streams._by_pytorch(*given)
                assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, given
                if kind in ("uniform", "integers"):
                    assert torch.equal(ours, theirs), given
                else:  # float64 logarithms and sines of two libraries, rounded to float32
                    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0)
"""
INTERPRETED = f"""
from image_diffusion.core.random import philox_gpu

assert philox_gpu.triton.runtime.interpreter.InterpretedFunction is type(philox_gpu._draw)
draw = philox_gpu.draw
{CASES}
print("same")
"""


@pytest.mark.slow
def test_gpu_kernel_matches_pytorch(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, check=False, capture_output=True, text=True
    )
    assert done.stdout == "same\n", done.stderr


@pytest.mark.parametrize("kind", philox_cpu.KINDS)
def test_gpu_kernel_only_loads_ids_and_stores_numbers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for an H100 or H200, a draw of whole rows stores 16 bytes at a time and spills no registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = dict.fromkeys(("high", "count", "lanes", "rows"), "i32")
    types = {"out": "*i64" if kind == "integers" else "*fp32", "epoch": "*i64", "sample": "*i64", "seed": "i64"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 5)}
    source = ASTSource(
        fn=philox_gpu._draw,
        signature=types | numbers | {"KIND": "constexpr", "LANES": "constexpr"},
        constexprs={"KIND": philox_cpu.KINDS[kind], "LANES": philox_gpu._LANES},
        attrs=aligned,
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["ptx"]
    assert code.count(".entry") == 1
    stores = re.findall(r"\bst\.global\.\S+", code)
    assert set(stores) == {"st.global.v2.b64" if kind == "integers" else "st.global.v4.b32"}
    per_thread = philox_gpu._LANES // 128  # 4 warps of 32
    assert len(re.findall(r"\bld\.global\.b64", code)) == 2 * per_thread  # an epoch and a sample for each counter


needs_compiler = pytest.mark.skipif(
    philox_cpu.library() is None, reason="nothing is compiled here: python setup.py build_ext --inplace"
)


@needs_compiler
def test_compiled_cpu_code_matches_pytorch() -> None:
    exec(CASES, {"draw": philox_cpu.draw})


@needs_compiler
def test_ids_of_any_dtype_and_stride_are_read() -> None:
    """Not as raw memory: fewer bits, one epoch for all samples, every other row."""
    ids, epochs = torch.arange(6), torch.full((6,), 3)
    expected = philox_cpu.draw("uniform", (1, 2), epochs, ids, 5)
    for epoch, sample in ((epochs.int(), ids.int()), (epochs[:1], ids), (epochs, torch.arange(12).div(2).int()[::2])):
        assert torch.equal(philox_cpu.draw("uniform", (1, 2), epoch, sample, 5), expected)
    with pytest.raises(RuntimeError, match="expand"):
        philox_cpu.draw("uniform", (1, 2), epochs[:2], ids, 5)


class Operations(TorchDispatchMode):
    """Record the names of the PyTorch operations executed inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@needs_compiler
@pytest.mark.parametrize("kind", ["uniform", "normal", "gumbel"])
def test_cpu_draw_is_a_single_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the noise of a discrete VAE PyTorch alone takes more than a hundred operations."""
    ids = torch.arange(2)
    drawn = streams.Streams(0, torch.zeros_like(ids), ids)
    with Operations() as compiled:
        numbers = getattr(drawn, kind)("noise", (64, 8, 8))
    assert compiled.names == ["aten::empty.memory_format", "aten::view"]
    monkeypatch.setattr(streams, "_by_compiled", lambda: streams._by_pytorch)
    with Operations() as plain:
        theirs = getattr(drawn, kind)("noise", (64, 8, 8))
    assert len(plain.names) > 100
    torch.testing.assert_close(numbers, theirs, rtol=2e-7, atol=0)


def test_pytorch_is_used_without_a_compiled_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "draws.compiled"
    for path in (tmp_path / "nothing", broken, None):
        broken.write_bytes(b"of another machine")
        monkeypatch.setattr(philox_cpu, "_COMPILED", path)
        monkeypatch.setattr(philox_cpu, "library", philox_cpu.library.__wrapped__)
        assert streams._by_compiled.__wrapped__() is streams._by_pytorch
        monkeypatch.undo()
