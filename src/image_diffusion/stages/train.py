"""Train a model on shards. It can be killed at any moment; the same command resumes.

    torchrun --standalone --nproc-per-node 2 -m image_diffusion train --config train.yaml --data manifest.json \\
        --output results/x/train/weights.safetensors

Also runs in one process. Checkpoints are in `state`, next to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from image_diffusion.codecs.base import Codec
from image_diffusion.core.config.base import dump, load
from image_diffusion.core.devices import best_device
from image_diffusion.core.files.atomic import digest
from image_diffusion.core.process import command
from image_diffusion.core.process.errors import log_line
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import NUMBERS, Batch, DataSpec, WeightsOf
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.data.shards.remote import folder_of, place
from image_diffusion.data.shards.staging import begin_staging
from image_diffusion.experiments.experiment import TrainStage
from image_diffusion.systems.base import check_flips
from image_diffusion.systems.pairs.inputs import pairs_by_kind, pairs_entry
from image_diffusion.systems.sampling import PreviewInputs
from image_diffusion.training.parallel.world import HANG_S, World, place_on_node
from image_diffusion.training.session import run
from image_diffusion.training.trainer import Task

SMALLER = ("train.microbatch", "preview.batch_size")
"""Keys of an experiment that make the command need less memory when they are smaller."""


def main() -> None:
    parser = command.Parser(prog="image-diffusion train", description="Train a model on shards.")
    parser.add_config("the stage's configuration, YAML")
    parser.add_argument(
        "--data", type=place, required=True, help="manifest.json of crops, latents or pairs: path or URL"
    )
    parser.add_path("--codec-weights", "weights.safetensors of the trained codec")
    parser.add_path("--init-from", "weights.safetensors of the experiment in train.init_from")
    parser.add_argument(
        "--pairs", type=place, nargs="+", default=[], help="manifest.json of each set that is read with the data"
    )
    parser.add_argument("--stage-to", default="", help="folder on a local disk of this node, to copy the data to")
    parser.add_argument(
        "--hang-s", type=float, default=HANG_S, help="seconds that a process waits for another (default: %(default)s)"
    )
    parser.add_path("--output", "weights.safetensors to write", required=True)
    parser.add_path("--journal", "folder of the journal")
    arguments = parser.parse_args()
    output: Path = arguments.output.parent
    training = prepare_training(
        arguments.config, arguments.data, arguments.codec_weights, arguments.pairs, arguments.changes
    )
    config = training.stage.train
    start: Path | None = arguments.init_from.parent if arguments.init_from else None
    if isinstance(config.init_from, WeightsOf) and start is None:
        raise ValueError(
            f"train.init_from names the experiment {config.init_from.experiment}. Give its weights.safetensors as "
            f"--init-from."
        )
    if arguments.stage_to:
        begin_staging(training.sets, arguments.stage_to, place_on_node())
    journal, hang_s = arguments.journal, arguments.hang_s
    run(training.build, config, training.model, training.data, output, journal, start, hang_s, training.split)


@dataclass(frozen=True)
class Training:
    """Training of a stage, assembled from its configuration.

    spec: of the training data. decoder: builds the codec for previews. task: a network -> its training task. sets: of
    shards that are read. model, data, split: as in `training.session.run`.
    """

    stage: TrainStage
    spec: DataSpec
    decoder: Callable[[], Codec]
    task: Callable[[nn.Module], Task]
    sets: tuple[Shards, ...]
    model: dict[str, Any]
    data: dict[str, Any]
    split: str

    def network(self) -> nn.Module:
        """Return the network, randomly initialised."""
        network: nn.Module = self.stage.system.build_network(self.spec)
        return network

    def build(self, world: World) -> Task:
        """Return the training task."""
        return self.task(self.network())


def prepare_training(
    config: Path,
    data: Path | str,
    codec_weights: Path | None,
    pairs: Sequence[Path | str] = (),
    changes: Sequence[str] = (),
) -> Training:
    """Assemble the training of a configuration file on the data of a manifest. pairs: the manifests of additional sets
    that the system reads. changes: values that replace those of the file.

    Raises ValueError if configuration, data, pairs and codec do not fit one another.
    """
    stage = load(TrainStage, config, changes)
    folder = folder_of(data)
    training = open_shards(folder, "train", in_background=True)
    validation = open_shards(folder, "validation", in_background=True)
    for split in (training, validation):
        join_pairs(stage, split, pairs)
    if training.num_samples < stage.train.global_batch:
        raise ValueError(
            f"The data set has {training.num_samples:,} training images, fewer than one batch of "
            f"train.global_batch = {stage.train.global_batch}. Add images, or make the batch smaller."
        )
    if stage.train.balance_classes and not training.num_classes:
        raise ValueError("train.balance_classes is true, but the data have no classes. Leave it out.")
    system, kind = stage.system, training.manifest["kind"]
    if kind not in system.reads:
        raise ValueError(
            f"{folder} holds {kind}, from which a {system.type} does not learn. Give it {' or '.join(system.reads)}."
        )
    check_flips(system, stage.train.flip_probability)
    if stage.train.flip_probability > 0 and not training.has_mirror_images:
        raise ValueError(
            f"train.flip_probability is {stage.train.flip_probability:g}, but {folder} holds no mirror images. Set it "
            f"to 0."
        )
    scale = stage.codec.scale_of(training.manifest.get("levels" if kind == "crops" else "statistics"))
    # On the CPU and undecoded: training reads stored latents, and only previews need the decoder.
    weights = codec_weights.parent if codec_weights else None
    codec = codec_of(stage, scale, training, weights)
    spec = system.spec(training)

    def decoder() -> Codec:
        codec: Codec = stage.codec.build(weights, scale, best_device(), torch.float32)
        return codec

    def prepare(stored: Tensor, label: Tensor, streams: Streams, *joined_sets: Tensor) -> Batch:
        return system.batch(
            stored, label, streams, spec, codec, dict(zip(training.joined_sets, joined_sets, strict=True))
        )

    inputs = PreviewInputs(spec, decoder, stage.preview, training, validation, stage.train.validation_samples)
    preview = system.sampling().preview(inputs) if stage.train.grid_every_steps is not None else None

    carried = training.carried()

    def task(network: nn.Module) -> Task:
        objective = system.build_objective(spec)
        held_out = validation if validation.num_samples else None
        return Task(network, objective, prepare, training, held_out, preview, carried)

    model = {
        "system": dump(system),
        "spec": dump(spec),
        "codec": {"config": dump(stage.codec), "identity": codec.identity, "scale": scale},
        "classes": training.classes,
    }
    if untrained := training.untrained():
        model["untrained"] = untrained
        some = ", ".join(untrained[:8]) + (", …" if len(untrained) > 8 else "")
        log_line(f"train: {len(untrained):,} classes have no training image, and are drawn only by name: {some}.")
    read = training.joined_sets or {kind: training}
    described = {of_kind: shards.manifest["pairs"] for of_kind, shards in read.items() if "pairs" in shards.manifest}
    if described:
        model["pairs"] = pairs_entry(described, system.joined_kinds)
    if NUMBERS in read and "missing_numbers" in read[NUMBERS].manifest:
        model["missing_numbers"] = read[NUMBERS].manifest["missing_numbers"]
    if carried:
        model["carried"] = training.manifest["carried"]
    sets = tuple(shards for split in (training, validation) for shards in (split, *split.joined_sets.values()))
    selection = digest([training.selection, validation.selection])
    return Training(stage, spec, decoder, task, sets, model, {"digest": training.digest}, selection)


def join_pairs(stage: TrainStage, data: Shards, pairs: Sequence[Path | str]) -> None:
    """Join to the data the additional sets that the system reads, in its order. Raises ValueError if sets are missing
    or do not fit."""
    kinds = stage.system.joined_kinds
    if bool(kinds) != bool(pairs):
        raise ValueError(
            f"A {stage.system.type} reads nothing beside its data. Leave --pairs out."
            if not kinds
            else f"The {stage.system.type} reads {' and '.join(kinds)} beside its data. Name their manifest.json: "
            f"--pairs."
        )
    opened = {folder_of(manifest): open_shards(folder_of(manifest), "all", in_background=True) for manifest in pairs}
    of_kind = {shards.manifest["kind"]: folder for folder, shards in opened.items()}
    held = [shards.manifest["kind"] for shards in opened.values()]
    if len(held) > len(kinds):
        unread = next(kind for kind in held if kind not in kinds or held.count(kind) > 1)
        raise ValueError(
            f"--pairs names {len(held)} sets, but the {stage.system.type} reads {' and '.join(kinds)} beside its data. "
            f"Leave out a set of {unread}."
        )
    wanted = pairs_by_kind(stage.encoder, kinds)
    for kind in kinds:
        if kind not in of_kind:
            folder, other = next((folder, other) for other, folder in of_kind.items())
            raise ValueError(f"{folder} holds {other}, not {kind}. Name the {kind}: --pairs.")
        joined = opened[of_kind[kind]]
        encoder = joined.manifest["pairs"].get("encoder")
        if kind in wanted and wanted[kind] != encoder:
            raise ValueError(
                f"The {kind} in {of_kind[kind]} were encoded by {encoder}, but the experiment names {wanted[kind]}. "
                f"Run embed again, or let the section pairs name the one that encoded them."
            )
        data.join(joined)


def codec_of(stage: TrainStage, scale: Any, data: Shards, weights: Path | None) -> Codec:
    """Return the codec of the experiment. scale: of the data. weights: folder of the trained codec. Raises ValueError
    when another codec wrote the data."""
    codec: Codec = stage.codec.build(weights, scale, torch.device("cpu"), torch.float32)
    written_by: dict[str, Any] = data.manifest.get("codec", {"type": "rgb"})
    if written_by != codec.identity:
        raise ValueError(
            f"The latents were written by the codec {written_by}, but the experiment names {codec.identity}. "
            f"Run encode again, or set codec to the one that wrote them."
        )
    return codec
