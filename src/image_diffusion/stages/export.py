"""Export weights as a folder that diffusers loads, read foreign weights, or describe an experiment as an RO-Crate.

    python -m image_diffusion export --config export.yaml --weights weights.safetensors --output results/x/diffusers
    python -m image_diffusion export --read DiT-XL-2-256x256.pt --output results/dit/train
    python -m image_diffusion export --crate results/x --snakefile workflow/Snakefile --inputs crop.yaml manifest.json

The first writes a `DiTPipeline`, or an `AutoencoderKL` for a codec, or (export.format: pipeline) any model with its own
pipeline.py and code, and a model card; the folder appears only when it is complete. The second reads published weights
and training states of other projects (docs/exporting.md) and writes weights.safetensors and model.json, for `sample`,
for `evaluate` of a prior, and for further training (train.init_from). The third writes ro-crate-metadata.json into the
experiment's folder, for repositories and provenance tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from image_diffusion.core.config.base import Config, dump, load
from image_diffusion.core.files.atomic import atomic_folder, read_json, sha256_file, write_bytes, write_text
from image_diffusion.core.files.checksums import write_checksums
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.process import command
from image_diffusion.experiments.experiment import ExportStage, load_experiment
from image_diffusion.export import EXPORTS, export_of
from image_diffusion.export.descriptions import CardUse, model_card, write_crate
from image_diffusion.foreign import read_weights
from image_diffusion.foreign.weights import Description, S, description_of
from image_diffusion.metrics.config import PublishedResult
from image_diffusion.networks.weights.dit import class_of, load_tensors
from image_diffusion.systems.base import Model
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.training.load_model import check_trained_by, load_codec, load_model


def write_model(model: Model, format_: str, codec_weights: Path | None, folder: Path) -> CardUse:
    """Write a model in a format of another program. Raises ValueError for a model that the format does not support."""
    codec = load_codec(model, codec_weights, torch.device("cpu"))
    return export_of(model.system, format_).write(model.system, model, codec, folder)


def read_foreign(path: Path, codec: str, experiment: Path | None, folder: Path) -> str:
    """Write a weights folder from a network trained elsewhere. Returns a description of the recognised model.

    codec: of a DiT's latents. experiment: the file that describes a network without a published name. Raises ValueError
    with a list of tensors that are missing, unexpected or of another shape, and for weights that no system recognises.
    """
    content = {} if path.is_dir() else load_tensors(path)

    def described(kind: type[S]) -> Description[S] | None:
        if experiment is None:
            return None
        loaded = load_experiment(experiment)
        return description_of(kind, loaded.system, loaded.data, path, experiment)

    foreign = read_weights(content, path, codec, described)
    if foreign is None:
        raise ValueError(_unknown_weights(content, path))
    save_weights(
        folder,
        foreign.tensors,
        {
            "system": dump(foreign.system),
            "spec": dump(foreign.spec),
            "codec": {"config": dump(foreign.codec), "identity": foreign.identity, "scale": None},
            # Foreign files have no class names.
            "classes": [str(number) for number in range(foreign.spec.num_classes)],
            "step": 0,
            "examples_seen": 0,
            "ema": None,
        },
    )
    unread = f"; not read: {', '.join(foreign.unread)}" if foreign.unread else ""
    return f"{foreign.description}{unread}"


def _unknown_weights(content: Mapping[str, Any], path: Path) -> str:
    """Return the message for a file or folder that no system recognises."""
    advice = (
        "Use weights of a DiT or SiT, of a U-Net of improved-diffusion or guided-diffusion, of lucidrains' RIN, of a "
        "discrete VAE of DALLE-pytorch or OpenAI, of a prior of DALLE2-pytorch, or a folder of a PriorTransformer."
    )
    if path.is_dir():
        name = class_of(path)
        kind = f"of diffusers' {name}, which no system reads" if name else "without a config.json"
        return f"{path} is a folder {kind}. {advice}"
    if {"state", "param_groups"} <= set(content):
        return f"{path} is the state of an optimizer, without weights. Use the file of weights beside it, ema_….pt."
    names = ", ".join(list(content)[:4])
    return f"{path} holds no weights that a system reads; its first entries are {names}. {advice}"


class Published(Config):
    """A published checkpoint of another project."""

    file: str
    """Name of the file."""
    what: str
    """Model and paper of the checkpoint."""
    source: str
    """The page of its authors."""
    licence: str
    """Licence of its authors."""
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the file, if its authors give it."""
    codec: str | None = None
    """Autoencoder of its latents, if it has latents: a folder or a name on the Hugging Face Hub."""
    experiment: str | None = None
    """Experiment file that describes properties missing from the checkpoint, as --experiment of export: its path
    relative to this description."""
    cited: tuple[PublishedResult, ...] = ()
    """Results that its authors measured, and the differences if its images are made by this package."""
    sample: SampleConfig
    """Settings for sampling from it."""


def read_published(config: Path, path: Path, codec: str | None, folder: Path) -> Published:
    """Write a weights folder from the file of a description.

    codec: replaces the codec of the description. Raises ValueError for another file.
    """
    published = load(Published, config)
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist. Get {published.file} from {published.source}; nothing is downloaded here."
        )
    if path.name != published.file:
        raise ValueError(f"{config} describes {published.file}, but --read is {path}. Name the one that it describes.")
    if published.sha256 is not None and sha256_file(path) != published.sha256:
        raise ValueError(f"{path} is damaged, or another file: its sha256 is not {published.sha256}. Copy it again.")
    experiment = config.parent / published.experiment if published.experiment is not None else None
    read_foreign(path, codec or published.codec or "", experiment, folder)
    return published


def check_metrics_of(sha256: str, measured: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError if the metrics of a file are of other weights than those with this sha256."""
    if measured["protocol"].get("weights", {}).get("sha256", sha256) != sha256:
        raise ValueError(f"{path} is of other weights than --weights. Run evaluate with these weights.")


def main() -> None:
    parser = command.Parser(prog="image-diffusion export", description=str(__doc__).partition("\n")[0])
    parser.add_config("the stage's configuration, export.yaml", required=False)
    parser.add_path("--weights", "weights.safetensors that train wrote")
    parser.add_path("--trained-by", "train.yaml: refuse weights of any other training")
    parser.add_path("--codec-weights", "weights.safetensors of the experiment that trained the codec")
    parser.add_path("--metrics", "metrics.json, for the model card")
    parser.add_path("--grid", "picture of samples, for the model card")
    parser.add_argument("--data-name", default="unknown", help="name of the data set, for the model card")
    parser.add_path("--read", "foreign weights to read: a .pt or .safetensors file, or a diffusers folder")
    parser.add_argument(
        "--codec", default="stabilityai/sd-vae-ft-ema", help="with --read: the autoencoder of the latents"
    )
    parser.add_path("--experiment", "with --read: experiment file, for settings that the weights do not contain")
    parser.add_path("--crate", "folder of an experiment, to describe as an RO-Crate", metavar="EXPERIMENT")
    parser.add_path("--snakefile", "with --crate: Snakefile of the workflow")
    parser.add_path("--inputs", "with --crate: configurations and manifests of the data", nargs="+")
    parser.add_path("--output", "folder to write; not needed with --crate")
    arguments = parser.parse_args()

    if arguments.crate is not None:
        if arguments.snakefile is None or arguments.inputs is None:
            raise ValueError("--crate describes a run: give its --snakefile and its --inputs as well.")
        write_crate(arguments.crate, arguments.snakefile, arguments.inputs)
        print(f"export: {arguments.crate} is an RO-Crate")
        return
    if arguments.output is None:
        parser.error("--output is required: the folder to write")
    if arguments.read is not None:
        kind = read_foreign(arguments.read, arguments.codec, arguments.experiment, arguments.output)
        print(f"export: wrote {arguments.output} from {arguments.read}: {kind}")
        return
    if arguments.config is None or arguments.weights is None:
        raise ValueError("Give --config and --weights to write a diffusers folder, or --read to read foreign weights.")
    stage = load(ExportStage, arguments.config, arguments.changes)
    if stage.export.format == "none":
        formats = " or ".join(dict.fromkeys(name for exports in EXPORTS.values() for name in exports))
        raise ValueError(f"export.format is none: there is nothing to write. Set it to {formats}.")
    codec_weights = arguments.codec_weights.parent if arguments.codec_weights else None
    check_trained_by(arguments.weights.parent, arguments.trained_by)
    model = load_model(arguments.weights.parent)
    measured = read_json(arguments.metrics) if arguments.metrics else None
    if measured is not None:
        check_metrics_of(model.sha256, measured, arguments.metrics)
    name = arguments.output.resolve().parent.name
    with atomic_folder(arguments.output) as folder:
        use = write_model(model, stage.export.format, codec_weights, folder)
        pictures = {}
        if arguments.grid is not None:
            write_bytes(folder / "grid.png", arguments.grid.read_bytes())
            pictures["grid.png"] = "Samples"
        write_text(folder / "README.md", model_card(name, arguments.data_name, model, use, measured, pictures))
        write_checksums(folder)
    print(f"export: {arguments.output} is a folder for {use.library}")
