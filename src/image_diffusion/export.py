"""Stage `export`: weights -> a folder that diffusers loads; and foreign weights -> a weights folder.

    python -m image_diffusion.export --config export.yaml --weights weights.safetensors --output results/x/diffusers
    python -m image_diffusion.export --read DiT-XL-2-256x256.pt --output results/dit/train

The first writes a `DiTPipeline`, or an `AutoencoderKL` for a codec, with a model card beside it. The second reads the
published DiT weights, a training checkpoint of the original, a diffusers folder of a DiT, the published U-Nets of
improved-diffusion and guided-diffusion, or a prior of DALLE2-pytorch, and writes weights.safetensors and model.json,
from which `sample` makes images without training and `evaluate` judges a prior.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from image_diffusion.codecs.kl import KlCodec
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.codecs.stability_vae import StabilityVae
from image_diffusion.core import command
from image_diffusion.core.config import Config, dump, load
from image_diffusion.core.files import read_json, write_bytes, write_text
from image_diffusion.core.types import DataSpec
from image_diffusion.core.weights import save_weights
from image_diffusion.experiment import ExportStage, load_experiment
from image_diffusion.networks.autoencoder import Autoencoder
from image_diffusion.networks.dit import DiT
from image_diffusion.networks.dit_diffusers import ddim_scheduler, flow_scheduler, write_dit_pipeline
from image_diffusion.networks.dit_weights import load_tensors, read_dit
from image_diffusion.networks.unet_weights import is_unet
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.discrete import Discrete
from image_diffusion.process.flow import Flow
from image_diffusion.systems.dit import DiTSystem
from image_diffusion.systems.iddpm import IddpmSystem
from image_diffusion.systems.iddpm_published import read_iddpm
from image_diffusion.systems.prior import PriorSystem
from image_diffusion.systems.prior_published import is_prior, read_prior
from image_diffusion.training.card import model_card
from image_diffusion.training.model import Model, load_codec, load_model
from image_diffusion.training.trained_by import check_trained_by


def write_diffusers(model: Model, codec_weights: Path | None, folder: Path) -> None:
    """Write a model as diffusers knows it. Raises ValueError for what diffusers has no place for."""
    if isinstance(model.network, Autoencoder):
        _write_vae(model.network, folder)
        return
    if not isinstance(model.network, DiT) or not isinstance(model.system, DiTSystem):
        raise ValueError(f"Diffusers has no pipeline for the system {model.system.type}. Set export.format to none.")
    codec = load_codec(model, codec_weights, torch.device("cpu"))
    if not isinstance(codec, KlCodec):
        raise ValueError(
            "Diffusers' DiTPipeline works on latents, but this model works on pixels. Set export.format to none."
        )
    process, prediction = model.system.process, model.system.objective.prediction
    scheduler: Any
    if isinstance(process, Flow):
        scheduler = flow_scheduler(process.time_scale, prediction)
    elif isinstance(process, Discrete) and process.respacing == "" and not process.rescale_timesteps:
        scheduler = ddim_scheduler(process.build().betas, prediction)
    else:
        raise ValueError(
            "Diffusers' DiTPipeline has no scheduler for this process. Train on a discrete process with all its "
            "timesteps or on a flow process, or set export.format to none."
        )
    write_dit_pipeline(folder, model.network, codec.vae, codec.scale, scheduler, model.classes)


def _write_vae(network: Autoencoder, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        written = Path(temporary) / folder.name
        network.vae.save_pretrained(written)
        if folder.exists():
            shutil.rmtree(folder)
        written.rename(folder)


def read_foreign(path: Path, codec: str, experiment: Path | None, folder: Path) -> None:
    """Write a weights folder from a DiT, a U-Net or a prior that was trained elsewhere.

    codec: of a DiT's latents. experiment: the file that describes a U-Net or a prior of no published name. Raises
    ValueError listing what is missing, unexpected or of another shape.
    """
    content = {} if path.is_dir() else load_tensors(path)
    if is_prior(content):
        _read_prior(content, path, experiment, folder)
    elif is_unet(content):
        _read_unet(content, path, experiment, folder)
    else:
        _read_dit(path, content, codec, folder)


def _read_dit(path: Path, content: Mapping[str, Any], codec: str, folder: Path) -> None:
    """A DiT predicts eps, with a learned variance, on 1,000 linear steps."""
    weights = read_dit(path, content=content)
    learned = weights.learned_variance
    objective = Denoising(
        prediction="eps",
        variance="learned_range" if learned else "fixed_large",
        loss="hybrid" if learned else "simple",
        label_drop_probability=0.1 if weights.spec.num_classes else 0.0,
    )
    vae = StabilityVae(weights=codec)
    identity = vae.build(None, None, torch.device("cpu"), torch.float32).identity
    system = DiTSystem(network=weights.config, objective=objective)
    _save(folder, weights.tensors, system, weights.spec, vae, identity)


def _read_unet(tensors: Mapping[str, Tensor], path: Path, experiment: Path | None, folder: Path) -> None:
    """A U-Net on pixels, of a published name or as an experiment file describes it."""
    described = None
    if experiment is not None:
        sections = load_experiment(experiment)
        if not isinstance(sections.system, IddpmSystem):
            raise ValueError(f"{path} is a U-Net, but {experiment} has system.type {sections.system.type}. Use iddpm.")
        described = sections.system, DataSpec(channels=sections.data.channels, resolution=sections.data.resolution)
    system, spec = read_iddpm(tensors, path, described)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    _save(folder, tensors, system, spec, Rgb(), Rgb().identity)


def _read_prior(content: Mapping[str, Any], path: Path, experiment: Path | None, folder: Path) -> None:
    """A prior of DALLE2-pytorch, of a published name or as an experiment file describes it."""
    described = None
    if experiment is not None:
        named = load_experiment(experiment).system
        if not isinstance(named, PriorSystem):
            raise ValueError(f"{path} is a prior, but {experiment} has system.type {named.type}. Use prior.")
        described = named
    tensors, system, spec = read_prior(content, path, described)
    _save(folder, tensors, system, spec, Rgb(), Rgb().identity)


def _save(
    folder: Path, tensors: Mapping[str, Tensor], system: Config, spec: DataSpec, codec: Config, identity: dict[str, Any]
) -> None:
    save_weights(
        folder,
        tensors,
        {
            "system": dump(system),
            "spec": dump(spec),
            "codec": {"config": dump(codec), "identity": identity, "scale": None},
            "classes": [str(number) for number in range(spec.num_classes)],
            "step": 0,
            "examples_seen": 0,
            "ema": None,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m image_diffusion.export", description="Weights <-> other programs.")
    parser.add_argument("--config", type=Path, help="the stage's configuration, export.yaml")
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
    parser.add_argument("--experiment", type=Path, help="with --read: describes a U-Net or prior of no published name")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    arguments = parser.parse_args()

    if arguments.read is not None:
        read_foreign(arguments.read, arguments.codec, arguments.experiment, arguments.output)
        print(f"export: read {arguments.read} into {arguments.output}")
        return
    if arguments.config is None or arguments.weights is None:
        raise ValueError("Give --config and --weights to write a diffusers folder, or --read to read foreign weights.")
    stage = load(ExportStage, arguments.config)
    if stage.export.format == "none":
        raise ValueError("export.format is none: there is nothing to write. Set it to diffusers.")
    codec_weights = arguments.codec_weights.parent if arguments.codec_weights else None
    check_trained_by(arguments.weights.parent, arguments.trained_by)
    model = load_model(arguments.weights.parent)
    write_diffusers(model, codec_weights, arguments.output)
    pictures = {}
    if arguments.grid is not None:
        write_bytes(arguments.output / "grid.png", arguments.grid.read_bytes())
        pictures["grid.png"] = "Samples"
    measured = read_json(arguments.metrics) if arguments.metrics else None
    name = arguments.output.resolve().parent.name
    write_text(arguments.output / "README.md", model_card(name, arguments.data_name, model, measured, pictures))
    print(f"export: {arguments.output} is a folder for diffusers")


if __name__ == "__main__":
    command.run(main)
