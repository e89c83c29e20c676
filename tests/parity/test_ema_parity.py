"""Averages of the weights against ema_pytorch's warm-up [p03] and the original IDDPM's update [d08]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from image_diffusion.training.optim.ema import Averages, ExponentialEma, Warmup


@pytest.mark.parametrize("case", ["rin_default", "prior_default", "fast"])
def test_warmup_is_that_of_ema_pytorch(golden: Callable[[str], Any], case: str) -> None:
    file = golden("p03_ema_schedules.npz")
    settings = file.params(case)
    warmup = Warmup(
        update_after_step=settings["update_after_step"],
        inv_gamma=settings["inv_gamma"],
        power=settings["power"],
        min_decay=settings["min_value"],
    )
    config = ExponentialEma(rates=(settings["beta"],), warmup=warmup, update_every=settings["update_every"])
    weights = torch.zeros(1)
    averages = Averages(config, weights)
    steps, values = file[f"{case}/step_after"], file[f"{case}/param_values"]
    assert len(steps) == 400
    for i, step in enumerate(steps.tolist()):
        decay = file[f"{case}/decay_after"][i].item()
        assert warmup.decay(step, settings["beta"]) == pytest.approx(decay, rel=1e-5, abs=1e-7)
        weights.fill_(values[i].item())
        averages.update(step)
        (average,) = averages.vectors.values()
        assert average.item() == pytest.approx(file[f"{case}/ema_value"][i].item(), rel=1e-5, abs=1e-7), step


def test_an_exponential_average_is_that_of_iddpm(golden: Callable[[str], Any]) -> None:
    file = golden("d08_schedule_sampler.npz")
    weights = file["ema/target0"].float()
    averages = Averages(ExponentialEma(rates=(file.params("ema")["rate"],)), weights)
    (average,) = averages.vectors.values()
    assert torch.equal(average, file["ema/target0"].float())
    for step, (source, expected) in enumerate(zip(file["ema/sources"], file["ema/targets"], strict=True), start=1):
        weights.copy_(source)
        averages.update(step)
        torch.testing.assert_close(average, expected.float(), rtol=1e-6, atol=1e-7)
