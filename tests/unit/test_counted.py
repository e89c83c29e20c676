"""What a step takes of a GPU, counted without one."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from image_diffusion.core.files import read_json
from image_diffusion.core.streams import Streams
from image_diffusion.core.types import Batch, DataSpec
from image_diffusion.doctor import tell_counted
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.discrete import Discrete
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.counted import Counted, counted
from image_diffusion.training.parts import Task

SPEC = DataSpec(channels=4, resolution=32, num_classes=1000)
OBJECTIVE = Denoising(variance="learned_range", loss="hybrid", label_drop_probability=0.1)


class Moments:
    num_samples, shape, dtype = 1, (2, 4, 32, 32), torch.float16
    labels = np.zeros(1, dtype=np.int64)
    beside = None


def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
    mean, std = stored.to(torch.float32).unbind(dim=1)
    return Batch(mean + std * streams.normal("posterior", (4, 32, 32)), {"label": label}, streams)


def task(network: nn.Module) -> Task:
    return Task(network, OBJECTIVE.build(Discrete().build(), SPEC), prepare, Moments())  # type: ignore[arg-type]


def found(size: Any, processes: int = 1, **settings: Any) -> Counted:
    network = partial(DiTConfig(size=size).build, SPEC, learned_variance=True)
    return counted(network, task, TrainConfig.model_validate({"steps": 1, "precision": "bf16", **settings}), processes)


@pytest.mark.parametrize(("batch", "gib"), [(32, 25.9), (64, 37.9), (128, 62.1), (256, 110.3)])
def test_memory_of_dit_xl2(batch: int, gib: float) -> None:
    """As it was counted by other code, for CUDA's rules of bf16."""
    step = found("DiT-XL/2", global_batch=batch)
    assert step.peak / 2**30 == pytest.approx(gib, rel=0.01)
    assert step.fixed / 2**30 == pytest.approx(12.6, rel=0.01)  # weights, gradient, two moments, one average
    assert step.operations == pytest.approx(711.8e9, rel=0.01)


def test_a_process_takes_its_share_in_microbatches() -> None:
    alone = found("DiT-S/2", global_batch=8)
    assert found("DiT-S/2", 4, global_batch=32).peak == alone.peak
    fewer = found("DiT-S/2", global_batch=8, microbatch=2)
    assert alone.fixed == fewer.fixed < fewer.peak < 0.8 * alone.peak
    shared = found("DiT-S/2", 4, global_batch=32, sharding="full")
    assert shared.fixed == pytest.approx(alone.fixed * (1 + 4 / 4) / 5, rel=0.01)


def test_nothing_is_stored() -> None:
    """Weights alone would take 2.5 GiB for each of this."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found("DiT-XL/2", global_batch=1024)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def test_doctor_tells_what_gpus_elsewhere_would_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TrainConfig.model_validate({"steps": 1000, "global_batch": 64, "precision": "bf16"})
    stage = SimpleNamespace(train=config, experiment="mine")
    network = partial(DiTConfig(size="DiT-S/8").build, SPEC, learned_variance=True)
    training: Any = SimpleNamespace(stage=stage, network=network, task=task)
    tell_counted(training, processes=4, tflops=100.0, output=tmp_path / "doctor.json")
    step = found("DiT-S/8", 4, global_batch=64)
    written = read_json(tmp_path / "doctor.json")
    assert written["peak"] == step.peak
    assert written["train_s"] == pytest.approx(step.operations * 64 * 1000 / 4e14)
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("1,000 steps of 64 images, counted for 4 GPUs of 100 TFLOP/s")
    assert told[2].startswith(f"memory  {step.peak / 2**30:.1f} GiB of each GPU")
