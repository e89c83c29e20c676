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
from image_diffusion.core.process.progress import Progress
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec, Objective
from image_diffusion.data.encoded.pairs import IMAGE, TEXT
from image_diffusion.data.shards.reader import Shards, Split
from image_diffusion.metrics.distances.jackknife import Estimate, mean_estimate
from image_diffusion.metrics.images.embedding_similarity import (
    baselines,
    caption_retrieval,
    nearest_captions,
    other_captions,
    plot_similarities,
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


class PredictionConfig(EmbeddingSampling):
    """Settings of the evaluation of a prior: image embeddings made from captions, compared with the real ones."""

    num_steps: tuple[int, ...] = Field((64,), min_length=1)
    """Numbers of sampling steps, each evaluated separately; they replace the sampler's own number."""
    num_pairs: int | None = Field(10_000, ge=1)
    """Number of pairs used of each split, spread evenly over it, or all if there are fewer; null: all."""

    def checked(self, process: Discrete, drops_conditions: bool) -> dict[int, EmbeddingSampling]:
        """Return the settings for each number of steps. Raises ValueError if steps or guidance do not fit.
        drops_conditions: whether training drops the network's conditions."""
        common = {name: value for name, value in dump(self).items() if name in EmbeddingSampling.model_fields}
        settings = {}
        check_guided("prediction", self, drops_conditions)
        for count in self.num_steps:
            if not 1 <= count <= process.num_timesteps:
                raise ValueError(
                    f"prediction.num_steps holds {count}; expected from 1 to process.num_timesteps = "
                    f"{process.num_timesteps}."
                )
            sampler = common["sampler"] | {"num_steps": count}
            settings[count] = EmbeddingSampling.model_validate(common | {"sampler": sampler})
            settings[count].sampler.grid(process)
        return settings


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
    splits: ClassVar[tuple[Split, ...]] = ("train", "validation", "test")

    reading: Callable[[DataSpec], EmbeddingReading]
    objective: Callable[[DataSpec], Objective]
    token_encodings: bool

    def headline(self, settings: PredictionConfig) -> str:
        return "loss_validation"

    def evaluate(self, inputs: EvaluationInputs) -> dict[str, Any]:
        assert inputs.model is not None
        spec = inputs.model.spec
        networks = {"": on_best_device(inputs.model)}
        if (raw := inputs.raw()) is not None:
            networks["online"] = raw
        prior = EvaluatedPrior(self.reading(spec), self.objective(spec), self.token_encodings)
        return evaluate_prior(networks, prior, spec, inputs.splits, inputs.settings, inputs.report)


def evaluate_prior(
    networks: Mapping[str, nn.Module],
    prior: EvaluatedPrior,
    spec: DataSpec,
    splits: Mapping[Split, Shards],
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
    samplings = settings.checked(prior.reading.process, prior.reading.drops_conditions)
    sets = {name: data for name, data in splits.items() if data.num_samples}
    for name, data in sets.items():
        if data.shape[-1] != spec.channels:
            raise ValueError(
                f"The {name} split has embeddings of {data.shape[-1]} dimensions but the network was trained on "
                f"{spec.channels}. Evaluate on pairs of the same models."
            )
    used = {name: spread_rows(data.num_samples, settings.num_pairs or data.num_samples) for name, data in sets.items()}
    estimates: dict[str, Estimate] = {}
    for kind, network in networks.items():
        for name, data in sets.items():
            losses = _losses(network, prior, data, used[name], settings.seed, settings.batch_size)
            estimates["_".join(filter(None, ("loss", kind, name)))] = mean_estimate(losses, 0)
    split, data = list(sets.items())[-1]
    pairs = data.gather(used[split])
    text, image = pairs[:, TEXT].float(), pairs[:, IMAGE].float()
    captions, others = same_rows(text), other_captions(text)
    shown: dict[str, Tensor] = {}
    for count, sampling in samplings.items():
        generator = EmbeddingGenerator(networks[""], prior.reading, spec, sampling)
        predict = partial(_predict, generator, pairs, used[split], others, prior.token_encodings)
        shown = _in_batches(predict, f"predictions in {count} steps", data.digest, used[split], settings.batch_size)
        predicted = shown.pop("predicted")
        if others is None:
            shown = {name: cosines for name, cosines in shown.items() if "unrelated" not in name}
        measured = caption_retrieval(predicted, image, captions) | similarity_estimates(shown)
        for metric, estimate in measured.items():
            estimates[metric if metric == "baseline_similarity" else f"{metric}_{count}"] = estimate
    if split != "train" and "train" in sets:
        known = sets["train"].gather(used["train"][spread_rows(len(used["train"]), _KNOWN)])
        known_text, known_image = known[:, TEXT].float(), known[:, IMAGE].float()
        estimates |= similarity_estimates(baselines(text, image, known_text, known_image))
        nearest = caption_retrieval(known_image[nearest_captions(text, known_text)], image, captions)
        estimates |= {f"nearest_caption_{name}": estimate for name, estimate in nearest.items()}
    if report is not None:
        plot_similarities(shown, f"{split} split, {settings.num_steps[-1]} steps", report / "similarities.png")
    how = {"split": split, "data": data.digest, "pairs": data.manifest.get("pairs"), "settings": dump(settings)}
    if any(len(used[name]) < data.num_samples for name, data in sets.items()):
        how["rows"] = "spread"  # earlier versions used the first rows
    protocol = {**how, "digest": digest(how), "num_samples": len(text)}
    return {
        "metrics": {name: estimate.as_dict() for name, estimate in estimates.items()},
        "curve": [],
        "classes": {},
        "protocol": protocol,
    }


@torch.no_grad()
def _losses(
    network: nn.Module, prior: EvaluatedPrior, data: Shards, used: NDArray[np.int64], seed: int, batch_size: int
) -> Tensor:
    """Return the loss of each used pair, float64 [N], with a fixed noise and timestep for each pair."""
    device = next(network.parameters()).device

    def measure(rows: NDArray[np.int64]) -> Arrays:
        sample = torch.from_numpy(rows).to(device)
        streams = Streams(seed, torch.full_like(sample, _EPOCH), sample)
        pairs = data.gather(rows).to(device)
        batch = pair_batch(pairs, streams, prior.reading.scaling, prior.token_encodings)
        return {"loss": prior.objective(network, batch).loss.double().cpu().numpy()}

    return _in_batches(measure, "losses", data.digest, used, batch_size)["loss"]


def _predict(
    generator: EmbeddingGenerator,
    pairs: Tensor,
    used: NDArray[np.int64],
    others: NDArray[np.int64] | None,
    token_encodings: bool,
    rows: NDArray[np.int64],
) -> Arrays:
    """Return the similarities of rows by name, [B], and the predictions, [B, dim].

    pairs: [N, 2 + L, dim], of the rows `used`, in order. others: for each of them the place of a pair with another
    caption (`other_captions`).
    """
    places = np.searchsorted(used, rows)
    own_pairs, other_pairs = pairs[places], pairs[places if others is None else others[places]]
    own, other = (caption_inputs(some, token_encodings) for some in (own_pairs, other_pairs))
    predicted, unrelated = (generator(cond, torch.from_numpy(rows)) for cond in (own, other))
    near = similarities(own["text_embed"], own_pairs[:, IMAGE].float(), predicted, unrelated)
    return {name: values.cpu().numpy() for name, values in (near | {"predicted": predicted}).items()}


def _in_batches(
    measure: Callable[[NDArray[np.int64]], Arrays],
    title: str,
    data_digest: str,
    used: NDArray[np.int64],
    batch_size: int,
) -> dict[str, Tensor]:
    """Return the measurements of the used pairs, by name. The processes share the batches, and each returns all."""
    shared, once, parts = share(used), batches([title, data_digest]), []
    with Progress(title, len(shared), "pair") as progress:
        for start in range(0, len(shared), batch_size):
            rows = shared[start : start + batch_size]
            parts.append(once(f"{rows[0]}-{rows[-1] + 1}", partial(measure, rows)))
            progress.advance(len(rows))
    every = [part for parts_of_rank in gathered(parts) for part in parts_of_rank]
    return {name: torch.from_numpy(np.concatenate([part[name] for part in every])) for name in every[0]}
