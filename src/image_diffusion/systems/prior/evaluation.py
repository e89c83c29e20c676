"""Evaluation of a prior on pairs -> metrics.json and a picture: losses, and similarities of predictions to real
images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from image_diffusion.core.config.base import dump
from image_diffusion.core.files.atomic import digest
from image_diffusion.core.files.partial_results import Arrays, batches, gathered, share
from image_diffusion.core.pictures import new_figure, save_figure
from image_diffusion.core.process.progress import Progress
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec, Objective
from image_diffusion.data.encoded.pairs import IMAGE
from image_diffusion.data.shards.reader import Shards, Split, open_shards
from image_diffusion.metrics.distances.jackknife import Estimate, mean_estimate
from image_diffusion.metrics.images.embedding_similarity import (
    baselines,
    nearest_captions,
    other_captions,
    retrieval,
    same_rows,
    similarities,
    similarity_estimates,
    spread_rows,
)
from image_diffusion.process.discrete import Discrete
from image_diffusion.systems.base import on_best_device
from image_diffusion.systems.evaluation import Evaluation, EvaluationInputs
from image_diffusion.systems.prior.generator import (
    EmbeddingGenerator,
    EmbeddingReading,
    EmbeddingSampling,
    caption_inputs,
    check_guided,
    pair_batch,
)

_EPOCH = 2**31 - 1  # an epoch number that training never reaches
_KNOWN = 100_000  # maximum number of training pairs in the search for the nearest caption
_GALLERY = 10_000  # maximum number of pairs for retrieval


class PredictionConfig(EmbeddingSampling):
    """Settings of the evaluation of a prior: image embeddings made from captions, compared with the real ones."""

    num_steps: tuple[int, ...] = Field((64,), min_length=1)
    """Numbers of sampling steps, each evaluated separately; they replace the sampler's own number."""
    num_pairs: int | None = Field(10_000, ge=1)
    """Number of pairs used of each split, spread evenly over it, or all if there are fewer; null: all."""

    def at(self, num_steps: int) -> EmbeddingSampling:
        """Return the settings with this number of steps."""
        settings = {name: value for name, value in dump(self).items() if name in EmbeddingSampling.model_fields}
        return EmbeddingSampling.model_validate(settings | {"sampler": settings["sampler"] | {"num_steps": num_steps}})

    def check(self, process: Discrete, drops_conditions: bool) -> None:
        """Raise ValueError if steps or guidance do not fit. drops_conditions: whether training drops the network's
        conditions."""
        check_guided("prediction", self, drops_conditions)
        for count in self.num_steps:
            if not 1 <= count <= process.num_timesteps:
                raise ValueError(
                    f"prediction.num_steps holds {count}; expected from 1 to process.num_timesteps = "
                    f"{process.num_timesteps}."
                )
            self.at(count).sampler.grid(process)


@dataclass(frozen=True)
class EvaluatedPrior:
    """Inputs of the measurements of a prior. token_encodings: as in `caption_inputs`."""

    reading: EmbeddingReading
    objective: Objective
    token_encodings: bool


@dataclass(frozen=True)
class PriorEvaluation(Evaluation):
    """Evaluation of a prior, and of its raw weights, if they were kept. reading, objective: for embeddings of a
    dimension."""

    section: ClassVar[str] = "prediction"

    reading: Callable[[DataSpec], EmbeddingReading]
    objective: Callable[[DataSpec], Objective]
    token_encodings: bool

    def headline(self, settings: PredictionConfig) -> str:
        return "loss_validation"

    def evaluate(self, inputs: EvaluationInputs) -> dict[str, Any]:
        assert inputs.model is not None
        spec = inputs.model.spec
        names: tuple[Split, ...] = ("train", "validation", "test")
        splits: dict[str, Shards] = {name: open_shards(inputs.data, name) for name in names}
        networks = {"": on_best_device(inputs.model)}
        if (raw := inputs.raw()) is not None:
            networks["online"] = raw
        prior = EvaluatedPrior(self.reading(spec), self.objective(spec), self.token_encodings)
        return evaluate_prior(networks, prior, spec, splits, inputs.settings, inputs.report)


def evaluate_prior(
    networks: Mapping[str, nn.Module],
    prior: EvaluatedPrior,
    spec: DataSpec,
    splits: Mapping[str, Shards],
    settings: PredictionConfig,
    report: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a prior. Returns plain data of the form of `evaluate_samples`. networks: in evaluation mode, on one
    device; "" is evaluated; others only add losses under their names, such as "online" for the raw weights. splits: by
    name; empty ones are skipped. Metrics: loss_<split> with fixed noise and without dropping conditions, and for each
    number of steps n the similarities (`metrics.similarity`) as <name>_<n>, over the test split (or the last split that
    is not empty), with baselines from the training pairs; retrieval_at_1_<n> and …_5_<n>: whether a prediction finds an
    image of its caption among those of the split. report: a folder for similarities.png. Raises ValueError if the data
    do not fit the network. Several processes, started by a launcher, share the pairs.
    """
    settings.check(prior.reading.process, prior.reading.drops_conditions)
    sets = {name: data for name, data in splits.items() if data.num_samples}
    for name, data in sets.items():
        if data.shape[-1] != spec.channels:
            raise ValueError(
                f"The {name} split has embeddings of {data.shape[-1]} dimensions but the network was trained on "
                f"{spec.channels}. Evaluate on pairs of the same models."
            )
    estimates: dict[str, Estimate] = {}
    for kind, network in networks.items():
        for name, data in sets.items():
            losses = _losses(network, prior, data, settings)
            estimates["_".join(filter(None, ("loss", kind, name)))] = mean_estimate(losses, 0)
    split, data = list(sets.items())[-1]
    text, image = _embeddings_of_split(prior, data, _rows(data, settings))
    captions = same_rows(text)
    shown: dict[str, Tensor] = {}
    for count in settings.num_steps:
        shown, predicted = _similarities(networks[""], prior, spec, data, settings, count)
        estimates |= {f"{name}_{count}": estimate for name, estimate in _retrieval(predicted, image, captions).items()}
        baseline = {name: cosines for name, cosines in shown.items() if name == "baseline_similarity"}
        estimates |= similarity_estimates(baseline)
        estimates |= {
            f"{name}_{count}": estimate
            for name, estimate in similarity_estimates(shown).items()
            if name not in baseline
        }
    if split != "train" and "train" in sets:
        known = _rows(sets["train"], settings)
        known = known[spread_rows(len(known), _KNOWN)]
        known_text, known_image = _embeddings_of_split(prior, sets["train"], known)
        estimates |= similarity_estimates(baselines(text, image, known_text, known_image))
        nearest = known_image[nearest_captions(text, known_text)]
        estimates |= {
            f"nearest_caption_{name}": estimate for name, estimate in _retrieval(nearest, image, captions).items()
        }
    if report is not None:
        _plot(shown, f"{split} split, {settings.num_steps[-1]} steps", report / "similarities.png")
    how = {"split": split, "data": data.digest, "pairs": data.manifest.get("pairs"), "settings": dump(settings)}
    if any(len(_rows(data, settings)) < data.num_samples for data in sets.values()):
        how["rows"] = "spread"  # earlier versions used the first rows
    protocol = {**how, "digest": digest(how), "num_samples": len(text)}
    return {
        "metrics": {name: estimate.as_dict() for name, estimate in estimates.items()},
        "curve": [],
        "classes": {},
        "protocol": protocol,
    }


def _embeddings_of_split(prior: EvaluatedPrior, data: Shards, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return the embeddings of the captions and of the images of rows of a split, [N, dim] each."""
    pairs = data.gather(rows)
    return caption_inputs(pairs, prior.token_encodings)["text_embed"], pairs[:, IMAGE].float()


def _retrieval(query: Tensor, image: Tensor, captions: Tensor) -> dict[str, Estimate]:
    """Return R@k over at most `_GALLERY` pairs: the rate at which an embedding retrieves an image of its own caption.
    query, image: [N, dim]; captions: the number of each pair's caption, int64 [N]."""
    rows = spread_rows(len(captions), _GALLERY)
    query, image, captions = query[rows], image[rows], captions[rows]
    return retrieval(query, captions, image, captions, f"images of {len(captions.unique()):,} captions")


def _rows(data: Shards, settings: PredictionConfig) -> NDArray[np.int64]:
    """Return the pairs of a split that are used."""
    return spread_rows(data.num_samples, settings.num_pairs or data.num_samples)


@torch.no_grad()
def _losses(network: nn.Module, prior: EvaluatedPrior, data: Shards, settings: PredictionConfig) -> Tensor:
    """Return the loss of each pair, float64 [N], with a fixed noise and timestep for each pair."""
    device = next(network.parameters()).device

    def measure(rows: NDArray[np.int64]) -> Arrays:
        sample = torch.from_numpy(rows).to(device)
        streams = Streams(settings.seed, torch.full_like(sample, _EPOCH), sample)
        batch = pair_batch(data.gather(rows).to(device), streams, prior.reading.scaling, prior.token_encodings)
        return {"loss": prior.objective(network, batch).loss.double().cpu().numpy()}

    parts = _in_batches(measure, "losses", data, settings)
    return torch.cat([part["loss"] for part in parts])


def _similarities(
    network: nn.Module, prior: EvaluatedPrior, spec: DataSpec, data: Shards, settings: PredictionConfig, num_steps: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the similarities of each pair, by name; without those of unrelated pairs if all captions are equal
    (`other_captions`). Also the predictions, [N, dim]."""
    generator = EmbeddingGenerator(network, prior.reading, spec, settings.at(num_steps))
    used = _rows(data, settings)
    others = other_captions(_embeddings_of_split(prior, data, used)[0])

    def measure(rows: NDArray[np.int64]) -> Arrays:
        pairs = data.gather(rows)
        other_pairs = data.gather(rows if others is None else used[others[np.searchsorted(used, rows)]])
        own, other = (caption_inputs(some, prior.token_encodings) for some in (pairs, other_pairs))
        predicted, unrelated = (generator(cond, torch.from_numpy(rows)) for cond in (own, other))
        near = similarities(own["text_embed"], pairs[:, IMAGE].float(), predicted, unrelated)
        return {name: cosines.cpu().numpy() for name, cosines in (near | {"predicted": predicted}).items()}

    every = _in_batches(measure, f"predictions in {num_steps} steps", data, settings)
    by_name = {name: torch.cat([part[name] for part in every]) for name in every[0]}
    predictions = by_name.pop("predicted")
    if others is None:
        by_name = {name: cosines for name, cosines in by_name.items() if "unrelated" not in name}
    return by_name, predictions


def _in_batches(
    measure: Callable[[NDArray[np.int64]], Arrays], title: str, data: Shards, settings: PredictionConfig
) -> list[dict[str, Tensor]]:
    """Return the measurements of the used pairs by batch. The processes share the batches, and each returns all."""
    shared, once, parts = share(_rows(data, settings)), batches([title, data.digest]), []
    with Progress(title, len(shared), "pair") as progress:
        for start in range(0, len(shared), settings.batch_size):
            rows = shared[start : start + settings.batch_size]
            arrays = once(f"{rows[0]}-{rows[-1] + 1}", partial(measure, rows))
            parts.append({name: torch.from_numpy(array) for name, array in arrays.items()})
            progress.advance(len(rows))
    return [part for parts_of_rank in gathered(parts) for part in parts_of_rank]


def _plot(similarities: dict[str, Tensor], title: str, path: Path) -> None:
    """Write two histograms as PNG: cosines of the real images with predictions from their own and other captions."""
    figure = new_figure(8, 4)
    axis = figure.subplots()
    kinds = {"similarity_with_image": "own caption", "unrelated_similarity_with_image": "another caption"}
    for name, label in kinds.items():
        if name in similarities:
            axis.hist(similarities[name].numpy(), bins=50, range=(-1, 1), alpha=0.6, label=label)
    axis.set(title=title, xlabel="cosine of the real image embedding and the one predicted from", ylabel="pairs")
    axis.legend()
    save_figure(figure, path)
