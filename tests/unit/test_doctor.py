"""Cost forecast of a training: computed from measurements, and rejected if memory or disk are too small."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, get_args

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from image_diffusion.core.random.streams import Streams
from image_diffusion.core.texts import duration
from image_diffusion.core.types import Batch, DataSpec, Losses, Network, Objective
from image_diffusion.nn.precision import Precision
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.flow import Flow
from image_diffusion.samplers import Sampler
from image_diffusion.samplers.ancestral import Ddim
from image_diffusion.samplers.base import SamplerConfig
from image_diffusion.samplers.guidance import Guidance
from image_diffusion.stages.doctor import check, cut_short, decoding_seconds, sampling_seconds, steps_in_words
from image_diffusion.systems.codec.autoencoder import AutoencoderSystem
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.forecast import Deadline, Forecast, forecast, memory_limit
from image_diffusion.training.parallel.world import World
from image_diffusion.training.trainer import Task


class Points:
    num_samples, shape, dtype = 40, (3,), torch.float32
    labels = np.zeros(40, dtype=np.int64)

    beside: ClassVar[dict[str, Any]] = {}

    def gather(self, indices: Any, flip: Any = None, out: Any = None) -> Tensor:
        return torch.ones(len(indices), 3)

    def gather_joined(self, indices: Any, flip: Any = None) -> tuple[Tensor, ...]:
        return ()


def found(
    sampled_in: Sequence[Precision] = (),
    until: Deadline | None = None,
    before: Callable[[int], object] = lambda step: None,
    per_machine: int | None = None,
    **changes: Any,
) -> Forecast:
    """Forecast of a small training. before: called with the step at the start of each loss."""

    class Squares(Objective):
        def __call__(self, network: Any, batch: Batch) -> Losses:
            before(batch.step)
            return Losses(network(batch.x).square().sum(1), {})

    def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
        return Batch(stored, {}, streams)

    def build(world: World) -> Task:
        return Task(nn.Linear(3, 1000), Squares(), prepare, Points(), Points())  # type: ignore[arg-type]

    settings = {"steps": 1000, "global_batch": 8, "checkpoint": {"every_steps": 10}, "validation_samples": 20}
    return forecast(build, TrainConfig.model_validate(settings | changes), 2, 2, sampled_in, until, per_machine)


def test_steps_validations_and_checkpoints_are_counted() -> None:
    usual = found(validate_every_steps=300)
    assert usual.parameters == 4000
    assert usual.train_s == pytest.approx(1000 * usual.step_s)
    assert usual.validation_s == pytest.approx(4 * 20 * usual.evaluation_s / 2)
    assert usual.total_s == usual.train_s + usual.validation_s > usual.train_s
    assert usual.images_per_second == pytest.approx(8 / usual.step_s)
    assert usual.tflops == pytest.approx(4 * 2 * 2 * 3000 / usual.step_s / 1e12)  # two products: x needs no gradient
    assert usual.checkpoint_gib * 2**30 == pytest.approx(4 * 4 * 4000, rel=0.01)  # weights, average, two moments
    assert usual.disk_gib == pytest.approx(3 * usual.checkpoint_gib + 4 * 4000 / 2**30, rel=0.01)
    keeps = found(checkpoint={"every_steps": 10, "keep_every": 100}, validate_every_steps=None)
    assert keeps.disk_gib == pytest.approx(usual.disk_gib + 10 * usual.checkpoint_gib, rel=0.01)
    assert keeps.validation_s == 0
    weights = 4 * 4000 / 2**30
    assert found(keep_raw=True).disk_gib == pytest.approx(usual.disk_gib + weights, rel=0.01)
    frozen = found(freeze=["weight"], init_from="weights")
    assert frozen.parameters == 1000
    assert frozen.disk_gib == pytest.approx(3 * frozen.checkpoint_gib + weights, rel=0.01)
    assert 0 < usual.memory_gib < 64


def test_memory_sharded_to_other_processes_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("image_diffusion.training.forecast._memory", lambda device, checkpoint: 2**30)
    none, optimizer, full = (found(sharding=sharding).memory_gib * 2**30 for sharding in ("none", "optimizer", "full"))
    assert none - full == pytest.approx(4 * 4 * 4000 / 2, rel=0.01)  # of the gradient, two moments, an average
    assert none - optimizer == pytest.approx(4 * (3 - 2) * 4000 / 2, rel=0.01)  # slices of weights and sum are more


def test_memory_replicated_on_each_machine_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("image_diffusion.training.forecast._memory", lambda device, checkpoint: 2**30)
    assert found(sharding="machine", per_machine=1).memory_gib == 1.0 > found(sharding="machine").memory_gib


def test_measurement_stops_at_its_deadline_and_reports_what_is_missing() -> None:
    def slow(step: int) -> None:
        time.sleep(0.2)

    started = time.perf_counter()
    first = found(["tf32"], Deadline(0.1), slow)
    assert time.perf_counter() - started < 2.0
    assert (first.measured_steps, first.not_measured) == (1, ("the training's", "tf32"))
    assert 0.2 <= first.step_s < 1.0
    assert first.evaluation_s == first.passes_s["tf32"] == pytest.approx(first.step_s / 4 / 3)  # 4 images per process
    told = "1 of 2 steps were timed; a third of a step stands for a pass of the network (the training's, tf32)"
    assert cut_short(first, 2, not_decoded=True) == (
        f"note    measuring stopped after 20 s: {told}; decoding is left out"
    )
    whole = found(["tf32"])
    assert (whole.measured_steps, whole.not_measured) == (2, ())
    assert cut_short(whole, 2, not_decoded=False) is None


def test_memory_is_the_peak_not_the_final_value() -> None:
    def large(step: int) -> None:
        torch.ones(100 * 2**20)  # 400 MiB, for a moment

    before = psutil.Process().memory_info().rss
    assert found(before=large).memory_gib * 2**30 > before + 380 * 2**20


def test_step_is_measured_at_start_middle_and_end_of_training() -> None:
    """A discriminator, for example, starts at a later step, and must fit into memory as well."""
    steps: list[int] = []

    def more(step: int) -> None:
        steps.append(step)
        if step > 400:
            torch.ones(3, 1000) @ torch.ones(1000, 500)

    late = found(before=more)
    assert steps[:5] == [1, 1, 1000, 501, 502]  # the second call counts the operations
    usual = found()
    assert late.tflops * late.step_s == pytest.approx(usual.tflops * usual.step_s + 4 * 2 * 3 * 1000 * 500 / 1e12)


def test_sampling_time_is_one_pass_per_step_and_two_with_guidance() -> None:
    one = found(validate_every_steps=None, sampled_in=["tf32", "bf16"])
    settings = SampleConfig(num_samples=10, sampler=Ddim(num_steps=7), guidance=Guidance(guidance_scale=2.0))
    sampling = DiTSystem().sampling()
    seconds = sampling_seconds(settings, sampling, one, decode_s=0.5)
    assert seconds == pytest.approx(10 * (7 * 2 * one.passes_s["tf32"] + 0.5))
    coarse = settings.model_copy(update={"precision": "bf16"})
    assert sampling_seconds(coarse, sampling, one, 0.0) == pytest.approx(10 * 7 * 2 * one.passes_s["bf16"])
    assert sampling_seconds(settings, AutoencoderSystem().sampling(), one, 0.5) == 0
    assert sampling_seconds(None, sampling, one, 0.5) == 0


def test_decoding_is_timed_for_one_image() -> None:
    class Slow:
        def decode(self, x: Tensor) -> Tensor:
            assert x.shape[1:] == (2, 4, 4)
            time.sleep(0.02 * len(x))
            return x

    stage = SimpleNamespace(system=DiTSystem())
    training = SimpleNamespace(spec=DataSpec(channels=2, resolution=4), decoder=Slow, stage=stage)
    assert decoding_seconds(training, Deadline(9)) == pytest.approx(0.02, rel=0.5)  # type: ignore[arg-type]
    assert decoding_seconds(training, Deadline(0)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", get_args(get_args(Sampler)[0]))
@pytest.mark.parametrize("interval", [None, (0.5, 3.0)])
def test_predicted_network_calls_match_each_sampler(
    kind: type[SamplerConfig], interval: tuple[float, float] | None
) -> None:
    """For one image: the sum of the network's batch sizes over all calls."""
    settings = SampleConfig(sampler=kind(num_steps=9), guidance=Guidance(guidance_scale=2.0, interval=interval))
    plain = {"variance": "fixed_small", "loss": "simple"}
    system, rows = DiTSystem(process=Discrete(num_timesteps=50), objective=plain), 0
    if settings.sampler.needs_average_velocity:  # guided in training only
        settings = settings.model_copy(update={"guidance": Guidance()})
        system = DiTSystem(process=Flow(), objective={"type": "mean_flow"})

    def network(x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        nonlocal rows
        rows += len(x)
        return torch.zeros_like(x)

    grid = settings.sampler.grid(system.process)

    def guide(plain: Network) -> Network:
        return settings.guidance.build(plain, {"label": torch.tensor(3)}, grid)

    streams = Streams(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    denoiser = system.reading.denoiser(network, grid, {"label": torch.tensor([1])}, guide)
    settings.sampler(denoiser, grid, torch.randn(1, 4, 4, 4), streams)
    assert system.sampling().num_evaluations(settings) == pytest.approx(rows, abs=1)


def test_memory_limit_is_the_request_or_the_machine_total() -> None:
    assert memory_limit(device_memory=False, requested_mb=2048) == 2
    assert memory_limit(device_memory=False, requested_mb=None) == psutil.virtual_memory().total / 2**30


def test_what_does_not_fit_is_refused() -> None:
    check(1.0, 2.0, 1.0, 2.0)
    with pytest.raises(ValueError, match=r"needs 3\.00 GiB of memory, but 2\.00 GiB may be used\. Make train\.micro"):
        check(3.0, 2.0, 1.0, 2.0)
    with pytest.raises(ValueError, match=r"writes 3\.00 GiB, but 2\.00 GiB are free\. Make room"):
        check(1.0, 2.0, 3.0, 2.0)


def test_out_of_memory_in_strict_mode_names_strict_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(step: int) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    with pytest.raises(ValueError, match=r"A step of 6 examples a process .*Make train\.strict_chunk smaller"):
        found(before=full, deterministic="strict", strict_chunk=6)
    with pytest.raises(ValueError, match=r"Make train\.strict_chunk smaller"):
        check(3.0, 2.0, 1.0, 2.0, "train.strict_chunk")


def test_durations_are_formatted_with_units() -> None:
    assert [duration(s) for s in (4.21, 90, 9000, 200_000)] == ["4.21 s", "1.5 min", "2.5 h", "2.3 days"]


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found()
    assert not list(tmp_path.iterdir())


def test_early_stopping_is_shown_as_steps_at_most() -> None:
    words = [
        steps_in_words(TrainConfig.model_validate({"steps": 2000, "patience": patience})) for patience in (None, 1)
    ]
    assert words == ["2,000 steps", "2,000 steps at most"]
