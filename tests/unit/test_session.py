"""Training runs: resuming gives the same numbers as one run; weights, journal, previews and early stopping."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

from image_diffusion.core.config.base import to_yaml
from image_diffusion.core.files.atomic import write_bytes
from image_diffusion.core.files.checksums import damaged, read_listing
from image_diffusion.core.files.weights import read_model, read_weights
from image_diffusion.core.journal.reader import read_journal
from image_diffusion.core.process.errors import Stopped
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import Batch, Losses, Objective
from image_diffusion.stages import ema
from image_diffusion.training.checkpoint.averaged_weights import weights_in
from image_diffusion.training.checkpoint.stop_signal import SIGNALS
from image_diffusion.training.config import TrainConfig
from image_diffusion.training.load_model import check_trained_by
from image_diffusion.training.session import run
from image_diffusion.training.trainer import Task

MODEL = {
    "system": {"type": "linear"},
    "spec": {},
    "codec": {"config": {"type": "rgb"}},
    "classes": ["a", "b"],
    "untrained": ["b"],
}


class Samples:
    """Forty random points, with the interface of shards."""

    num_samples, shape, dtype = 40, (3, 1, 1), torch.float32
    labels = np.zeros(40, dtype=np.int64)

    beside: ClassVar[dict[str, Any]] = {}

    def gather(self, indices: Any, flip: Any = None, out: Any = None) -> Tensor:
        x = torch.randn(40, 3, 1, 1, generator=torch.Generator().manual_seed(0))
        return x[torch.from_numpy(indices)]

    def gather_joined(self, indices: Any, flip: Any = None) -> tuple[Tensor, ...]:
        return ()

    def verified(self) -> None: ...


class Plane(nn.Module):
    """Predicts the sum of the channels; made of convolutions, so that it has a memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.ModuleList([nn.Conv2d(3, 8, 1)]), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.last(torch.nn.functional.silu(self.hidden[0](x)))


class SumOfChannels(Objective):
    def __call__(self, network: Any, batch: Batch) -> Losses:
        t = batch.streams.uniform("timestep")
        x = batch.x + 0.1 * batch.streams.normal("noise", (3, 1, 1))
        loss = (network(x, t).float() - batch.x.sum(1, keepdim=True)).square().flatten(1).mean(1)
        return Losses(loss, {}, t)


objective = SumOfChannels()


def prepare(stored: Tensor, label: Tensor, streams: Streams) -> Batch:
    return Batch(stored, {}, streams)


def start(
    folder: Path, steps: int = 12, task: dict[str, Any] | None = None, split: str = "", **changes: Any
) -> dict[str, Tensor]:
    settings = {
        "steps": steps,
        "global_batch": 8,
        "optimizer": {"type": "adamw", "lr": 0.03},
        "ema": {"type": "exponential", "rates": [0.5]},
        "log_every_steps": 2,
        "checkpoint": {"every_steps": 5},
        "validate_every_steps": 4,
    } | changes
    parts = {"validation": Samples()} | (task or {})
    build = lambda world: Task(Plane(), objective, prepare, Samples(), **parts)  # type: ignore[arg-type]  # noqa: E731
    config, output = TrainConfig.model_validate(settings), folder / "train"
    run(build, config, MODEL, {"digest": "x"}, output, folder / "journal", split=split)
    return read_weights(folder / "train")[0]


def points(folder: Path) -> list[tuple[str, int, float]]:
    history = read_journal(folder / "journal" / "train")
    assert history is not None
    return sorted((p.key, p.step, p.value) for p in history.points if not p.key.startswith(("speed/", "system/")))


@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"deterministic": "strict"}, {"channels_last": True},
     {"ema": {"type": "power"}}, {"microbatch": 3, "grad_clip": 0.5}, {"weights": "raw"},
     {"schedule": {"type": "exponential", "decay": 0.5, "every_steps": 5}}, {"optimizer": {"type": "muon", "lr": 0.03}},
     {"optimizer": {"type": "muon", "lr": 0.03}, "precision": "fp16"}, {"optimizer": {"type": "lion", "lr": 0.03}},
     {"optimizer": {"type": "lion", "lr": 0.03}, "schedule": {"type": "power", "constant_steps": 3}}],
)  # fmt: skip
def test_stopped_training_resumes_bit_exactly(tmp_path: Path, changes: dict[str, Any]) -> None:
    once = start(tmp_path / "once", **changes)
    start(tmp_path / "twice", steps=7, **changes)
    twice = start(tmp_path / "twice", **changes)
    assert once.keys() == twice.keys()
    assert all(torch.equal(tensor, twice[name]) for name, tensor in once.items())
    extra = {point for point in points(tmp_path / "twice") if point[1] == 7}  # the last step of the first run
    assert [point for point in points(tmp_path / "twice") if point[1] < 7] == [
        point for point in points(tmp_path / "once") if point[1] < 7
    ]
    assert {key for key, _, _ in extra} >= {"train/loss", "validation/loss"}


def test_the_loss_falls(tmp_path: Path) -> None:
    start(tmp_path, steps=150)
    losses = [value for key, _, value in points(tmp_path) if key == "train/loss"]
    assert sum(losses[-5:]) < 0.25 * sum(losses[:5])
    validation = [value for key, _, value in points(tmp_path) if key == "validation/loss"]
    assert validation[-1] < 0.25 * validation[0]


def test_finished_run_only_rewrites_its_weights(tmp_path: Path) -> None:
    start(tmp_path)
    before = (tmp_path / "train/weights.safetensors").read_bytes()
    (tmp_path / "train/weights.safetensors").unlink()
    start(tmp_path)
    assert (tmp_path / "train/weights.safetensors").read_bytes() == before


def test_truncated_journal_is_reported_in_the_next_attempt(tmp_path: Path) -> None:
    start(tmp_path)
    journal = tmp_path / "journal/train/attempt-0001.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:5]))
    (tmp_path / "train/weights.safetensors").unlink()
    start(tmp_path)
    history = read_journal(journal.parent)
    assert history is not None and history.status == "finished" and len(history.damaged) == 1
    journal.write_text("".join(lines))
    history = read_journal(journal.parent)
    assert history is not None and history.damaged == []


def test_written_weights_record_their_training(tmp_path: Path) -> None:
    start(tmp_path, steps=12)
    _, model = read_weights(tmp_path / "train")
    assert {**MODEL, "format": 1, "step": 12, "examples_seen": 96, "ema": "ema-0.5"}.items() <= model.items()
    start(tmp_path, steps=12, weights="raw")
    assert read_weights(tmp_path / "train")[1]["ema"] is None


def test_validation_uses_the_weights_to_be_written(tmp_path: Path) -> None:
    """With `weights: raw` the weights as trained, whatever averages are kept."""
    for name, rates in (("kept", [0.5]), ("none", [])):
        start(tmp_path / name, weights="raw", ema={"type": "exponential", "rates": rates})
    assert points(tmp_path / "kept") == points(tmp_path / "none")


def test_any_average_can_be_written_and_reordering_averages_keeps_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rates(*values: float) -> dict[str, Any]:
        return {"type": "exponential", "rates": values, "warmup": None}

    first = start(tmp_path, ema=rates(0.5, 0.9999))
    assert "warning" not in capsys.readouterr().err
    capsys.readouterr()
    named = start(tmp_path, ema=rates(0.5, 0.9999), weights=0.9999)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(
        "warning: After 12 steps 100% of the initial weights are still in the average ema-0.9999."
    )
    assert read_weights(tmp_path / "train")[1]["ema"] == "ema-0.9999"
    turned = start(tmp_path, ema=rates(0.9999, 0.5))
    assert len([path for path in (tmp_path / "train/state").iterdir() if path.is_dir()]) == 1  # no second run
    assert all(torch.equal(named[name], turned[name]) for name in named)
    assert not torch.equal(first["hidden.0.weight"], named["hidden.0.weight"])
    raw = start(tmp_path, ema=rates(0.5, 0.9999), weights="raw")
    for average, expected in (("0.5", first), ("ema-0.9999", named), ("raw", raw)):
        for weights in ([], ["--weights", str(tmp_path / "train/weights.safetensors")]):
            command = ["ema", "--state", str(tmp_path / "train/state"), "--average", average, *weights]
            monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "out/weights.safetensors")])
            ema.main()
            tensors, model = read_weights(tmp_path / "out")
            assert all(torch.equal(tensors[name], expected[name]) for name in expected), average
            assert {**MODEL, "step": 12, "examples_seen": 96}.items() <= model.items()
            assert model["ema"] == (None if average == "raw" else f"ema-{average.removeprefix('ema-')}")


def test_weights_can_be_taken_from_checkpoints_of_a_running_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "whole", steps=5)
    start(tmp_path / "on", checkpoint={"every_steps": 5, "keep_every": 5})
    (tmp_path / "on/train/weights.safetensors").unlink()  # as if it were still running
    (tmp_path / "on/train/model.json").unlink()
    state, output = tmp_path / "on/train/state", tmp_path / "out/weights.safetensors"
    monkeypatch.setattr(sys, "argv", ["ema", "--state", str(state), "--step", "5", "--output", str(output)])
    ema.main()
    (tensors, model), (expected, described) = read_weights(tmp_path / "out"), read_weights(tmp_path / "whole/train")
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert model["fingerprint"] == next(path.name for path in state.iterdir() if path.is_dir())
    assert {key: value for key, value in described.items() if key != "train"} == model
    for arguments, message in (
        (["--step", "6"], "holds no checkpoint of step 6. Steps that are kept: 5, 10, 12."),
        (["--average", "0.3"], "There is no average ema-0.3 at step 12. Kept are: ema-0.5."),
        (["--average", "first"], "'first' is not an average. Use the number of a rate or a width, or raw."),
        (["--width", "0.1"], "--width needs --weights"),
        (["--width", "0.1", "--step", "5"], "Leave out --step and --average."),
        (["--state", str(tmp_path)], "holds no checkpoint. Give the folder of one run"),
    ):
        monkeypatch.setattr(sys, "argv", ["ema", "--state", str(state), "--output", str(output), *arguments])
        with pytest.raises(ValueError, match=re.escape(message)):
            ema.main()


def test_configuration_selects_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among several runs without final weights; its configured average is written."""
    settings = {"ema": {"type": "exponential", "rates": [0.9, 0.5]}, "weights": 0.5}
    wanted = start(tmp_path, **settings)
    train = read_model(tmp_path / "train")["train"]
    start(tmp_path, seed=1, **settings)
    (tmp_path / "train/weights.safetensors").unlink()
    stage = tmp_path / "train.yaml"
    stage.write_text(to_yaml({"train": train, "system": MODEL["system"], "codec": MODEL["codec"]["config"]}))
    command = ["ema", "--state", str(tmp_path / "train/state"), "--output", str(tmp_path / "out/weights.safetensors")]
    monkeypatch.setattr(sys, "argv", [*command, "--trained-by", str(stage)])
    ema.main()
    tensors, model = read_weights(tmp_path / "out")
    assert model["ema"] == "ema-0.5" and all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    stage.write_text(to_yaml({"train": train | {"seed": 2}, "system": MODEL["system"], "codec": {"type": "rgb"}}))
    with pytest.raises(
        ValueError, match=r"no checkpoint of the training that .*train\.yaml describes: that of \w+ differ"
    ):
        ema.main()
    monkeypatch.setattr(sys, "argv", [*command, "--trained-by", str(stage), "--weights", "x/weights.safetensors"])
    with pytest.raises(ValueError, match="--weights and --trained-by both name a run"):
        ema.main()


def test_one_of_several_averages_must_be_named(tmp_path: Path) -> None:
    start(tmp_path, ema={"type": "exponential", "rates": [0.9, 0.5]})
    with pytest.raises(ValueError, match=r"holds the averages ema-0\.5, ema-0\.9\. Name the number of one, or raw\."):
        weights_in(tmp_path / "train/state")
    start(tmp_path, seed=1)
    with pytest.raises(ValueError, match=r"state holds the runs \w+, \w+\. Give the folder of one run"):
        weights_in(tmp_path / "train/state", average="0.5")


def test_another_configuration_starts_from_scratch(tmp_path: Path) -> None:
    first = start(tmp_path, seed=1)
    second = start(tmp_path, seed=2)
    assert not torch.equal(first["hidden.0.weight"], second["hidden.0.weight"])
    assert len(list((tmp_path / "train/state").glob("*/"))) == 2


def test_training_on_images_now_held_out_is_not_resumed(tmp_path: Path) -> None:
    start(tmp_path, steps=5, split="one")
    state = read_model(tmp_path / "train")["fingerprint"]
    start(tmp_path, steps=7, split="one")  # a longer training is resumed
    for steps in (7, 9):
        with pytest.raises(ValueError, match="step-0000007 is of a training that held out other images"):
            start(tmp_path, steps=steps, split="another")
    shutil.rmtree(tmp_path / "train/state")
    start(tmp_path, steps=5, split="another")
    assert read_model(tmp_path / "train")["fingerprint"] == state


def test_a_warm_start_begins_with_the_given_weights(tmp_path: Path) -> None:
    given = start(tmp_path / "given")
    tiny = {"optimizer": {"type": "adam", "lr": 1e-12}}
    warm = start(tmp_path / "warm", steps=1, init_from=str(tmp_path / "given/train"), **tiny)
    for name, tensor in given.items():
        torch.testing.assert_close(warm[name], tensor, rtol=0, atol=1e-9)


def test_warm_start_rejects_unsuitable_weights(tmp_path: Path) -> None:
    start(tmp_path / "given")
    wider = nn.Sequential(nn.Conv2d(3, 9, 1))
    build = lambda world: Task(wider, objective, prepare, Samples())  # type: ignore[arg-type]  # noqa: E731
    config = TrainConfig(steps=1, global_batch=8, init_from=str(tmp_path / "given/train"))
    with pytest.raises(ValueError, match="do not fit the network"):
        run(build, config, MODEL, {}, tmp_path / "warm")


def test_the_grid_shows_the_averaged_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[Tensor] = []

    def grid(network: nn.Module, step: int, folder: Path) -> dict[str, Path]:
        assert not network.training
        shown.append(network.state_dict()["hidden.0.weight"].clone())
        picture = tmp_path / f"{step}.png"
        picture.write_bytes(b"picture")
        write_bytes(folder / f"step-{step:07d}.npz", b"%d" % step)
        return {"samples": picture}

    weights = start(tmp_path, task={"grid": grid}, grid_every_steps=6)
    assert len(shown) == 3
    (drawn,) = tmp_path.glob("**/previews/*")
    assert [*read_listing(drawn)] == [f"step-{step:07d}.npz" for step in (0, 6, 12)]
    assert damaged(drawn, read_listing(drawn)) == []
    assert torch.equal(shown[-1], weights["hidden.0.weight"])
    history = read_journal(tmp_path / "journal/train")
    assert history is not None
    assert [(image.key, image.step) for image in history.images] == [("samples", step) for step in (0, 6, 12)]
    (drawn / "step-0000006.npz").write_bytes(b"x")
    assert "previews" not in capsys.readouterr().err
    start(tmp_path, task={"grid": grid}, grid_every_steps=6)
    assert len(shown) == 3
    assert (
        f"warning: the previews in {drawn} have changed since they were drawn: step-0000006.npz"
        in capsys.readouterr().err
    )


def test_training_from_scratch_redraws_all_previews(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def grid(network: nn.Module, step: int, folder: Path) -> dict[str, Path]:
        write_bytes(folder / f"step-{step:07d}.npz", b"%d" % step)
        return {}

    start(tmp_path, task={"grid": grid}, grid_every_steps=6)
    (drawn,) = tmp_path.glob("**/previews/*")
    listing, whole = drawn / "listing.json", read_listing(drawn)
    cut = listing.read_bytes()[:-3]
    for path in sorted(tmp_path.glob("train/state/*/step-*"))[:-1]:
        shutil.rmtree(path)
    # A checkpoint and previews of a longer run are kept, so that damage of its listing is reported.
    listing.write_bytes(cut)
    start(tmp_path, task={"grid": grid}, grid_every_steps=6, steps=6)
    assert f"warning: the previews in {drawn} have changed since they were drawn" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "train/state")
    listing.write_bytes(cut)
    start(tmp_path, task={"grid": grid}, grid_every_steps=6)
    assert read_listing(drawn) == whole and "previews" not in capsys.readouterr().err


@pytest.mark.parametrize("at", [0, 6])
def test_preview_grid_interrupted_by_a_stop_is_redrawn(tmp_path: Path, at: int) -> None:
    calls: list[int] = []

    def grid(network: nn.Module, step: int, folder: Path) -> dict[str, Path]:
        calls.append(step)
        if calls.count(at) == 1 and step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    handlers = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(Stopped, match=f"asked by SIGTERM; step {at} of 12 is saved"):
        start(tmp_path, task={"grid": grid}, grid_every_steps=6)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    start(tmp_path, task={"grid": grid}, grid_every_steps=6)
    assert calls == sorted([0, 6, 12, at])
    assert points(tmp_path) == points_of_one_start(tmp_path / "once")


def points_of_one_start(folder: Path) -> list[tuple[str, int, float]]:
    start(folder)
    return points(folder)


def test_non_finite_loss_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    class Fails(Objective):
        def __call__(self, network: Any, batch: Batch) -> Losses:
            losses = objective(network, batch)
            hit = (batch.streams.epoch == 1) & (batch.streams.sample == 3)
            return Losses(torch.where(hit, torch.nan, losses.loss), {}, losses.time)

    build = lambda world: Task(Plane(), Fails(), prepare, Samples())  # type: ignore[arg-type]  # noqa: E731
    config = TrainConfig(steps=12, global_batch=8, log_every_steps=12, checkpoint={"every_steps": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Loss is not finite at step (\d+) \(rank 0\)\..*State kept in .*step-0000"):
        run(build, config, MODEL, {}, tmp_path)
    for path in tmp_path.glob("state/*/step-*/network.safetensors"):
        assert b"nan" not in path.read_bytes()
    assert not (tmp_path / "weights.safetensors").exists()


def test_compiled_training_gives_the_same_losses(tmp_path: Path) -> None:
    mode = "run" if hasattr(inductor, "deterministic") else "off"  # PyTorch 2.9 cannot fix which kernels it compiles
    eager = start(tmp_path / "eager", steps=4)
    compiled = start(tmp_path / "compiled", steps=4, compile=True, deterministic=mode)
    for name, tensor in eager.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-4, atol=1e-5)


def test_microbatches_change_only_rounding_and_nothing_in_strict_mode(tmp_path: Path) -> None:
    for mode, tolerance in (("off", 1e-5), ("strict", 0.0)):
        whole, cut = (start(tmp_path / f"{mode}-{size}", deterministic=mode, microbatch=size) for size in (None, 3))
        for name in whole:
            torch.testing.assert_close(cut[name], whole[name], rtol=tolerance, atol=tolerance)


def smallest(folder: Path) -> tuple[float, int]:
    """Return the smallest validation loss and its step."""
    return min((value, step) for key, step, value in points(folder) if key == "validation/loss")


def test_best_average_equals_the_result_of_a_run_to_its_step(tmp_path: Path) -> None:
    """The learning rate is so high that the loss rises again at the end."""
    wild = {"optimizer": {"type": "adamw", "lr": 0.1}, "validate_every_steps": 1, "weights": "best"}
    best = start(tmp_path / "all", steps=14, keep_raw=True, **wild)
    _, step = smallest(tmp_path / "all")
    assert step < 13
    _, model = read_weights(tmp_path / "all" / "train")
    assert (model["step"], model["examples_seen"], model["ema"]) == (step, 8 * step, "ema-0.5")
    short = start(tmp_path / "short", steps=step, **wild | {"weights": "ema"})
    assert all(torch.equal(best[name], short[name]) for name in best)
    raw, model = read_weights(tmp_path / "all" / "train" / "raw")
    expected = start(tmp_path / "raw", steps=14, **wild | {"weights": "raw"})
    assert model["ema"] is None and all(torch.equal(raw[name], expected[name]) for name in raw)
    start(tmp_path / "all", steps=14, **wild)
    assert not (tmp_path / "all" / "train" / "raw").exists()


def test_best_average_survives_a_restart(tmp_path: Path) -> None:
    wild = {"optimizer": {"type": "adamw", "lr": 0.1}, "validate_every_steps": 1, "weights": "best"}
    once = start(tmp_path / "once", steps=14, **wild)
    _, step = smallest(tmp_path / "once")
    for steps in (step + 1, 14):
        again = start(tmp_path / "twice", steps=steps, **wild)
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_best_weights_without_held_out_images_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sample is held out to compare them"):
        start(tmp_path, task={"validation": None}, weights="best")


WILD = {"optimizer": {"type": "adamw", "lr": 0.1}, "validate_every_steps": 1, "checkpoint": {"every_steps": 3}}


def expected_end(folder: Path, patience: float, steps: int) -> int:
    """Return the first validation step at which the loss has not improved for that share of the steps."""
    losses = sorted((step, value) for key, step, value in points(folder) if key == "validation/loss")
    best = 0
    for place, (step, value) in enumerate(losses):
        if all(value < before for _, before in losses[:place]):
            best = step
        if step - best >= round(patience * steps):
            return step
    return steps


@pytest.mark.parametrize("patience", [0.1, 0.2, 1.0])
def test_training_stops_early_when_validation_loss_stops_improving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], patience: float
) -> None:
    start(tmp_path / "whole", steps=40, **WILD)
    end = expected_end(tmp_path / "whole", patience, 40)
    assert (end < 40) == (patience < 1), "both are tried"
    capsys.readouterr()
    drawn: list[int] = []
    grid = {"grid": lambda network, step, folder: drawn.append(step) or {}}
    ended = start(tmp_path / "ended", task=grid, steps=40, patience=patience, grid_every_steps=25, **WILD)
    shorter = start(tmp_path / "shorter", steps=end, **WILD)
    assert all(torch.equal(ended[name], shorter[name]) for name in shorter)
    model = read_model(tmp_path / "ended" / "train")
    assert (model["step"], model["examples_seen"], model.get("ended_early_at", 40)) == (end, 8 * end, end)
    assert max(drawn) == end, "the last step has its preview"
    logged = [[point for point in points(tmp_path / name) if point[0] == "train/loss"] for name in ("ended", "shorter")]
    assert logged[0] == logged[1], "the last step has its log line"
    history = read_journal(tmp_path / "ended" / "journal" / "train")
    assert history is not None and history.params.get("ended_early_at", 40) == end
    printed = [line for line in capsys.readouterr().out.splitlines() if "ends at step" in line]
    best = min((value, step) for key, step, value in points(tmp_path / "ended") if key == "validation/loss")[1]
    assert len(printed) == (end < 40)
    assert all(f"ends at step {end} of 40: " in line for line in printed)
    assert all(f"at step {best}, and train.patience is {patience:g}." in line for line in printed)


@pytest.mark.parametrize("weights", ["ema", "best"])
def test_killed_training_stops_early_at_the_same_step_with_the_same_bytes(tmp_path: Path, weights: str) -> None:
    settings = {**WILD, "checkpoint": {"every_steps": 3, "keep_last": 100}, "patience": 0.2, "weights": weights}
    start(tmp_path, steps=40, **settings)
    files = [tmp_path / "train" / name for name in ("weights.safetensors", "model.json")]
    whole, numbers = [path.read_bytes() for path in files], points(tmp_path)
    saved = sorted(tmp_path.glob("train/state/*/step-*"))
    assert len(saved) > 3 and int(saved[-1].name[5:]) < 40
    for checkpoint in reversed(saved):  # as after a kill between this checkpoint and the next one
        for path in (*files, *(later for later in saved if later.name > checkpoint.name and later.exists())):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        start(tmp_path, steps=40, **settings)
        assert [path.read_bytes() for path in files] == whole, checkpoint.name
    assert points(tmp_path) == numbers


def test_stop_during_the_reports_of_the_early_stopping_step_is_recovered(tmp_path: Path) -> None:
    settings = {**WILD, "patience": 0.2, "grid_every_steps": 1}
    end, drawn = -1, list[int]()

    def grid(network: nn.Module, step: int, folder: Path) -> dict[str, Path]:
        drawn.append(step)
        if drawn.count(end) == 1 and step == end:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    whole = start(tmp_path / "whole", steps=40, task={"grid": grid}, **settings)
    end = read_model(tmp_path / "whole" / "train")["step"]
    drawn.clear()
    with pytest.raises(Stopped, match=f"step {end} of 40 is saved"):
        start(tmp_path / "stopped", steps=40, task={"grid": grid}, **settings)
    again = start(tmp_path / "stopped", steps=40, task={"grid": grid}, **settings)
    assert drawn == [*range(end + 1), end] and all(torch.equal(again[name], whole[name]) for name in whole)
    assert points(tmp_path / "stopped") == points(tmp_path / "whole")


def test_early_stopping_needs_validation_losses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sample is held out to measure the loss"):
        start(tmp_path, task={"validation": None}, patience=0.1)
    with pytest.raises(ValueError, match="patience is set but validate_every_steps is unset"):
        start(tmp_path, patience=0.1, validate_every_steps=None)


def test_timed_checkpoints_do_not_change_results(tmp_path: Path) -> None:
    often = {"every_steps": 100, "every_seconds": 1e-9, "keep_last": 100}
    expected = start(tmp_path / "steps")
    found = start(tmp_path / "clock", checkpoint=often)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (state,) = (tmp_path / "clock/train/state").glob("*/")
    assert len(list(state.glob("step-*"))) == 12


class Prefers(Objective):
    """An objective with a learned weight of the loss."""

    weight = 1.0

    def __call__(self, network: Any, batch: Batch) -> Losses:
        losses = objective(network, batch)
        return Losses(self.weight * losses.loss, {}, losses.time)

    def uniform(self) -> Any:
        return objective


def test_validation_loss_depends_only_on_the_weights(tmp_path: Path) -> None:
    still = {"steps": 4, "optimizer": {"type": "adamw", "lr": 1e-30}}
    values = set()
    for seed in (0, 1):
        for prefers in (Prefers(), objective):
            if isinstance(prefers, Prefers):
                prefers.weight = 2.0
            folder = tmp_path / f"{seed}-{type(prefers).__name__}"
            torch.manual_seed(0)
            network = Plane()
            task = Task(network, prefers, prepare, Samples(), Samples())  # type: ignore[arg-type]
            settings = {"global_batch": 8, "seed": seed, "log_every_steps": 2, "validate_every_steps": 2} | still
            run(lambda world, task=task: task, TrainConfig.model_validate(settings), MODEL, {}, folder, folder / "j")  # type: ignore[misc]
            history = read_journal(folder / "j" / "train")
            assert history is not None
            values |= {p.value for p in history.points if p.key == "validation/loss"}
    assert len(values) == 1


def test_journal_records_tflops_and_share_of_peak(tmp_path: Path) -> None:
    start(tmp_path, steps=4)
    history = read_journal(tmp_path / "journal" / "train")
    assert history is not None
    found = {(p.key, p.step): p.value for p in history.points if p.key.startswith("speed/")}
    for step in (2, 4):
        flops = 2 * (3 * (3 * 8 + 8) - 3 * 8)  # three matrix products per layer; the data need no gradient
        rate = flops * found["speed/examples_per_second", step] / 1e12
        assert found["speed/tflops", step] == pytest.approx(rate)
        assert 0 < found["speed/share_of_peak", step] < 1


def test_weights_of_another_training_are_rejected(tmp_path: Path) -> None:
    start(tmp_path, steps=3)
    model = read_model(tmp_path / "train")
    described = {"train": model["train"], "system": model["system"], "codec": model["codec"]["config"], "preview": {}}
    config = tmp_path / "train.yaml"
    config.write_text(to_yaml(described))
    check_trained_by(tmp_path / "train", config)
    check_trained_by(tmp_path / "train", None)
    config.write_text(to_yaml(described | {"train": described["train"] | {"steps": 2}}))
    with pytest.raises(ValueError, match=r"another training than .*train\.yaml describes: train\.steps \(2 here, 3 th"):
        check_trained_by(tmp_path / "train", config)


def test_fp16_fallback_on_gpus_without_bf16_keeps_the_requested_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("image_diffusion.training.config.has_bf16", lambda device: False)
    config = tmp_path / "train.yaml"
    start(tmp_path, steps=3, precision="bf16")
    model = read_model(tmp_path / "train")
    assert model["train"]["precision"] == "bf16"
    config.write_text(to_yaml({"train": model["train"], "system": model["system"], "codec": {"type": "rgb"}}))
    check_trained_by(tmp_path / "train", config)
    history = read_journal(tmp_path / "journal" / "train")
    assert history is not None and history.params["train.precision"] == "bf16"
