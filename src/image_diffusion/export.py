"""Stage `export`: weights -> a folder that diffusers loads; and foreign weights -> a weights folder.

    python -m image_diffusion.export --config export.yaml --weights weights.safetensors --output results/x/diffusers
    python -m image_diffusion.export --read DiT-XL-2-256x256.pt --output results/dit/train

The first writes a `DiTPipeline`, or an `AutoencoderKL` for a codec, or (export.format: pipeline) any model with a
pipeline.py and code of its own, and a model card beside it, whole or not at all. The second
reads published weights and training states of others (docs/exporting.md) and writes weights.safetensors and model.json,
from which `sample` makes images without training, `evaluate` judges a prior, and `train` goes on (train.init_from).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from image_diffusion.core import command
from image_diffusion.core.config import dump, load
from image_diffusion.core.files import atomic_folder, read_json, write_bytes, write_text
from image_diffusion.core.verify import write_checksums
from image_diffusion.core.weights import save_weights
from image_diffusion.experiment import Experiment, ExportStage, load_experiment
from image_diffusion.networks.dit_weights import class_of, load_tensors
from image_diffusion.systems import SYSTEMS
from image_diffusion.systems.given import CardUse, Described, Foreign, Model
from image_diffusion.systems.system import System, name_of, no_export
from image_diffusion.training.card import model_card
from image_diffusion.training.model import load_codec, load_model
from image_diffusion.training.trained_by import check_trained_by


def write_model(model: Model, format_: str, codec_weights: Path | None, folder: Path) -> CardUse:
    """Write a model as another program reads it. Raises ValueError for what that has no place for."""
    if format_ not in model.system.exports:
        raise ValueError(no_export(model.system, format_))
    return model.system.export(model, load_codec(model, codec_weights, torch.device("cpu")), format_, folder)


def read_foreign(path: Path, codec: str, experiment: Path | None, folder: Path) -> str:
    """Write a weights folder from a network that was trained elsewhere. Returns what it was taken for.

    codec: of a DiT's latents. experiment: the file that describes a network of no published name. Raises ValueError
    listing what is missing, unexpected or of another shape, or for weights of a kind that no system knows.
    """
    content = {} if path.is_dir() else load_tensors(path)

    def described(kind: type[System]) -> Experiment | None:
        found = None if experiment is None else load_experiment(experiment)
        name = name_of(kind)
        if found is not None and found.system.type != name:
            raise ValueError(
                f"{path} is of a system of type {name}, but {experiment} has system.type {found.system.type}. Use "
                f"{name}."
            )
        return found

    found = next(
        (each for each in (_read(system, content, path, codec, described) for system in SYSTEMS) if each), None
    )
    if found is None:
        raise ValueError(_not_known(content, path))
    save_weights(
        folder,
        found.tensors,
        {
            "system": dump(found.system),
            "spec": dump(found.spec),
            "codec": {"config": dump(found.codec), "identity": found.identity, "scale": None},
            "classes": [str(number) for number in range(found.spec.num_classes)],
            "step": 0,
            "examples_seen": 0,
            "ema": None,
        },
    )
    unread = f"; not read: {', '.join(found.unread)}" if found.unread else ""
    return f"{found.told}{unread}"


def _read(
    system: type[System], content: Mapping[str, Any], path: Path, codec: str, described: Described
) -> Foreign | None:
    """What a kind of system makes of a file's content. Raises ValueError for half of a network, whatever is missing."""
    try:
        return system.read_foreign(content, path, codec, described)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} looks like weights of a system of type {name_of(system)}, but is not whole: {what}. Use a file "
            f"that was written whole."
        ) from None


def _not_known(content: Mapping[str, Any], path: Path) -> str:
    """What is said of a file or folder that no system knows."""
    known = (
        "Give those of a DiT or SiT, of a U-Net of improved-diffusion or guided-diffusion, of lucidrains' RIN, of a "
        "discrete VAE of DALLE-pytorch or OpenAI, of a prior of DALLE2-pytorch, or a folder of a PriorTransformer."
    )
    if path.is_dir():
        found = class_of(path)
        what = f"of diffusers' {found}, which is not known here" if found else "without a config.json"
        return f"{path} is a folder {what}. {known}"
    if {"state", "param_groups"} <= set(content):
        return (
            f"{path} is the state of an optimizer, without weights. Give the file beside it that holds them, ema_….pt."
        )
    names = ", ".join(list(content)[:4])
    return f"{path} holds no weights that are known here; its first entries are {names}. {known}"


def main() -> None:
    parser = command.Parser(prog="python -m image_diffusion.export", description="Weights <-> other programs.")
    parser.add_config("the stage's configuration, export.yaml", required=False)
    parser.add_argument("--weights", type=Path, help="weights.safetensors that train wrote")
    parser.add_argument("--trained-by", type=Path, help="train.yaml: refuse weights of any other training")
    parser.add_argument(
        "--codec-weights", type=Path, help="weights.safetensors of the experiment that trained the codec"
    )
    parser.add_argument("--metrics", type=Path, help="metrics.json, for the model's card")
    parser.add_argument("--grid", type=Path, help="a picture of samples, for the model's card")
    parser.add_argument("--data-name", default="unknown", help="name of the data set, for the model's card")
    parser.add_argument(
        "--read", type=Path, help="foreign weights to read: a .pt or .safetensors file, or a diffusers folder"
    )
    parser.add_argument(
        "--codec", default="stabilityai/sd-vae-ft-ema", help="with --read: the autoencoder of the latents"
    )
    parser.add_argument("--experiment", type=Path, help="with --read: describes what the file does not tell")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    arguments = parser.parse_args()

    if arguments.read is not None:
        told = read_foreign(arguments.read, arguments.codec, arguments.experiment, arguments.output)
        print(f"export: read {arguments.read}, {told}, into {arguments.output}")
        return
    if arguments.config is None or arguments.weights is None:
        raise ValueError("Give --config and --weights to write a diffusers folder, or --read to read foreign weights.")
    stage = load(ExportStage, arguments.config, arguments.changes)
    if stage.export.format == "none":
        raise ValueError("export.format is none: there is nothing to write. Set it to diffusers or pipeline.")
    codec_weights = arguments.codec_weights.parent if arguments.codec_weights else None
    check_trained_by(arguments.weights.parent, arguments.trained_by)
    model = load_model(arguments.weights.parent)
    measured = read_json(arguments.metrics) if arguments.metrics else None
    name = arguments.output.resolve().parent.name
    with atomic_folder(arguments.output) as folder:
        use = write_model(model, stage.export.format, codec_weights, folder)
        pictures = {}
        if arguments.grid is not None:
            write_bytes(folder / "grid.png", arguments.grid.read_bytes())
            pictures["grid.png"] = "Samples"
        write_text(folder / "README.md", model_card(name, arguments.data_name, model, use, measured, pictures))
        write_checksums(folder)
    print(f"export: {arguments.output} is a folder for diffusers")


if __name__ == "__main__":
    command.run(main)
