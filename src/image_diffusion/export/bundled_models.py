"""Models for diffusers with the code that diffusers does not have: those that make images from noise or tokens,
discrete VAEs, and priors. Each is a folder that diffusers loads with its own code, on machines without this package.

model_index.json names the pipeline and its parts; pipeline.py is what a user calls; model/ holds config.json, the
weights, and exported.py, the modules of this package that the model needs; vae/ the autoencoder of the latents, as
diffusers keeps its own, if the model has one.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors.torch
from torch import nn

from image_diffusion.codecs.base import Codec
from image_diffusion.core.config.base import Config, dump
from image_diffusion.core.files.atomic import atomic_folder, digest, to_json
from image_diffusion.core.types import EMBEDDING, IMAGE, NUMBERS, TEXT, DataSpec
from image_diffusion.export.bundle import loader
from image_diffusion.export.bundle.base import NETWORK, ExportedModel
from image_diffusion.export.bundle.codec_model import ExportedTokens
from image_diffusion.export.bundle.embedding_model import ExportedPrior
from image_diffusion.export.bundle.image_model import CODEC, ExportedDiffusion
from image_diffusion.export.bundle.token_image_model import ExportedTokenModel
from image_diffusion.export.descriptions import PIPELINE, CardUse
from image_diffusion.samplers.ode import FlowMap, Heun
from image_diffusion.systems.codec.dvae import DVAESystem
from image_diffusion.systems.diffusion.base import DiffusionSystem
from image_diffusion.systems.diffusion.generator import SampleConfig
from image_diffusion.systems.interface import TrainedNetwork
from image_diffusion.systems.prior.prior import PriorSystem
from image_diffusion.systems.tokens.generator import TokenSampleConfig, fitted
from image_diffusion.systems.tokens.tokens import TokensSystem

_PACKAGE = "image_diffusion"
_ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(rf"^(\s*(?:from|import) ){_PACKAGE}(?=[.\s])", re.MULTILINE)


@dataclass(frozen=True)
class Network:
    """A network, and the arguments that build it: config.build(spec, **options)."""

    network: nn.Module
    config: Config
    spec: DataSpec
    options: Mapping[str, Any] = field(default_factory=dict)


def write_hub_folder(
    folder: Path,
    model: type[ExportedModel],
    pipeline: ModuleType,
    networks: Mapping[str, Network],
    described: Mapping[str, Any],
    needed: tuple[type, ...] = (),
    vae: Any = None,
) -> None:
    """Atomically write a folder that `DiffusionPipeline.from_pretrained` loads.

    model: the class that loads the networks and that the pipeline calls. pipeline: the module that becomes pipeline.py.
    networks: by file name; NETWORK is the trained one. described: further plain data for `model`. needed: further
    classes that `model` loads by name (`place_of`). vae: an autoencoder of diffusers.
    """
    classes = (model, *needed, *(type(part.config) for part in networks.values()))
    package, sources = bundled(part.__module__ for part in classes)
    config = {
        "loaded_by": place_of(model),
        "networks": {
            name: {
                "config": place_of(type(part.config)),
                "settings": dump(part.config),
                "spec": dump(part.spec),
                "options": dict(part.options),
            }
            for name, part in networks.items()
        },
        **described,
    }
    from diffusers import __version__

    index: dict[str, Any] = {
        "_class_name": ["pipeline", "Pipeline"],
        "_diffusers_version": __version__,
        "model": ["exported", "Exported"],
    }
    if vae is not None:
        index["vae"] = ["diffusers", type(vae).__name__]
    with atomic_folder(folder) as written:
        (written / "model").mkdir()
        (written / "model_index.json").write_text(to_json(index), encoding="utf-8")
        (written / "pipeline.py").write_text(inspect.getsource(pipeline), encoding="utf-8")
        (written / "model" / "config.json").write_text(to_json(config), encoding="utf-8")
        (written / "model" / "exported.py").write_text(_with_sources(package, sources), encoding="utf-8")
        for name, part in networks.items():
            tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in part.network.state_dict().items()}
            safetensors.torch.save_file(tensors, written / "model" / f"{name}.safetensors")
        if vae is not None:
            vae.save_pretrained(written / "vae")


def place_of(kind: type) -> list[str]:
    """Return the place where an exported model finds a class: its module, without the package, and its name."""
    return [kind.__module__.partition(".")[2], kind.__name__]


def bundled(modules: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Return the name of a package, and the source of each of its modules by the name inside it.

    modules: dotted names, `image_diffusion.…`, with all that they import from this package, directly or not. The name
    contains a digest of the sources, so that two exported models never import each other's code or an installed
    `image_diffusion`. Imports for the type checker only are left out. Packages from which no name is imported are
    empty.
    """
    sources: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = _path(module)
        assert path is not None, module
        if module.partition(".")[2] in sources:
            continue
        text = path.read_text(encoding="utf-8")
        sources[module.partition(".")[2]] = text
        waiting += _imported(ast.parse(text))
    name = f"{_PACKAGE}_{digest(sources)[:12]}"
    return name, {module: _IMPORT.sub(rf"\1{name}", text) for module, text in sorted(sources.items())}


def _imported(node: ast.AST) -> list[str]:
    """Return the modules of this package that some code imports when it runs."""
    modules = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            modules += [name for branch in child.orelse for name in _imported(branch)]
        elif isinstance(child, ast.ImportFrom) and child.module and child.module.split(".")[0] == _PACKAGE:
            inside = [f"{child.module}.{alias.name}" for alias in child.names]
            modules += [name if _path(name) else child.module for name in inside]
        elif isinstance(child, ast.Import):
            modules += [alias.name for alias in child.names if alias.name.split(".")[0] == _PACKAGE]
        else:
            modules += _imported(child)
    return modules


def _path(module: str) -> Path | None:
    """Return the file of a module; None for a name inside a module."""
    stem = _ROOT / Path(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def _with_sources(package: str, sources: Mapping[str, str]) -> str:
    """Return the source of the loader with the modules inserted as readable strings, one per line."""
    lines = []
    for name, text in sources.items():
        lines += [f"    {json.dumps(name)}: [", *(f"        {line!r}," for line in text.splitlines(True)), "    ],"]
    whole = inspect.getsource(loader)
    for before, after in (
        ('PACKAGE = ""\n', f"PACKAGE = {json.dumps(package)}\n"),
        ("SOURCES: dict[str, list[str]] = {}\n", "\n".join(["SOURCES: dict[str, list[str]] = {", *lines, "}", ""])),
    ):
        assert whole.count(before) == 1, before
        whole = whole.replace(before, after)
    return whole


_TOKEN_CODE = (
    f"{PIPELINE}tokens = pipeline.encode([image])  # PIL -> int64 [1, h, w]\nimage = pipeline.decode(tokens)[0]"
)
_PRIOR_CODE = f"{PIPELINE}image_embeds = pipeline(text_embed)  # float [N, dim] -> [N, dim]"


def write_diffusion_model(system: DiffusionSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    return _write_image_model(ExportedDiffusion, system, _usual(system), model, codec, folder)


def _usual(system: DiffusionSystem) -> SampleConfig:
    """Return the default sampling settings of a type of system, with another sampler if the default does not fit its
    process."""
    usual = system.sections["sample"].default
    assert isinstance(usual, SampleConfig)
    try:
        usual.sampler.grid(system.process)
    except ValueError:
        sampler = FlowMap() if system.objective.learns_intervals else Heun(num_steps=25)
        return usual.model_copy(update={"sampler": sampler})
    return usual


def write_token_model(system: TokensSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    usual = fitted(TokenSampleConfig(), system.objective.causal)
    return _write_image_model(ExportedTokenModel, system, usual, model, codec, folder)


def _write_image_model(
    exported: type[ExportedDiffusion],
    system: DiffusionSystem | TokensSystem,
    usual: SampleConfig,
    model: TrainedNetwork,
    codec: Codec,
    folder: Path,
) -> CardUse:
    """Write a folder with its own pipeline.py.

    exported: the class that samples the images. usual: the default sampling settings.
    """
    from image_diffusion.export.bundle import image_pipeline

    packed, vae = codec.packed(), None
    config: Config = getattr(system, "network")  # noqa: B009 - each system has one of its own type
    networks = {NETWORK: Network(model.network, config, model.spec, system.build_options)}
    if packed.network is not None and hasattr(packed.network, "save_pretrained"):
        vae = packed.network
    elif packed.network is not None:
        of_codec: Any = packed.network
        networks[CODEC] = Network(packed.network, of_codec.config, of_codec.spec)
    described = {
        "reading": dump(system.reading),
        "codec": {"class": place_of(type(codec)), "settings": packed.settings},
        "classes": model.classes,
        **({"untrained": list(model.untrained)} if model.untrained else {}),
        "pairs": model.pairs,
        "sample": dump(usual),
    }
    write_hub_folder(folder, exported, image_pipeline, networks, described, (type(codec),), vae)
    return CardUse("unconditional-image-generation", "DiffusionPipeline", _code(model.spec))


_TOLD = {
    TEXT: ', prompt="a photo of a dog"',
    EMBEDDING: ", image_embeds=embeddings",
    NUMBERS: ", numbers=[{NAME: VALUE}]",
    IMAGE: ", image=images",
}


def _code(spec: DataSpec) -> str:
    words = "".join(_TOLD[name] for name in spec.conditions)
    condition = (", class_labels=[0]" if spec.num_classes else "") + words
    return f"{PIPELINE}image = pipeline(seeds=[0]{condition}).images[0]"


def write_dvae(system: DVAESystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    from image_diffusion.export.bundle import token_pipeline

    networks = {NETWORK: Network(model.network, system.network, model.spec)}
    write_hub_folder(folder, ExportedTokens, token_pipeline, networks, {})
    return CardUse("image-to-image", "DiffusionPipeline", _TOKEN_CODE)


def write_prior(system: PriorSystem, model: TrainedNetwork, codec: Codec, folder: Path) -> CardUse:
    """Write a folder with its own pipeline.py."""
    from image_diffusion.export.bundle import embedding_pipeline

    networks = {NETWORK: Network(model.network, system.network, model.spec)}
    described = {"reading": dump(system.reading(model.spec))}
    write_hub_folder(folder, ExportedPrior, embedding_pipeline, networks, described)
    return CardUse("feature-extraction", "DiffusionPipeline", _PRIOR_CODE)
