"""Bits per dimension as an evaluation: every image once for any batch size; unsupported systems are rejected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import parse
from image_diffusion.core.types import DataSpec
from image_diffusion.experiments.resolve import load_all
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.images.likelihood import LikelihoodConfig, measure_likelihood
from image_diffusion.metrics.samples import Samples
from image_diffusion.systems import AnySystem
from image_diffusion.systems.base import Model
from image_diffusion.systems.diffusion import evaluation
from image_diffusion.systems.diffusion.evaluation import ImageBound, likelihood_label
from image_diffusion.systems.diffusion.iddpm import IddpmSystem
from image_diffusion.systems.evaluation import EvaluationInputs

SPEC = DataSpec(channels=3, resolution=8, num_classes=3)
NETWORK = {"channels": 32, "multipliers": [1, 1], "num_res_blocks": 1, "attention_resolutions": [4]}
DIT = {"type": "dit", "network": {"size": "DiT-S/4"}}


def images(count: int = 7) -> Samples:
    rng = np.random.default_rng(0)
    return Samples(rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8), np.arange(count) % 3, ["a", "b", "c"])


def system(**changes: Any) -> IddpmSystem:
    process = {"schedule": {"type": "linear"}, "num_timesteps": 20, "rescale_timesteps": False}
    data = {"type": "iddpm", "network": NETWORK, "process": process, **changes}
    built = parse(AnySystem, data, "system")
    assert isinstance(built, IddpmSystem)
    return built


def randomly_initialised(described: IddpmSystem) -> nn.Module:
    torch.manual_seed(0)
    network = described.build_network(described.conditioning.spec(SPEC, {})).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.05)
    return network


def measured(
    network: nn.Module, described: IddpmSystem, images: Samples, report: Path | None = None, **settings: Any
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    config = parse(LikelihoodConfig, settings, "evaluate.likelihood")
    bound = ImageBound(network, described.reading, SPEC, Rgb(), config, image=described.conditioning.image)
    return measure_likelihood(bound, bound.timesteps, images, config, report)


class Oracle(nn.Module):
    """Predicts the noise exactly, as every image is grey."""

    def __init__(self, described: IddpmSystem) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))
        self.process = described.process.build()

    def forward(self, x: Tensor, t: Tensor, **cond: Tensor) -> Tensor:
        alpha, sigma = (level.float()[:, None, None, None] for level in self.process.levels(t.long()))
        return (x - alpha * (128 / 127.5 - 1)) / sigma


def test_exact_network_needs_bits_only_for_the_last_step(tmp_path: Path) -> None:
    described = system(objective={"type": "denoising", "variance": "fixed_small", "loss": "simple"})
    grey = Samples(np.full((3, 8, 8, 3), 128, np.uint8), None, [])
    entries, by_timestep = measured(Oracle(described), described, grey, tmp_path)
    assert entries["bits_steps"]["value"] == pytest.approx(0, abs=1e-5)
    # The last step has the variance of the one before it, so the pixel's bin has a share of that Gaussian.
    steps = described.process.build().steps
    width = math.exp(-0.5 * float(steps.log_variance[0])) / 255
    share = math.tanh(math.sqrt(2 / math.pi) * (width + 0.044715 * width**3))
    assert entries["bits_pixels"]["value"] == pytest.approx(-math.log2(share), rel=1e-4)
    assert entries["bits_per_dim"]["value"] == pytest.approx(
        sum(entries[f"bits_{part}"]["value"] for part in ("prior", "steps", "pixels"))
    )
    assert by_timestep["timestep"] == list(range(19, -1, -1))
    assert max(by_timestep["eps_mse"]) < 1e-6 and max(by_timestep["x0_mse"]) < 1e-4
    assert (tmp_path / "likelihood.png").is_file()


@pytest.mark.parametrize(
    "objective",
    [
        {"type": "denoising", "variance": "learned_range", "loss": "rescaled_hybrid"},
        {"type": "denoising", "prediction": "x0", "variance": "fixed_large", "loss": "simple"},
        {"type": "denoising", "prediction": "previous_x", "variance": "learned", "loss": "kl"},
    ],
    ids=["range", "fixed", "learned"],
)
def test_likelihood_does_not_depend_on_the_batch_size(objective: dict[str, Any]) -> None:
    described = system(objective=objective)
    network = randomly_initialised(described)
    whole, by_timestep = measured(network, described, images())
    for batch_size in (1, 3):
        entries, terms = measured(network, described, images(), batch_size=batch_size)
        assert entries["bits_per_dim"]["n"] == 7
        assert entries["bits_per_dim"]["value"] == pytest.approx(whole["bits_per_dim"]["value"], rel=1e-6)
        assert terms["vb"] == pytest.approx(by_timestep["vb"], rel=1e-5, abs=1e-8)
    assert sum(by_timestep["vb"]) + whole["bits_prior"]["value"] == pytest.approx(whole["bits_per_dim"]["value"])


def test_bound_of_an_image_does_not_depend_on_its_batch() -> None:
    """The noise of an image does not depend on its batch."""
    described = system()
    network = randomly_initialised(described)
    config = LikelihoodConfig()
    bound = ImageBound(network, described.reading, SPEC, Rgb(), config)
    rows = torch.arange(6)
    everything = bound(images().gather(rows.numpy()), rows % 3, rows).total
    odd = rows[1::2]
    torch.testing.assert_close(bound(images().gather(odd.numpy()), odd % 3, odd).total, everything[1::2])
    assert not torch.allclose(bound(images().gather(odd.numpy()), (odd + 1) % 3, odd).total, everything[1::2])


def test_fewer_timesteps_are_evenly_spaced() -> None:
    described = system()
    _, by_timestep = measured(randomly_initialised(described), described, images(2), timesteps=5)
    assert by_timestep["timestep"] == [19, 14, 10, 5, 0]
    respaced = system(process={"type": "discrete", "num_timesteps": 20, "respacing": "ddim10"})
    _, by_timestep = measured(randomly_initialised(respaced), respaced, images(2))
    assert by_timestep["timestep"] == list(range(18, -1, -2))


def test_upsampler_likelihood_is_conditioned_on_the_small_image() -> None:
    described = system(condition=[{"type": "label"}, {"type": "image", "from": "self", "shrink": 2}])
    entries, _ = measured(randomly_initialised(described), described, images(2))
    assert math.isfinite(entries["bits_per_dim"]["value"])


def model_of(described: IddpmSystem, network: nn.Module, classes: Sequence[str] = ()) -> Model:
    codec = {"config": {"type": "rgb"}, "identity": Rgb().identity, "scale": None}
    return Model(network, SPEC, codec, list(classes), 1, 8, "", 1, "", system=described)


def test_data_with_other_classes_use_the_configured_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = system(objective={"label_drop_probability": 0.1})
    network = randomly_initialised(described)
    mine = images(4)
    monkeypatch.setattr(evaluation, "on_best_device", lambda model: model.network)
    data: Any = SimpleNamespace(
        train=SimpleNamespace(shape=(3, 8, 8), classes=["one", "two"]), split=lambda split: mine, digest=""
    )

    def bits(classes: Sequence[str] = (), **settings: Any) -> float:
        asked = EvaluateConfig(likelihood=parse(LikelihoodConfig, settings, "evaluate.likelihood"))
        inputs = EvaluationInputs(model_of(described, network, classes), asked, tmp_path)
        found, _ = described.evaluation()._likelihood(inputs, data)
        return float(found["bits_per_dim"]["value"])

    with pytest.raises(ValueError, match=r"with 3 classes, but --data has 2\. .* evaluate\.likelihood\.label"):
        bits()
    bound = ImageBound(network, described.reading, SPEC, Rgb(), LikelihoodConfig())
    rows = torch.arange(4)
    for label, number in ((0, 0), (2, 2), ("none", 3)):
        expected = bound(mine.gather(rows.numpy()), torch.full_like(rows, number), rows).total.mean()
        assert bits(label=label) == pytest.approx(expected.item(), rel=1e-6)
    assert bits(["a", "b", "c"], label="c") == bits(label=2) != bits(label=0)
    for label in (3, -1, "d"):
        with pytest.raises(ValueError, match=rf"label names the class {label!r}, but the classes are 0 to 2: a, b"):
            bits(["a", "b", "c"], label=label)
    described = system()
    with pytest.raises(ValueError, match="label is none, but the network never learned to do without"):
        bits(label="none")
    with pytest.raises(ValueError, match="label is set, but the network has no classes"):
        likelihood_label(replace(model_of(described, network), spec=DataSpec(channels=3, resolution=8)), False, 0)


def test_more_images_than_available_are_rejected() -> None:
    described = system()
    for count, asked in ((0, None), (3, 4)):
        with pytest.raises(ValueError, match=r"evaluate\.likelihood asks for .* of the validation split, which has"):
            measured(randomly_initialised(described), described, images(count), num_samples=asked)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {
                "system": DIT | {"process": {"type": "flow"}, "objective": {"type": "flow_matching"}},
                "sample": {"sampler": {"type": "heun"}},
            },
            "the process flow has no steps",
        ),
        ({"system": {"type": "rin", "network": {"patch": 4}}}, "the process continuous has no steps"),
        ({"system": DIT, "codec": {"type": "stability_vae"}}, "works on latents"),
        (
            {"system": {"type": "autoencoder"}},
            "evaluate.likelihood is set, but a system of type autoencoder has no",
        ),
        ({"system": DIT, "evaluate": {"likelihood": {"timesteps": 2000}}}, "2000"),
    ],
    ids=["flow", "continuous", "latents", "codec", "timesteps"],
)
def test_unsupported_likelihoods_are_rejected_before_any_work(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    path = tmp_path / "mine.yaml"
    data = {"name": "digits", "source": {"type": "digits"}, "resolution": 32}
    whole = {"data": data, "train": {"steps": 1}, "evaluate": {"likelihood": {}}} | sections
    path.write_text(yaml.safe_dump(whole))
    with pytest.raises(ValueError, match=message) as caught:
        load_all([path])
    assert len(str(caught.value).splitlines()) == 1
