"""Exhausted disks and memory are reported in one line: the file and the free space, or the setting to reduce."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch

from image_diffusion.core.process.commands import COMMANDS, module_of
from image_diffusion.core.process.errors import room_at, sentence_on, writing
from image_diffusion.data.encoded.latents import EncodeConfig
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.training.config import TrainConfig
from warm import warm_python

BEGIN = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from image_diffusion.core.files import atomic, weights
from image_diffusion.core.process import command
from image_diffusion.core.files.image_arrays import stream_samples
from image_diffusion.data.shards.records import write_index, INDEX
from image_diffusion.training.checkpoint.checkpoint import Checkpoint, write_checkpoint
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
"""


def ended(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code as a command whose files are limited to 100 kB."""
    program = folder.with_name(f"{folder.name}.py")
    program.write_text(f"{BEGIN}\ndef main():\n    {code}\ncommand.run(main, 'sample.batch_size')")
    return subprocess.run([warm_python(), program, folder], capture_output=True, text=True, check=False)


WRITES = {
    "bytes": ("atomic.write_bytes(folder / 'file', bytes(1_000_000))", "file"),
    "samples": (
        "stream_samples(folder / 'file', [torch.zeros(100, 3, 64, 64, dtype=torch.uint8)], 100, None)",
        "file",
    ),
    "an index": ("write_index(folder / 'file', [np.zeros(100_000, INDEX)])", "file"),
    "weights": ("weights.save_weights(folder, {'a': torch.zeros(100_000)}, {})", "weights.safetensors"),
    "a checkpoint": (
        "write_checkpoint(folder, Checkpoint(1, 1, False, {'a': {'b': torch.zeros(100_000)}}), {}, {}, lambda: None)",
        ".step-0000001.new.tmp/a.safetensors",
    ),
}


@pytest.mark.parametrize("what", WRITES)
def test_failed_write_names_the_file_and_leaves_nothing(tmp_path: Path, what: str) -> None:
    code, name = WRITES[what]
    done = ended(code, tmp_path)
    line = (
        rf"error: The (disk is full|file exceeds the limit of its size \(ulimit -f\)): {tmp_path / name} could "
        rf"not be written\. [\d.,]+ GB of [\d.,]+ GB are free on the disk of \S+\. Free some space and run .*\n"
    )
    assert done.returncode == 1 and re.fullmatch(line, done.stderr), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_disk_errors_name_the_file_if_known(tmp_path: Path, number: int) -> None:
    with pytest.raises(OSError, match="file") as error, writing(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    told = sentence_on(error.value)
    assert told is not None and f"{tmp_path / 'file'} could not be written. {room_at(tmp_path)}" in told
    told = sentence_on(OSError(number, os.strerror(number)))
    assert told is not None and "Free some space and run the same command again" in told


@pytest.mark.parametrize("code", ["torch.empty(1 << 44)", "np.empty(1 << 44, np.uint8)", "bytes(1 << 46)"])
def test_failed_allocation_names_the_setting_to_reduce(tmp_path: Path, code: str) -> None:
    done = ended(code, tmp_path)
    line = (
        r"error: Out of memory(: [\d.,e+]+ [GT]iB more were requested)?\. Set sample\.batch_size to a smaller number: "
        r"results change by rounding at most\. Raise resources\.memory_mb, on a machine that has as much\.\n"
    )
    assert done.returncode == 1 and re.fullmatch(line, done.stderr), done.stderr


def test_gpu_out_of_memory_names_the_settings_to_reduce() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 8.")
    assert sentence_on(error, ("train.microbatch", "preview.batch_size")) == (
        "Out of GPU memory: 20 GiB more were requested. Set train.microbatch or preview.batch_size to a smaller "
        "number: results change by rounding at most. Use a GPU with more memory."
    )


@pytest.mark.parametrize(("free", "told"), [("1.09 GiB", "use 60.0 of its 79.1 GiB"), ("61.10 GiB", None)])
def test_gpu_out_of_memory_reports_the_use_by_other_programs(free: str, told: str | None) -> None:
    error = torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which {free} is "
        "free. Process 41 has 60.00 GiB memory in use. Including non-PyTorch memory, this process has 18.01 GiB memory "
        "in use. Of the allocated memory 17.20 GiB is allocated by PyTorch, and 20.00 MiB is reserved."
    )
    sentence = sentence_on(error) or ""
    assert (told in sentence) if told else "Other programs" not in sentence


def test_other_errors_are_not_taken_for_exhausted_resources(tmp_path: Path) -> None:
    for error in (RuntimeError("shapes differ"), OSError(errno.EACCES, "no"), ValueError("out of memory")):
        assert sentence_on(error) is None
        with pytest.raises(type(error), match=re.escape(str(error))), writing(tmp_path):
            raise error
    assert "Traceback" in ended("raise RuntimeError('a defect')", tmp_path).stderr


def test_settings_named_by_commands_exist() -> None:
    known: dict[str, set[str]] = {"train": set(TrainConfig.model_fields), "encode": set(EncodeConfig.model_fields)}
    for name in ("preview", "sample", "evaluate"):
        known[name] = set(DiTSystem.sections[name].kind.model_fields)
    named = [key for name in COMMANDS for key in getattr(import_module(module_of(name)), "SMALLER", ())]
    assert len(named) >= 5
    assert [key for key in named if key.split(".")[1] not in known[key.split(".")[0]]] == []
