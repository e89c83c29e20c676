"""Exported pipelines, loaded without this package, make the same images as `sample`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from exported import load
from image_diffusion.codecs.base import Codec
from image_diffusion.codecs.diffusers import Diffusers, KlCodec
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.codecs.tokens import TokenCodec, TokensOf
from image_diffusion.codecs.trained import DVAECodec, DVAETokens
from image_diffusion.core.config.base import dump
from image_diffusion.core.number_columns import NumberColumns
from image_diffusion.core.types import EMBEDDING, IMAGE, NUMBERS, TEXT, DataSpec
from image_diffusion.export import export_of
from image_diffusion.export.bundled_models import bundled
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.networks.dvae import DVAEConfig
from image_diffusion.networks.prior import PriorConfig
from image_diffusion.networks.prior_transformer import PriorTransformerConfig
from image_diffusion.networks.rin import RinConfig
from image_diffusion.networks.unet import UNetConfig
from image_diffusion.objectives.denoising import EdmDenoising
from image_diffusion.objectives.flow_matching import FlowMatching
from image_diffusion.process.edm import Edm
from image_diffusion.process.flow import Flow
from image_diffusion.systems.base import Model
from image_diffusion.systems.codec.dvae import DVAESystem
from image_diffusion.systems.codec.reconstruction import reconstruct
from image_diffusion.systems.diffusion.base import DiffusionSystem
from image_diffusion.systems.diffusion.conditions.paired_image import as_condition
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig
from image_diffusion.systems.diffusion.iddpm import IddpmSystem
from image_diffusion.systems.diffusion.rin import RinSystem
from image_diffusion.systems.prior.generator import EmbeddingGenerator, EmbeddingSampling
from image_diffusion.systems.prior.prior import PriorSystem
from image_diffusion.systems.tokens.generator import TokenSampleConfig
from image_diffusion.systems.tokens.tokens import TokensSystem
from image_diffusion.text_encoders import encode_captions
from image_diffusion.text_encoders.hashing import HashedText
from tiny_autoencoders import SHAPES, write_autoencoder

SEEDS = [3, 11, 5]
SIZES = {"num_tokens": 16, "codebook_dim": 4}


@dataclass
class Case:
    """A model and its sampling settings."""

    system: DiffusionSystem
    spec: DataSpec
    codec: Codec
    sampler: dict[str, Any]
    call: dict[str, Any] = field(default_factory=dict)
    labels: list[int] | None = None
    guidance: float = 1.0
    told: dict[str, torch.Tensor] = field(default_factory=dict)
    pairs: dict[str, Any] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()
    seed: int = 0
    network: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.network = randomised(self.system.build_network(self.spec))

    @property
    def model(self) -> Model:
        codec = {"config": dump(Rgb()), "identity": {}, "scale": None}
        classes = [f"class {i}" for i in range(self.spec.num_classes)]
        return Model(
            self.network, self.spec, codec, classes, 1, 1, "0" * 64, num_steps=1, fingerprint="",
            pairs=self.pairs, untrained=self.untrained, system=self.system,
        )  # fmt: skip

    @property
    def asked(self) -> dict[str, Any]:
        labels = {} if self.labels is None or self.untrained else {"class_labels": self.labels}
        return {
            "seeds": SEEDS, "sampler": self.sampler, "guidance_scale": self.guidance, "output_type": "np",
            "batch_size": 2, **labels, **self.call,
        }  # fmt: skip

    def images(self) -> np.ndarray:
        """Images from `sample`, uint8 [N, H, W, C]."""
        settings = SampleConfig(
            sampler=self.sampler, guidance={"guidance_scale": self.guidance}, precision="float32", batch_size=3,
            seed=self.seed,
        )  # fmt: skip
        generator = Generator(self.network, self.system.reading, self.spec, self.codec, settings)
        labels = None if self.labels is None else torch.tensor(self.labels)
        found = generator(torch.tensor(SEEDS), labels, self.told)
        return found.permute(0, 2, 3, 1).numpy()


def randomised(network: nn.Module) -> nn.Module:
    """Replace the parameters that are initialised to zero by random numbers."""
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return network.eval().requires_grad_(False)


JIT = {"rope": True, "patch_bottleneck": 8, "class_tokens": 3, "class_tokens_from": 1}


def dit(process: Any = None, **more: Any) -> DiTSystem:
    small = {"depth": 2, "width": 32, "num_heads": 2, "patch": 2}
    network = DiTConfig(**small | more.pop("network", {}))  # type: ignore[arg-type]
    flow = {"process": process, "objective": FlowMatching(label_drop_probability=0.1)} if process is not None else {}
    return DiTSystem(network=network, **flow | more)  # type: ignore[arg-type]


def autoencoder(name: str, folder: Path) -> tuple[Codec, DataSpec]:
    channels, downsampling = SHAPES[name]
    write_autoencoder(name, folder)
    scale = {"mean": [0.1] * channels, "std": [1.5] * channels, "declared": {"mean": [0.0], "std": [1.0]}}
    codec = Diffusers(weights=str(folder)).build(None, scale, torch.device("cpu"), torch.float32)
    return codec, DataSpec(channels=channels, resolution=32 // downsampling, num_classes=2)


def cases(folder: Path) -> dict[str, Case]:
    torch.manual_seed(0)
    pixels = DataSpec(channels=3, resolution=8, num_classes=3)
    ddim: dict[str, Any] = {"type": "ddim", "num_steps": 3}
    kl, latents = autoencoder("kl4", folder / "kl4")
    dc, dc_latents = autoencoder("dc", folder / "dc")
    dvae = randomised(DVAEConfig(num_tokens=16, codebook_dim=4, num_layers=1, hidden_dim=8).build(
        DataSpec(channels=3, resolution=16)
    ))  # fmt: skip
    vae = write_autoencoder("sd", folder / "sd")
    encoder = HashedText(dim=8).build(torch.device("cpu"), 4)
    words = ["a red dot", "blue"]
    pairs = {"encoder": dump(HashedText(dim=8)), "num_tokens": 4, "text": encoder.identity}
    image, embeddings = torch.rand(2, 3, 4, 4) * 2 - 1, torch.randn(2, 8)
    small: dict[str, Any] = {
        "spec": DataSpec(channels=3, resolution=8, num_classes=3, conditions={IMAGE: (3, 4, 4)}), "codec": Rgb(),
        "sampler": ddim, "call": {"image": image.tolist()}, "labels": [1, 1, 0], "guidance": 2.0,
        "told": {IMAGE: image[torch.arange(3) % 2]},
    }  # fmt: skip
    sees: dict[str, Any] = {
        "condition": [{"type": "label"}, {"type": "image", "from": "self", "shrink": 2}],
        "objective": {"label_drop_probability": 0.1},
    }
    masks = as_condition(torch.randint(2, (2, 1, 8, 8), dtype=torch.uint8), 2)
    masked: dict[str, Any] = {
        "spec": DataSpec(channels=3, resolution=8, conditions={IMAGE: (2, 8, 8)}), "codec": Rgb(), "sampler": ddim,
        "call": {"image": masks.tolist()}, "labels": None, "guidance": 2.0, "told": {IMAGE: masks[torch.arange(3) % 2]},
    }  # fmt: skip
    columns = {"columns": ["age", "dose"], "ranges": [[20.0, 60.0], [0.0, 2.0]]}
    rows: list[dict[str, float | None]] = [{"age": 30.0, "dose": 1.5}, {"age": 50.0}]
    numbers = {
        "spec": DataSpec(channels=3, resolution=8, num_classes=3, conditions={NUMBERS: (2, 2)}), "codec": Rgb(),
        "sampler": ddim, "call": {"numbers": rows}, "labels": [1, 1, 0], "pairs": {"numbers": columns}, "guidance": 2.0,
        "told": {NUMBERS: NumberColumns.described(columns).scaled(rows)[torch.arange(3) % 2]},
    }  # fmt: skip
    both = {"condition": [{"type": "label"}, {"type": "numbers"}], "objective": {"label_drop_probability": 0.1}}
    unet = {"channels": 32, "num_res_blocks": 1, "attention_resolutions": (4,), "multipliers": (1, 1)}
    return {
        "a DiT on pixels with all options": Case(
            dit(network={"qk_norm": True, "norm": "rms_norm", "mlp": "swiglu", "mlp_ratio": 3.0, **JIT}),
            pixels, Rgb(), {"type": "ddpm", "num_steps": 4}, labels=[2, 0, 1], guidance=2.0,
        ),
        "a DiT with a class without images": Case(
            dit(), pixels, Rgb(), ddim, labels=[2, 2, 2], untrained=("class 1",)  # the classes of odd seeds
        ),
        "SiT by Heun": Case(dit(Flow()), pixels, Rgb(), {"type": "heun", "num_steps": 3}, labels=[2, 0, 1]),
        "SiT by DPM-Solver": Case(
            dit(Flow()), pixels, Rgb(), {"type": "dpm_solver", "num_steps": 3}, labels=[2, 0, 1], guidance=1.5
        ),
        "EDM by Heun with churn": Case(
            dit(Edm(), objective=EdmDenoising(label_drop_probability=0.1)), pixels, Rgb(),
            {"type": "heun", "num_steps": 3, "s_churn": 1.0}, labels=[2, 0, 1], guidance=1.5,
        ),
        "SiT by UniPC": Case(dit(Flow()), pixels, Rgb(), {"type": "unipc", "num_steps": 3}, labels=[0, 0, 1]),
        "a DiT on latents of diffusers": Case(dit(), latents, kl, ddim, labels=[0, 1, 1]),
        "a DiT on latents of AutoencoderDC": Case(dit(), dc_latents, dc, ddim, labels=[0, 1, 1]),
        "a DiT on Stable Diffusion's latents": Case(
            dit(), DataSpec(channels=4, resolution=4, num_classes=2), KlCodec({"type": "kl"}, lambda: vae, 0.2), ddim,
            labels=[0, 1, 1],
        ),
        "a DiT on a discrete VAE": Case(
            dit(), DataSpec(channels=4, resolution=8), DVAECodec({"type": "dvae"}, lambda: dvae, 0.5), ddim,
        ),
        "a DiT that is told words": Case(
            dit(condition={"type": "text"}), DataSpec(channels=3, resolution=8, conditions={TEXT: (5, 8)}), Rgb(), ddim,
            call={"prompt": words}, guidance=2.0, pairs={"captions": pairs},
            told={TEXT: encode_captions(encoder, words)[torch.arange(3) % 2]},
        ),
        "a DiT that is told embeddings": Case(
            dit(condition={"type": "embedding"}), DataSpec(channels=3, resolution=8, conditions={EMBEDDING: (8,)}),
            Rgb(), ddim, call={"image_embeds": embeddings.tolist()}, guidance=2.0,
            told={EMBEDDING: embeddings[torch.arange(3) % 2]},
        ),
        "a U-Net": Case(
            IddpmSystem(network=UNetConfig(**unet)), DataSpec(channels=3, resolution=8), Rgb(),
            {"type": "ddpm", "num_steps": 4},
        ),
        "a U-Net that enlarges": Case(
            IddpmSystem(network=UNetConfig(**unet), **sees), **small,
        ),
        "a DiT that is told classes and numbers": Case(
            dit(Flow(), condition=both["condition"]), **numbers | {"sampler": {"type": "euler", "num_steps": 3}}
        ),
        "a DiT that enlarges": Case(dit(condition=sees["condition"]), **small),
        "a U-Net that is told masks": Case(
            IddpmSystem(
                network=UNetConfig(**unet), condition={"type": "image", "from": "pairs"},
                objective={"label_drop_probability": 0.1},
            ),
            **masked,
        ),
        "RIN that enlarges": Case(
            RinSystem(
                network=RinConfig(width=16, patch=4, depth=1, num_latents=4, num_heads=2, head_width=8), **sees
            ),
            **small,
        ),
        "a U-Net that is told classes and numbers": Case(IddpmSystem(network=UNetConfig(**unet), **both), **numbers),
        "RIN that is told classes and numbers": Case(
            RinSystem(
                network=RinConfig(width=16, patch=4, depth=1, num_latents=4, num_heads=2, head_width=8), **both
            ),
            **numbers,
        ),
        "RIN": Case(
            RinSystem(network=RinConfig(width=16, patch=4, depth=1, num_latents=4, num_heads=2, head_width=8)),
            pixels, Rgb(), ddim, labels=[1, 1, 0],
        ),
    }  # fmt: skip


def tokens_system(objective: str) -> TokensSystem:
    small = {"depth": 1, "width": 16, "num_heads": 2}
    return TokensSystem.model_validate(
        {"network": small, "objective": {"type": objective, "label_drop_probability": 0.1}}
    )


def others(root: Path) -> dict[str, tuple[np.ndarray, Path, dict[str, Any]]]:
    """Models that make no images from noise: their output here, their folders, and the arguments of the call."""
    torch.manual_seed(1)
    prior = PriorSystem(network=PriorConfig(depth=1, num_heads=2, head_width=8, max_text_len=4, self_cond=True))
    spec = DataSpec(channels=16, resolution=1)
    network = randomised(prior.build_network(spec))
    text = torch.randn(3, 16)
    sampling = EmbeddingSampling(sampler={"type": "ddim", "num_steps": 3}, guidance_scale=2.0, seed=7)
    generator = EmbeddingGenerator(network, prior.reading(spec), spec, sampling)
    embedded = generator({"text_embed": text}, torch.tensor(SEEDS))
    asked = {"text_embed": text.tolist(), "seeds": SEEDS, "num_inference_steps": 3, "guidance_scale": 2.0, "seed": 7}
    statistics = {"mean": torch.randn(16).tolist(), "std": (torch.rand(16) + 0.5).tolist()}
    kandinsky = PriorSystem(
        network=PriorTransformerConfig(depth=1, num_heads=2, head_width=8, max_text_len=4), image_statistics=statistics
    )  # type: ignore[arg-type]
    transformer = randomised(kandinsky.build_network(spec))
    generator = EmbeddingGenerator(transformer, kandinsky.reading(spec), spec, sampling)
    normalised = generator({"text_embed": text}, torch.tensor(SEEDS))
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    pixels = DataSpec(channels=3, resolution=16)
    learnt, levels, nearest = (
        DVAESystem(network=DVAEConfig(**tokens, num_layers=1, hidden_dim=8))  # type: ignore[arg-type]
        for tokens in (SIZES, {"levels": (5, 4)}, SIZES | {"vector_quantiser": {}})
    )
    codecs = {"dvae": (learnt, randomised(learnt.build_network(pixels)))}
    codecs["levels"] = (levels, randomised(levels.build_network(pixels)))
    codecs["nearest"] = (nearest, randomised(nearest.build_network(pixels)))
    x = torch.tensor(images).permute(0, 3, 1, 2)
    decoded = {
        name: reconstruct(codec, x).decoded["hard"].movedim(1, -1).numpy() for name, (_, codec) in codecs.items()
    }
    for name, system, of, trained in (
        ("prior", prior, spec, network),
        ("kandinsky", kandinsky, spec, transformer),
        *((name, system, pixels, codec) for name, (system, codec) in codecs.items()),
    ):
        model = Model(trained, of, {}, [], 1, 1, "0" * 64, num_steps=1, fingerprint="", system=system)
        export_of(system, "pipeline").write(system, model, Rgb(), root / name)
    folder = root / "vq"
    write_autoencoder("vq", folder)
    published = TokensOf.model_validate({"of": {"type": "diffusers", "weights": str(folder)}})
    of_tokens: dict[str, tuple[TokensSystem, Codec, dict[str, Any]]] = {
        "masked": (
            tokens_system("masked"), TokenCodec(DVAETokens(DVAECodec({}, lambda: codecs["nearest"][1], 1.0), 16)),  # type: ignore[arg-type, return-value]
            {"type": "masked", "num_steps": 3},
        ),
        "autoregressive": (
            tokens_system("autoregressive"), published.build(None, None, torch.device("cpu"), torch.float32),
            {"type": "autoregressive", "top_k": 8},
        ),
    }  # fmt: skip
    made = {}
    for name, (system, codec, sampler) in of_tokens.items():
        of = DataSpec(channels=codec.tokens.num_tokens, resolution=8, num_classes=3)  # type: ignore[attr-defined]
        trained = randomised(system.build_network(of))
        settings = TokenSampleConfig.model_validate(
            {"sampler": sampler, "guidance": {"guidance_scale": 2.0}, "seed": 7}
        )
        labels = torch.tensor([2, 0, 1])
        images_ = system.sampling().generator(trained, of, codec, settings)(torch.tensor(SEEDS), labels)
        model = Model(trained, of, {}, ["a", "b", "c"], 1, 1, "0" * 64, num_steps=1, fingerprint="", system=system)
        export_of(system, "pipeline").write(system, model, codec, root / name)
        call = {"seeds": SEEDS, "class_labels": ["c", 0, 1], "sampler": sampler, "guidance_scale": 2.0, "seed": 7}
        made[f"{name} tokens"] = (
            images_.movedim(1, -1).numpy(), root / name, {**call, "batch_size": 2, "output_type": "np"},
        )  # fmt: skip
    return made | {
        "the prior": (embedded.numpy(), root / "prior", asked),
        "a prior transformer": (normalised.numpy(), root / "kandinsky", asked),
        "the discrete VAE": (decoded["dvae"], root / "dvae", {"images": images.tolist(), "output_type": "np"}),
        **{
            f"a discrete VAE of {name}": (decoded[name], root / name, {"images": images.tolist(), "output_type": "np"})
            for name in ("levels", "nearest")
        },
    }


NAMES = [
    "a DiT on pixels with all options", "a DiT with a class without images",
    "SiT by Heun", "SiT by DPM-Solver", "SiT by UniPC", "EDM by Heun with churn",
    "a DiT on latents of diffusers", "a DiT on latents of AutoencoderDC", "a DiT on Stable Diffusion's latents",
    "a DiT on a discrete VAE", "a DiT that is told words",
    "a DiT that is told embeddings", "a DiT that is told classes and numbers",
    "a U-Net that is told classes and numbers", "RIN that is told classes and numbers",
    "a U-Net", "a U-Net that enlarges", "a U-Net that is told masks", "a DiT that enlarges", "RIN that enlarges", "RIN",
    "the discrete VAE", "a discrete VAE of levels", "a discrete VAE of nearest",
    "masked tokens", "autoregressive tokens",
]  # fmt: skip


@dataclass
class Compared:
    here: np.ndarray
    there: np.ndarray
    folder: Path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compared]:
    """Run all exported models in one process that cannot import the package."""
    root = tmp_path_factory.mktemp("exported")
    calls, found = [], {}
    for number, (name, case) in enumerate(cases(root).items()):
        folder = root / f"model-{number}"
        export_of(case.system, "pipeline").write(case.system, case.model, case.codec, folder)
        calls.append([str(folder), case.asked, str(root / f"{number}.npy")])
        found[name] = (case.images(), root / f"{number}.npy", folder)
    for name, (here, folder, call) in others(root).items():
        calls.append([str(folder), call, str(root / f"{folder.name}.npy")])
        found[name] = (here, root / f"{folder.name}.npy", folder)
    load(calls, root)
    return {name: Compared(here, np.load(there), folder) for name, (here, there, folder) in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_exported_pipelines_make_the_same_images(exported: dict[str, Compared], name: str) -> None:
    found = exported[name]
    assert found.here.shape == found.there.shape and found.here.std() > 5
    difference = np.abs(found.here.astype(int) - found.there.astype(int)).max()
    assert difference <= 1, difference


def test_every_case_is_exported(exported: dict[str, Compared]) -> None:
    assert set(exported) == {*NAMES, "the prior", "a prior transformer"}


@pytest.mark.parametrize("name", ["the prior", "a prior transformer"])
def test_exported_priors_make_the_same_embeddings(exported: dict[str, Compared], name: str) -> None:
    found = exported[name]
    assert found.here.shape == (3, 16) and np.abs(found.here - found.there).max() < 1e-5


@pytest.mark.parametrize(
    "system",
    [
        dit(Flow()),
        dit(Edm(), objective=EdmDenoising(label_drop_probability=0.1)),
        dit(Flow(), objective={"type": "mean_flow"}),
        dit(process={"type": "discrete", "num_timesteps": 100}, objective={"type": "denoising"}),
    ],
    ids=["flow", "edm", "mean_flow", "discrete"],
)
def test_code_in_the_model_card_runs(tmp_path: Path, system: DiTSystem) -> None:
    """With the default sampler of the folder, which matches the process and the objective."""
    case = Case(system, DataSpec(channels=3, resolution=8, num_classes=3), Rgb(), {})
    use = export_of(system, "pipeline").write(system, case.model, case.codec, tmp_path / "out")
    code = use.code.splitlines()[-1]
    names: dict[str, Any] = {"pipeline": pipeline_of(tmp_path / "out")}
    exec(code, names)
    assert names["image"].size == (8, 8)


def pipeline_of(folder: Path) -> Any:
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(folder, custom_pipeline=str(folder), trust_remote_code=True)


def test_pipeline_takes_the_sampling_seed_as_argument(tmp_path: Path) -> None:
    """Without labels, classes depend on the seeds, as with `sample.labels: balanced`."""
    spec = DataSpec(channels=3, resolution=8, num_classes=3)
    case = Case(dit(), spec, Rgb(), {"type": "ddim", "num_steps": 3}, labels=[0, 2, 2], seed=7)
    export_of(case.system, "pipeline").write(case.system, case.model, case.codec, tmp_path / "out")
    pipeline, asked = pipeline_of(tmp_path / "out"), case.asked
    del asked["class_labels"]
    here, there = case.images().astype(int), pipeline(**asked, seed=7).images.astype(int)
    assert np.abs(here - there).max() <= 1 < np.abs(here - pipeline(**asked).images.astype(int)).max()


def test_pipeline_reads_numbers_like_a_table(tmp_path: Path) -> None:
    """NaN is a missing number; text and infinity are errors that name the row."""
    case = cases(tmp_path)["a U-Net that is told classes and numbers"]
    export_of(case.system, "pipeline").write(case.system, case.model, case.codec, tmp_path / "out")
    pipeline, asked = pipeline_of(tmp_path / "out"), {**case.asked, "class_labels": [0]}
    empty, missing = (
        pipeline(**asked | {"numbers": [{"age": 30.0, "dose": cell}]}).images for cell in (float("nan"), None)
    )
    assert np.array_equal(empty, missing)
    for cell, what in (("old", "'old' is no number"), (float("inf"), "'inf' is not finite")):
        with pytest.raises(ValueError, match=f"^numbers: age of row 1: {what}. Give a number, or null.$"):
            pipeline(**asked | {"numbers": [{"age": "30"}, {"age": cell}]})


def test_exported_models_and_the_package_use_separate_modules(exported: dict[str, Compared]) -> None:
    """The package is installed as well, and two models with different code are loaded one after the other."""
    code = (
        "import sys; from diffusers import DiffusionPipeline; import image_diffusion.networks.dit as ours;"
        "a, b = (DiffusionPipeline.from_pretrained(each, trust_remote_code=True) for each in sys.argv[1:]);"
        "images = [each(seeds=[0], num_inference_steps=1, output_type='np').images for each in (a, b)];"
        "assert not isinstance(a.model.network, ours.DiT) and type(a.model.network).__name__ == 'DiT';"
        "assert len({type(each.model).__module__ for each in (a, b)}) == 2"
    )
    folders = [str(exported[name].folder) for name in ("a DiT on pixels with all options", "a U-Net")]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_other_torch_dtypes_are_rejected(exported: dict[str, Compared]) -> None:
    from image_diffusion.export.bundle.loader import Exported

    with pytest.raises(ValueError, match=r'torch_dtype is torch.float16.* precision="bf16"'):
        Exported.from_pretrained(str(exported["a U-Net"].folder / "model"), torch_dtype=torch.float16)


def test_export_has_plain_files_and_only_required_code(exported: dict[str, Compared]) -> None:
    folder = exported["a U-Net"].folder
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == [
        "model/config.json", "model/diffusion_pytorch_model.safetensors", "model/exported.py", "model_index.json",
        "pipeline.py",
    ]  # fmt: skip
    name, sources = bundled(["image_diffusion.networks.unet", "image_diffusion.export.bundle.image_model"])
    assert "networks.unet" in sources and not {"networks.dit", "networks.rin", "systems", "codecs"} & set(sources)
    assert not [module for module in sources if module.split(".")[0] in ("training", "data", "metrics", "tracking")]
    assert all(f"from {name}." in text for module, text in sources.items() if "from image_diffusion" in text)
