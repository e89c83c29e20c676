"""A trained prior and its pairs -> metrics.json and a picture: losses, and how near predictions are to real images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from image_diffusion.core.config import dump
from image_diffusion.core.figures import new_figure, save_figure
from image_diffusion.core.files import digest
from image_diffusion.core.halfway import Arrays, batches
from image_diffusion.core.progress import Progress
from image_diffusion.core.streams import Streams
from image_diffusion.core.together import gathered, share
from image_diffusion.core.types import DataSpec
from image_diffusion.data.pairs import IMAGE
from image_diffusion.data.shards import Shards, Split, open_shards
from image_diffusion.metrics.intervals import Estimate, mean_estimate
from image_diffusion.metrics.moments import block_of_each
from image_diffusion.metrics.retrieval import retrieval, same_rows
from image_diffusion.metrics.similarity import (
    baselines,
    nearest_captions,
    other_captions,
    similarities,
    similarity_estimates,
)
from image_diffusion.systems.embedding.sampling import EmbeddingGenerator, EmbeddingSampling, check_guided
from image_diffusion.systems.given import ToJudge
from image_diffusion.systems.system import on_best_device

if TYPE_CHECKING:
    from image_diffusion.systems.prior import PriorSystem

_EPOCH = 2**31 - 1  # no pass over the training data gets this number
_KNOWN = 100_000  # training pairs among which the nearest caption is looked for, at most
_GALLERY = 10_000  # pairs that look for one another's images, at most


class PredictionConfig(EmbeddingSampling):
    """How a prior is judged: image embeddings made from captions, compared with the real ones."""

    num_steps: tuple[int, ...] = Field((64,), min_length=1)
    """Numbers of steps, each measured on its own; they take the place of the sampler's."""
    num_pairs: int | None = Field(10_000, ge=1)
    """Pairs of each split that are used, or all where there are fewer; null: all."""

    def at(self, num_steps: int) -> EmbeddingSampling:
        """The settings with one of the numbers of steps."""
        settings = {name: value for name, value in dump(self).items() if name in EmbeddingSampling.model_fields}
        return EmbeddingSampling.model_validate(settings | {"sampler": settings["sampler"] | {"num_steps": num_steps}})

    def check(self, system: PriorSystem) -> None:
        """Raise ValueError where steps or guidance do not fit the system."""
        check_guided("prediction", self, system)
        for count in self.num_steps:
            if not 1 <= count <= system.process.num_timesteps:
                raise ValueError(
                    f"prediction.num_steps holds {count}; expected from 1 to process.num_timesteps = "
                    f"{system.process.num_timesteps}."
                )
            self.at(count).sampler.grid(system.process)


def judge_prior(system: PriorSystem, given: ToJudge) -> dict[str, Any]:
    """What metrics.json holds; the weights that were not averaged are measured too, where they were kept."""
    assert given.model is not None
    names: tuple[Split, ...] = ("train", "validation", "test")
    splits: dict[str, Shards] = {name: open_shards(given.data, name) for name in names}
    networks = {"": on_best_device(given.model)}
    if (raw := given.raw()) is not None:
        networks["online"] = raw
    return evaluate_prior(networks, system, given.model.spec, splits, given.sections["prediction"], given.report)


def evaluate_prior(
    networks: Mapping[str, nn.Module],
    system: PriorSystem,
    spec: DataSpec,
    splits: Mapping[str, Shards],
    settings: PredictionConfig,
    report: Path | None = None,
) -> dict[str, Any]:
    """Judge a prior. Returns plain data of the form of `evaluate_samples`.

    networks: in evaluation mode, on one device; "" is the one that is judged, others are named in their losses, as
    "online" for the weights without average. splits: by name; empty ones are left out. Metrics: loss_<split> with fixed
    noise and nothing dropped, and for each number of steps n the similarities (`metrics.similarity`) as <name>_<n>,
    over the test split, or the last one that is not empty, with baselines from the training pairs; retrieval_at_1_<n>
    and …_5_<n>: whether a prediction finds an image of its caption among those of the split. report: a folder for
    similarities.png. Raises ValueError where the data do not fit the network. Where a launcher started several
    processes, they share the pairs.
    """
    settings.check(system)
    sets = {name: data for name, data in splits.items() if data.num_samples}
    for name, data in sets.items():
        if data.shape[-1] != spec.channels:
            raise ValueError(
                f"The {name} split has embeddings of {data.shape[-1]} dimensions but the network was trained on "
                f"{spec.channels}. Evaluate on pairs of the same models."
            )
    found: dict[str, Estimate] = {}
    for kind, network in networks.items():
        for name, data in sets.items():
            each = _losses(network, system, spec, data, settings)
            found["_".join(filter(None, ("loss", kind, name)))] = mean_estimate(each, block_of_each(len(each)), 0)
    split, data = list(sets.items())[-1]
    text, image = _of(system, data, _count(data, settings))
    captions = same_rows(text)
    shown: dict[str, Tensor] = {}
    for count in settings.num_steps:
        shown, predicted = _similarities(networks[""], system, spec, data, settings, count)
        found |= {f"{name}_{count}": each for name, each in _retrieval(predicted, image, captions).items()}
        baseline = {name: each for name, each in shown.items() if name == "baseline_similarity"}
        found |= similarity_estimates(baseline)
        found |= {f"{name}_{count}": each for name, each in similarity_estimates(shown).items() if name not in baseline}
    if split != "train" and "train" in sets:
        known_text, known_image = _of(system, sets["train"], min(_count(sets["train"], settings), _KNOWN))
        found |= similarity_estimates(baselines(text, image, known_text, known_image))
        nearest = known_image[nearest_captions(text, known_text)]
        found |= {f"nearest_caption_{name}": each for name, each in _retrieval(nearest, image, captions).items()}
    if report is not None:
        _plot(shown, f"{split} split, {settings.num_steps[-1]} steps", report / "similarities.png")
    how = {"split": split, "data": data.digest, "pairs": data.manifest.get("pairs"), "settings": dump(settings)}
    protocol = {**how, "digest": digest(how), "num_samples": _count(data, settings)}
    return {
        "metrics": {name: estimate.as_dict() for name, estimate in found.items()},
        "curve": [],
        "classes": {},
        "protocol": protocol,
    }


def _of(system: PriorSystem, data: Shards, count: int) -> tuple[Tensor, Tensor]:
    """The embeddings of the first captions and of the first images of a split, [count, dim] each."""
    pairs = data.gather(np.arange(count))
    return system.caption(pairs)["text_embed"], pairs[:, IMAGE].float()


def _retrieval(query: Tensor, image: Tensor, captions: Tensor) -> dict[str, Estimate]:
    """R@k of the first pairs: an embedding finds an image of its own caption. query, image: [N, dim]; captions: which
    one each has, int64 [N]."""
    query, image, captions = query[:_GALLERY], image[:_GALLERY], captions[:_GALLERY]
    return retrieval(query, captions, image, captions, f"images of {len(captions.unique()):,} captions")


def _count(data: Shards, settings: PredictionConfig) -> int:
    return min(data.num_samples, settings.num_pairs or data.num_samples)


@torch.no_grad()
def _losses(
    network: nn.Module, system: PriorSystem, spec: DataSpec, data: Shards, settings: PredictionConfig
) -> Tensor:
    """The loss of each pair, float64 [N], with noise and timestep that belong to the pair."""
    device, objective = next(network.parameters()).device, system.build_objective(spec)

    def measure(rows: NDArray[np.int64]) -> Arrays:
        sample = torch.from_numpy(rows).to(device)
        streams = Streams(settings.seed, torch.full_like(sample, _EPOCH), sample)
        batch = system.pair_batch(data.gather(rows).to(device), streams)
        return {"loss": objective(network, batch).loss.double().cpu().numpy()}

    parts = _in_batches(measure, "losses", data, settings)
    return torch.cat([part["loss"] for part in parts])


def _similarities(
    network: nn.Module, system: PriorSystem, spec: DataSpec, data: Shards, settings: PredictionConfig, num_steps: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Of each pair, by name; without what is unrelated where all have the same caption (`other_captions`). And what is
    predicted, [N, dim]."""
    generator = EmbeddingGenerator(network, system, spec, settings.at(num_steps))
    count = _count(data, settings)
    others = other_captions(system.caption(data.gather(np.arange(count)))["text_embed"])

    def measure(rows: NDArray[np.int64]) -> Arrays:
        pairs = data.gather(rows)
        own, other = system.caption(pairs), system.caption(data.gather(rows if others is None else others[rows]))
        predicted, unrelated = (generator(cond, torch.from_numpy(rows)) for cond in (own, other))
        near = similarities(own["text_embed"], pairs[:, IMAGE].float(), predicted, unrelated)
        return {name: each.cpu().numpy() for name, each in (near | {"predicted": predicted}).items()}

    every = _in_batches(measure, f"predictions in {num_steps} steps", data, settings)
    found = {name: torch.cat([part[name] for part in every]) for name in every[0]}
    made = found.pop("predicted")
    if others is None:
        found = {name: each for name, each in found.items() if "unrelated" not in name}
    return found, made


def _in_batches(
    measure: Callable[[NDArray[np.int64]], Arrays], title: str, data: Shards, settings: PredictionConfig
) -> list[dict[str, Tensor]]:
    """What is measured of the first pairs, batch by batch; the processes share them, and each has what all measured."""
    mine, once, parts = share(np.arange(_count(data, settings))), batches([title, data.digest]), []
    with Progress(title, len(mine), "pair") as progress:
        for start in range(0, len(mine), settings.batch_size):
            rows = mine[start : start + settings.batch_size]
            found = once(f"{rows[0]}-{rows[-1] + 1}", partial(measure, rows))
            parts.append({name: torch.from_numpy(each) for name, each in found.items()})
            progress.advance(len(rows))
    return [part for each in gathered(parts) for part in each]


def _plot(found: dict[str, Tensor], title: str, path: Path) -> None:
    """Write two histograms as PNG: cosines of the real images with predictions from their own and other captions."""
    figure = new_figure(8, 4)
    axis = figure.subplots()
    kinds = {"similarity_with_image": "own caption", "unrelated_similarity_with_image": "another caption"}
    for name, label in kinds.items():
        if name in found:
            axis.hist(found[name].numpy(), bins=50, range=(-1, 1), alpha=0.6, label=label)
    axis.set(title=title, xlabel="cosine of the real image embedding and the one predicted from", ylabel="pairs")
    axis.legend()
    save_figure(figure, path)
