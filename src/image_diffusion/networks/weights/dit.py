"""DiT weights from other programs: published files, the original's training checkpoints, diffusers folders.

No code in such a file is run: `.pt` and `.bin` files are read with `weights_only=True`.

A SiT becomes a flow here (Ma et al. 2024, arXiv:2401.08740, the linear path). Its names and shapes equal those of a
DiT, so that the two cannot be distinguished. Its time runs from noise to data, x_t = t x0 + (1 - t) eps, and it
predicts dx/dt = x0 - eps; here time runs from data to noise, and the velocity is eps - x0. Both are exact changes of
weights. With learn_sigma, the second half of its output is untrained, and is dropped.
"""

from __future__ import annotations

import argparse
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor

from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.files.weights import without_wrappers
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import SIZES, DiTConfig
from image_diffusion.networks.weights import listed, misfits, num_blocks
from image_diffusion.nn.inputs import TIME_CHANNELS
from image_diffusion.nn.positions import grid_positions, sinusoid

_TABLE = "y_embedder.embedding_table.weight"
_WEIGHTS_FILE = "diffusion_pytorch_model"


@dataclass(frozen=True)
class DiTWeights:
    """A DiT and all of its weights. tensors: float32, by the published names, exactly those of the network."""

    config: DiTConfig
    spec: DataSpec
    learned_variance: bool
    tensors: dict[str, Tensor]


def read_dit(path: Path, num_heads: int | None = None, content: Mapping[str, Any] | None = None) -> DiTWeights:
    """Read a DiT from a file of the original or a folder of diffusers.

    path: the published `DiT-XL-2-256x256.pt` or another state dict under its names (`.pt`, `.safetensors`); a training
    checkpoint of the original, of which the "ema" entry is taken; a folder of a diffusers pipeline, or of its
    transformer. num_heads: required for a file of a width that is not the paper's, since shapes do not determine it.
    content: content of the file, if it was loaded already.

    time_frequencies is "dit" for a file and "diffusers" for a folder, as in the original and in diffusers. (The folders
    facebook/DiT-XL-2-* contain weights that were trained with "dit", although diffusers computes differently.)

    Raises ValueError when the path does not exist, holds anything but tensors and plain data, or is not a DiT: with the
    names of what is missing, unexpected, or of another shape.
    """
    if path.is_dir():
        return _read_folder(path)
    tensors, arguments = _state_dict(content or load_tensors(path), path)
    return _from_shapes(tensors, path, "dit", num_heads or _heads_of(arguments))


def is_dit(content: Mapping[str, Any]) -> bool:
    """Return True if a file contains a DiT: its tensors by name, or a training checkpoint with their average."""
    average = content.get("ema")
    return "x_embedder.proj.weight" in (average if isinstance(average, Mapping) else content)


def is_dit_folder(folder: Path) -> bool:
    """Return True if a diffusers folder contains a DiT, or has a configuration without a class."""
    classes = ("DiTTransformer2DModel", "Transformer2DModel", "DiTPipeline")
    name = class_of(folder)
    return name in classes or (name is None and (folder / "config.json").is_file())


def class_of(folder: Path) -> str | None:
    """Return the diffusers class of a folder; None if its configuration does not name one."""
    for name in ("model_index.json", "config.json"):
        if (folder / name).is_file():
            index = read_json(folder / name)
            return str(index["_class_name"]) if isinstance(index, dict) and "_class_name" in index else None
    return None


def load_without_code(path: Path, safe_classes: Sequence[Any], kind: str, parts: str, advice: str) -> Any:
    """Load the content of a .safetensors file, or of a torch file that holds nothing but tensors, plain data and
    objects of known classes, none of whose code is run.

    kind, parts, advice: for messages: the expected file, its permitted content, and what to do with other content.
    Raises ValueError if it is damaged, or would have to run code.
    """
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with torch.serialization.safe_globals([*safe_classes]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), None)
        if refused is None:
            raise ValueError(f"{path} is damaged, or not {kind}. Copy it again.") from None
        raise ValueError(
            f"{path} holds more than {parts} ({refused.partition('. ')[0]}), and is not loaded, because that would run "
            f"code from it. {advice}"
        ) from None
    except Exception as error:  # damaged bytes can cause any exception
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise ValueError(f"{path} is damaged, or not {kind}: {reason}. Copy it again.") from None


def load_tensors(path: Path) -> Mapping[str, Any]:
    """Load the content of a .safetensors file or, safely, of a torch file: tensors and plain data by name, without the
    prefixes of wrappers (`without_wrappers`).

    argparse.Namespace, which the original's checkpoints hold, counts as plain data. Raises ValueError when the file is
    missing, damaged, or would have to run code.
    """
    return without_wrappers(_content(path), path)


def _content(path: Path) -> Mapping[str, Any]:
    """Return the content of a file unchanged."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Use a .pt or .safetensors file, or a diffusers folder.")
    advice = (
        f"If you trust it, save its weights alone: torch.save(torch.load('{path.name}', weights_only=False)['ema'], "
        f"'weights.pt'), of a prior ['ema_model']."
    )
    content = load_without_code(path, [argparse.Namespace], "a file of tensors", "tensors and plain data", advice)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}. Expected tensors by name.")
    if not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} holds entries without names. Expected tensors by name.")
    return content


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model folder of diffusers, by name. Raises ValueError for a folder without tensors."""
    patterns = (f"{_WEIGHTS_FILE}.safetensors", f"{_WEIGHTS_FILE}-*-of-*.safetensors", f"{_WEIGHTS_FILE}.bin")
    files = next(filter(None, (sorted(folder.glob(pattern)) for pattern in patterns)), [])
    if not files:
        raise ValueError(f"{folder} has no {_WEIGHTS_FILE}.safetensors. Use a folder that diffusers wrote.")
    return without_wrappers({name: tensor for file in files for name, tensor in _content(file).items()}, folder)


def diffusers_names(depth: int) -> dict[str, list[str]]:
    """Return the names under which diffusers' DiTTransformer2DModel keeps each weight and bias, by the published name.

    Several names mean copies of the same tensor, since every block there has the embedders of time and label, except
    for `blocks.i.attn.qkv`, whose three names are its thirds.
    """
    blocks = [f"transformer_blocks.{i}" for i in range(depth)]
    time = [f"{block}.norm1.emb.timestep_embedder" for block in blocks]
    names = {
        "x_embedder.proj": ["pos_embed.proj"],
        "t_embedder.mlp.0": [f"{embedder}.linear_1" for embedder in time],
        "t_embedder.mlp.2": [f"{embedder}.linear_2" for embedder in time],
    }
    for i, block in enumerate(blocks):
        names[f"blocks.{i}.attn.qkv"] = [f"{block}.attn1.to_{part}" for part in "qkv"]
        names[f"blocks.{i}.attn.proj"] = [f"{block}.attn1.to_out.0"]
        names[f"blocks.{i}.mlp.fc1"] = [f"{block}.ff.net.0.proj"]
        names[f"blocks.{i}.mlp.fc2"] = [f"{block}.ff.net.2"]
        names[f"blocks.{i}.adaLN_modulation.1"] = [f"{block}.norm1.linear"]
    names |= {"final_layer.linear": ["proj_out_2"], "final_layer.adaLN_modulation.1": ["proj_out_1"]}
    both = {
        f"{ours}.{kind}": [f"{name}.{kind}" for name in theirs]
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    }
    return both | {_TABLE: [f"{block}.norm1.emb.class_embedder.embedding_table.weight" for block in blocks]}


def _state_dict(content: Mapping[str, Any], path: Path) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a state dict or a training checkpoint, and the arguments of the training script if it has
    them."""
    tensors = content["ema"] if isinstance(content.get("ema"), Mapping) else content
    if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(
            f"{path} is neither a state dict nor a training checkpoint: it holds {listed(content)}. "
            f'Expected tensors by name, or an entry "ema" of them.'
        )
    return dict(tensors), content.get("args")


def _from_shapes(
    tensors: Mapping[str, Tensor], path: Path, time_frequencies: Literal["diffusers", "dit"], num_heads: int | None
) -> DiTWeights:
    """Return the network whose tensors have these published names and shapes. Raises ValueError if there is none."""
    needed = ("pos_embed", "x_embedder.proj.weight", "blocks.0.mlp.fc1.weight", "final_layer.linear.weight")
    absent = [name for name in needed if name not in tensors]
    if absent:
        raise ValueError(
            f"{path} is not a DiT: {listed(absent)} missing; it holds {listed(tensors)}. "
            f"Expected the names of DiT-XL-2-256x256.pt, or a diffusers folder."
        )
    patches = tensors["x_embedder.proj.weight"]
    if patches.ndim != 4 or not patches.numel():
        raise ValueError(
            f"{path} is not a DiT: x_embedder.proj.weight has the shape {list(patches.shape)}. Expected [width, "
            f"channels, patch, patch]."
        )
    width, channels, patch, _ = patches.shape
    depth = num_blocks(tensors, "blocks.")
    num_heads = num_heads or next((size.num_heads for size in SIZES.values() if size.width == width), None)
    if num_heads is None:
        raise ValueError(
            f"{path} has width {width}, which is none of the paper's, so that its number of heads is unknown. "
            f"Set num_heads."
        )
    shape = (depth, width, num_heads, patch)
    size = next((name for name, preset in SIZES.items() if preset == shape), None)
    explicit = {} if size else dict(zip(("depth", "width", "num_heads", "patch"), shape, strict=True))
    mlp_ratio = tensors["blocks.0.mlp.fc1.weight"].shape[0] / width
    config = DiTConfig(size=size, **explicit, mlp_ratio=mlp_ratio, time_frequencies=time_frequencies)
    spec = DataSpec(
        channels=channels,
        resolution=math.isqrt(tensors["pos_embed"].shape[1]) * patch,
        num_classes=len(tensors[_TABLE]) - 1 if _TABLE in tensors else 0,
    )
    learned_variance = len(tensors["final_layer.linear.weight"]) == 2 * channels * patch**2
    with torch.device("meta"):
        expected = config.build(spec, learned_variance).state_dict()
    _check(config, expected, tensors, path)
    return DiTWeights(config, spec, learned_variance, {name: tensors[name].float() for name in expected})


def _check(config: DiTConfig, expected: Mapping[str, Tensor | None], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError unless the names and shapes are those expected."""
    if details := misfits(expected, tensors):
        depth, width, _, patch = config.shape
        raise ValueError(
            f"{path} does not fit a DiT of depth {depth}, width {width} and patch {patch}. {details}. "
            f"Use weights of this architecture, from a complete file."
        )


def _read_folder(folder: Path) -> DiTWeights:
    """A diffusers folder: of a pipeline, or of its transformer."""
    folder = folder / "transformer" if (folder / "model_index.json").is_file() else folder
    settings = read_json(folder / "config.json")
    for key, supported in (("norm_type", "ada_norm_zero"), ("activation_fn", "gelu-approximate")):
        if settings.get(key, supported) != supported:
            raise ValueError(f"{folder}/config.json has {key} {settings[key]!r}; a DiT has {supported!r}.")
    theirs = folder_tensors(folder)
    num_heads, head_width, patch = (
        int(settings[key]) for key in ("num_attention_heads", "attention_head_dim", "patch_size")
    )
    config = DiTConfig(
        depth=int(settings["num_layers"]), width=num_heads * head_width, num_heads=num_heads, patch=patch
    )
    tensors = _published_names(theirs, config, folder)
    size = int(settings["sample_size"]) // patch
    tensors["pos_embed"] = grid_positions(num_heads * head_width, size)[None]
    return _from_shapes(tensors, folder, "diffusers", num_heads)


def _published_names(theirs: Mapping[str, Tensor], config: DiTConfig, folder: Path) -> dict[str, Tensor]:
    """Return diffusers' tensors under the published names. Raises ValueError if some are missing, unexpected or
    unequal."""
    names = diffusers_names(config.shape.depth)
    _check(config, {name: None for places in names.values() for name in places}, theirs, folder)
    tensors = {}
    for ours, places in names.items():
        parts = [theirs[name] for name in places]
        if ".attn.qkv." in ours:
            tensors[ours] = torch.cat(parts)
            continue
        for name, part in zip(places, parts, strict=True):
            if not torch.equal(part, parts[0]):
                raise ValueError(
                    f"{folder} has another {name} than {places[0]}; a DiT embeds time and label once for all blocks. "
                    f"Networks that diffusers trained further cannot be read."
                )
        tensors[ours] = parts[0]
    return _without_padding(tensors)


def _without_padding(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the label table up to the last row, which is for no label, and without the rows like it before it.

    A table of nothing else is that of an unconditional network: the row then joins the bias of the time embedding.
    """
    table = tensors[_TABLE]
    num_classes = int((table != table[-1]).any(dim=1).nonzero().amax()) + 1 if (table != table[-1]).any() else 0
    if num_classes:
        return tensors | {_TABLE: table[: num_classes + 1]}
    bias = tensors["t_embedder.mlp.2.bias"] + table[-1]
    return {name: tensor for name, tensor in tensors.items() if name != _TABLE} | {"t_embedder.mlp.2.bias": bias}


def _heads_of(arguments: Any) -> int | None:
    """Return the number of heads of the size that the original's training script was given to train."""
    size = SIZES.get(getattr(arguments, "model", None))  # type: ignore[arg-type]
    return size.num_heads if size else None


_TIME = "t_embedder.mlp.0.weight"


def as_flow(weights: DiTWeights) -> DiTWeights:
    """Return the network that gives -v(x, 1 - t) where the SiT gives v(x, t)."""
    tensors, channels = dict(weights.tensors), weights.spec.channels
    tensors[_TIME] = _reversed(tensors[_TIME], endpoint=weights.config.time_frequencies == "diffusers")
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        tensors[name] = -_first(tensors[name], channels, weights.learned_variance)
    return replace(weights, learned_variance=False, tensors=tensors)


def _reversed(weight: Tensor, endpoint: bool) -> Tensor:
    """Return W' such that W' [cos(t w), sin(t w)] = W [cos((1 - t) w), sin((1 - t) w)], by the addition theorems. [D,
    256]."""
    cos, sin = sinusoid(torch.ones(1), TIME_CHANNELS, endpoint=endpoint).double().chunk(2, dim=1)  # of w, [1, 128]
    of_cos, of_sin = weight.double().chunk(2, dim=1)  # [D, 128]
    return torch.cat([of_cos * cos + of_sin * sin, of_cos * sin - of_sin * cos], dim=1).float()


def _first(rows: Tensor, channels: int, halved: bool) -> Tensor:
    """Return the rows of x's own channels: each pixel of a patch has `channels`, and as many again where they are
    halved."""
    if not halved:
        return rows
    return rows.unflatten(0, (-1, 2 * channels))[:, :channels].flatten(0, 1)
