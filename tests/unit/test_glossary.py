"""docs/metrics.md documents every metric of metrics.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

from image_diffusion.core.journal.metric_definitions import definition_of, definitions
from image_diffusion.core.types import DataSpec
from image_diffusion.data.sources.scikit_digits import Attributes
from image_diffusion.metrics.compute import Reference, measure
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.distances.jackknife import Estimate
from image_diffusion.metrics.evaluate_samples import RealImages
from image_diffusion.metrics.features.base import Detected
from image_diffusion.metrics.images.channels import DISTANCES
from image_diffusion.metrics.images.embedding_similarity import (
    PromptEncoder,
    evaluate_prompted,
    retrieval,
    similarities,
)
from image_diffusion.metrics.images.likelihood import LikelihoodConfig, measure_likelihood
from image_diffusion.metrics.samples import Samples
from image_diffusion.networks.autoencoder import AutoencoderConfig
from image_diffusion.networks.dvae import DVAEConfig
from image_diffusion.process.likelihood import BitsPerDim
from image_diffusion.systems.codec.reconstruction import evaluate_codec
from image_diffusion.systems.diffusion.evaluation import evaluate_paired

DOCS = Path(__file__).parents[2] / "docs"


class Brightness:
    """A detector of two classes."""

    classes = ["dark", "bright"]  # noqa: RUF012
    identity: dict[str, Any] = {"name": "test", "sha256": "abc"}  # noqa: RUF012
    doubt: str | None = None

    def __call__(self, images: Tensor) -> Detected:
        level = images.float().mean(dim=(1, 2, 3))[:, None] / 255
        return Detected(torch.cat([level, level**2], dim=1), torch.cat([1 - level, level], dim=1))

    def metric_name(self, metric: str) -> str:
        return metric


def images(count: int, digest: str = "set", **protocol: Any) -> Samples:
    rng = np.random.default_rng(count)
    pixels = rng.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    return Samples(pixels, np.arange(count) % 2, Brightness.classes, digest, protocol)


def panel() -> set[str]:
    rng = torch.Generator().manual_seed(0)
    seen = [
        Detected(*(torch.randn(120, size, generator=rng) for size in (3, 2, 4)))  # features, logits, spatial
        for _ in range(2)
    ]
    flags = {name: True for name, field in EvaluateConfig.model_fields.items() if field.annotation is bool}
    labels, settings = torch.arange(120) % 2, EvaluateConfig.model_validate(flags)
    reference = Reference.from_images(seen[1], labels)
    return set(measure(seen[0], labels, reference, Brightness.classes, settings)) | set(
        measure(seen[0], None, reference, [], settings)
    )


def likelihood() -> set[str]:
    def bound(x: Tensor, labels: Tensor, numbers: Tensor) -> BitsPerDim:
        shapes = {"terms": (len(x), 2), "x0_mse": (len(x), 2), "eps_mse": (len(x), 2)}
        given = {name: torch.zeros(shapes.get(name, (len(x),))) for name in get_type_hints(BitsPerDim)}
        return BitsPerDim(**given)

    return set(measure_likelihood(bound, [1, 0], images(4), LikelihoodConfig())[0])


def codecs() -> set[str]:
    spec = DataSpec(channels=3, resolution=16, num_classes=2)
    data, found = RealImages(images(60), images(40)), set[str]()
    dvae = DVAEConfig(num_tokens=6, codebook_dim=5, num_layers=2, num_resnet_blocks=1, hidden_dim=8)
    for config in (dvae, AutoencoderConfig(block_channels=[16, 16])):
        found |= set(evaluate_codec(config.build(spec).eval(), data, [Brightness()], EvaluateConfig())["metrics"])
    return found


def enlarging() -> set[str]:
    held_out = images(3)
    condition = {"type": "image", "from": "self", "shrink": 2}
    image = {"condition": condition, "split": "validation", "data": held_out.digest}
    made = images(6, image=image, settings={"first_seed": 0, "seed": 0})
    return set(evaluate_paired(made, held_out))


def prompted() -> set[str]:
    encoder = PromptEncoder(Brightness(), None, None)
    encoder.texts = lambda prompts: torch.randn(len(prompts), 2)  # type: ignore[method-assign]
    return set(evaluate_prompted(images(3, prompts=["a", "b", "c"]), encoder))


def test_every_metric_is_in_the_glossary() -> None:
    attributes = {f"agreement_{name}" for name in Attributes.__dataclass_fields__} | {
        "attributes_seen",
        "attributes_held_out",
    }
    found = panel() | likelihood() | codecs() | enlarging() | prompted() | attributes | {"copies"} | set(DISTANCES)
    names = set(re.findall(r"`([a-z0-9_]+)`", (DOCS / "metrics.md").read_text()))
    ways = ("_mean", "_soft", "_hard")
    missing = {
        name
        for name in found
        if name not in names and name.removesuffix(name[-5:] if name.endswith(ways) else "") not in names
    }
    assert len(found) > 40 and not missing
    assert not [name for name in found if definition_of(name) is None]


def test_metrics_page_matches_the_definitions() -> None:
    lines = (DOCS / "metrics.md").read_text().splitlines()
    known = [each for each in definitions() if each.judged != "Priors"]
    for each in known:
        names = ", ".join(f"`{name}`" for name in each.names.split())
        assert f"| {names} | {each.meaning} | {each.better} | {each.source} |" in lines
    rows = [line for line in lines if re.match(r"\| `\w+`.*\|.*\|.*\|.*\|$", line)]
    assert len(rows) == len(known)


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("fid", "lower"),
        ("kd_dinov2", "lower"),
        ("inpipe_class_fd", "lower"),
        ("inpipe_recall", "higher"),
        ("agreement_digit", "higher"),
        ("inpipe_same_class_hard", "higher"),
        ("psnr_bicubic", ""),
        ("inpipe_c2st", "nearer to 0.5"),
        ("similarity_with_image_8", "higher"),
        ("prompt_retrieval_at_1_siglip", "higher"),
        ("nearest_caption_retrieval_at_5", ""),
    ],
)
def test_metrics_define_which_direction_is_better(metric: str, better: str) -> None:
    found = definition_of(metric)
    assert found is not None and found.better == better


def test_every_similarity_metric_is_on_the_prior_page() -> None:
    some = torch.randn(4, 8)
    page = (DOCS / "prior.md").read_text()
    found = retrieval(some, torch.arange(4), some, torch.arange(4), "images")
    names = [*similarities(some, some, some, some), *found, *(f"nearest_caption_{name}" for name in found)]
    assert not [name for name in names if f"`{name}" not in page or definition_of(name) is None]


def test_fields_of_a_metric_entry_are_documented() -> None:
    page = (DOCS / "metrics.md").read_text()
    assert not [name for name in Estimate(0.0, 1).as_dict() if f"`{name}`" not in page]
