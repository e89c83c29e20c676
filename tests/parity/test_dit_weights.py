"""DiT weights of the original and of diffusers: read, written, and the same numbers on both sides."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch
from torch import nn

from image_diffusion.codecs.diffusers import KlCodec
from image_diffusion.core.random.streams import image_streams, initial_noise
from image_diffusion.core.types import NUMBERS, DataSpec
from image_diffusion.networks.dit import DiT, DiTConfig
from image_diffusion.networks.weights.dit import DiTWeights, folder_tensors, read_dit
from image_diffusion.networks.weights.dit_diffusers import (
    ddim_scheduler,
    flow_scheduler,
    to_diffusers_transformer,
    write_dit_pipeline,
)
from image_diffusion.process.base import Grid
from image_diffusion.process.denoiser import NetworkDenoiser
from image_diffusion.process.discrete import Cosine, Discrete, Linear
from image_diffusion.process.flow import Flow
from image_diffusion.samplers.ancestral import Ddim
from image_diffusion.samplers.base import initial_scale
from image_diffusion.samplers.guidance import guided
from image_diffusion.samplers.ode import DpmSolver

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, DiTPipeline, DiTTransformer2DModel

SPEC = DataSpec(channels=4, resolution=8, num_classes=5)
TINY = {"depth": 2, "width": 48, "num_heads": 3, "patch": 2}


def random_dit(spec: DataSpec = SPEC, learned_variance: bool = True, interval: bool = False, **config) -> DiT:
    """Return a DiT without weights near zero, so that exchanged ones are detected."""
    torch.manual_seed(0)
    described = DiTConfig(**(config if "size" in config else TINY | config))
    network = described.build(spec, learned_variance, interval).eval()
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5 if "y_embedder" in name else 0.1)
    return network


def built(weights: DiTWeights) -> DiT:
    """Return the network that was read."""
    network = weights.config.build(weights.spec, weights.learned_variance)
    network.load_state_dict(weights.tensors)
    return network.eval()


def inputs(spec: DataSpec = SPEC) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(4, spec.channels, spec.resolution, spec.resolution, generator=torch.Generator().manual_seed(1))
    return x, torch.tensor([0, 3, 500, 999]), torch.tensor([0, 4, 2, spec.num_classes])


@torch.no_grad()
def outputs_of_diffusers(transformer: DiTTransformer2DModel, spec: DataSpec = SPEC) -> torch.Tensor:
    x, t, label = inputs(spec)
    label = torch.where(label == spec.num_classes, 1000, label)
    return transformer(x, timestep=t, class_labels=label).sample


@torch.no_grad()
def outputs(network: DiT) -> torch.Tensor:
    x, t, label = inputs(network.spec)
    return network(x, t, label=label) if network.spec.num_classes else network(x, t)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A file like DiT-XL-2-256x256.pt, of the smallest size: DiT-S/8, 1000 classes, random weights."""
    spec = DataSpec(channels=4, resolution=32, num_classes=1000)
    network = random_dit(spec, size="DiT-S/8", time_frequencies="dit")
    path = tmp_path_factory.mktemp("published") / "DiT-S-8-256x256.pt"
    torch.save(network.state_dict(), path)
    return path, network


def test_published_file_is_recognised(published, golden_names):
    path, network = published
    names = golden_names("names_dit.json.gz")["configs"]["DiT-S/8@256"]["state_dict"]
    assert {name: list(tensor.shape) for name, tensor in torch.load(path).items()} == names
    weights = read_dit(path)
    assert weights.config == DiTConfig(size="DiT-S/8", time_frequencies="dit")
    assert weights.spec == DataSpec(channels=4, resolution=32, num_classes=1000)
    assert weights.learned_variance
    assert torch.equal(outputs(built(weights)), outputs(network))
    trainable = [name for name, p in built(weights).named_parameters() if p.requires_grad]
    assert trainable == [name for name, p in network.named_parameters() if p.requires_grad]


def test_average_of_training_checkpoint_is_read(tmp_path):
    network, average = random_dit(time_frequencies="dit"), random_dit(time_frequencies="dit")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 1
    content = {
        "model": network.state_dict(),
        "ema": average.state_dict(),
        "opt": torch.optim.AdamW(network.parameters()).state_dict(),
        "args": argparse.Namespace(model="DiT-S/8", image_size=256, data_path="images"),
    }
    torch.save(content, tmp_path / "0000010.pt")
    weights = read_dit(tmp_path / "0000010.pt", num_heads=3)
    assert torch.equal(outputs(built(weights)), outputs(average))


def test_number_of_heads_is_read_from_checkpoint_arguments(tmp_path):
    network = random_dit(num_heads=6, time_frequencies="dit")
    torch.save({"ema": network.state_dict(), "args": argparse.Namespace(model="DiT-S/8")}, tmp_path / "x.pt")
    assert read_dit(tmp_path / "x.pt").config == network.config


def test_safetensors_and_half_precision_are_read(tmp_path):
    network = random_dit(time_frequencies="dit")
    halves = {name: tensor.half().contiguous() for name, tensor in network.state_dict().items()}
    safetensors.torch.save_file(halves, tmp_path / "x.safetensors")
    weights = read_dit(tmp_path / "x.safetensors", num_heads=3)
    assert {tensor.dtype for tensor in weights.tensors.values()} == {torch.float32}
    assert (outputs(built(weights)) - outputs(network)).norm() < 0.01 * outputs(network).norm()


@pytest.mark.parametrize(
    ("spec", "learned_variance"),
    [
        (SPEC, False),
        (SPEC, True),
        (SPEC.model_copy(update={"num_classes": 0}), False),
        (SPEC.model_copy(update={"num_classes": 1000}), True),
        (DataSpec(channels=3, resolution=12, num_classes=7), True),
    ],
    ids=["plain", "learned", "unconditional", "thousand", "rgb12"],
)
def test_diffusers_computes_the_same_and_reads_back(tmp_path, spec, learned_variance):
    from diffusers import DiTTransformer2DModel

    network = random_dit(spec, learned_variance)
    transformer = to_diffusers_transformer(network)
    torch.testing.assert_close(outputs_of_diffusers(transformer, spec), outputs(network), rtol=1e-5, atol=2e-5)
    transformer.save_pretrained(tmp_path / "transformer")
    loaded = DiTTransformer2DModel.from_pretrained(tmp_path / "transformer")
    assert torch.equal(outputs_of_diffusers(loaded, spec), outputs_of_diffusers(transformer, spec))
    weights = read_dit(tmp_path / "transformer")
    assert (weights.config, weights.spec, weights.learned_variance) == (network.config, spec, learned_variance)
    assert weights.tensors.keys() == network.state_dict().keys()
    assert torch.equal(outputs(built(weights)), outputs(network))


@pytest.mark.parametrize("wide", [{}, {"width": 1152, "num_heads": 16, "depth": 1, "time_frequencies": "dit"}])
def test_interval_network_is_same_function_in_diffusers(wide):
    """Diffusers passes no interval, which is 0 here: its embedding is one more constant in that of the time."""
    network = random_dit(learned_variance=False, interval=True, **wide)
    with torch.no_grad():
        network.t_embedder.mlp[0].weight *= 0.2
    transformer = to_diffusers_transformer(network)
    torch.testing.assert_close(outputs_of_diffusers(transformer), outputs(network), rtol=1e-3, atol=1e-3)


def test_sharded_folder_is_read_without_common_prefix_of_names(tmp_path):
    for number, name in enumerate(["model.a.weight", "model.b.weight"]):
        safetensors.torch.save_file(
            {name: torch.zeros(1)}, tmp_path / f"diffusion_pytorch_model-{number}-of-2.safetensors"
        )
    assert list(folder_tensors(tmp_path)) == ["a.weight", "b.weight"]
    safetensors.torch.save_file({"c": torch.ones(1)}, tmp_path / "diffusion_pytorch_model-2-of-2.safetensors")
    assert list(folder_tensors(tmp_path)) == ["model.a.weight", "model.b.weight", "c"]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_transformer_written_by_diffusers_is_read(tmp_path, suffix):
    """Not written by this package: 1000 classes and diffusers' own settings, as in facebook/DiT-XL-2-256."""
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, out_channels=8, num_layers=2, sample_size=8
    ).eval()
    embedders = transformer.transformer_blocks[0].norm1.emb.state_dict()
    transformer.transformer_blocks[1].norm1.emb.load_state_dict(embedders)
    transformer.save_pretrained(tmp_path, safe_serialization=suffix == "safetensors")
    assert (tmp_path / f"diffusion_pytorch_model.{suffix}").is_file()
    weights = read_dit(tmp_path)
    assert weights.config == DiTConfig(depth=2, width=32, num_heads=2, patch=2)
    assert weights.spec == DataSpec(channels=4, resolution=8, num_classes=1000)
    assert weights.learned_variance
    torch.testing.assert_close(
        outputs(built(weights)), outputs_of_diffusers(transformer, weights.spec), rtol=1e-4, atol=1e-4
    )


def test_wide_network_keeps_effect_of_its_frequencies():
    """A first time embedding that diffusers computes otherwise is refitted to equal values at every timestep."""
    network = random_dit(width=1152, num_heads=16, depth=1, time_frequencies="dit")
    with torch.no_grad():
        network.t_embedder.mlp[0].weight *= 0.2
    transformer = to_diffusers_transformer(network)
    t = torch.arange(1000)
    with torch.no_grad():
        ours = network.t_embedder(t, torch.float32)
        embedder = transformer.transformer_blocks[0].norm1.emb
        theirs = embedder.timestep_embedder(embedder.time_proj(t))
        unfitted = network.t_embedder.mlp(embedder.time_proj(t))
    assert (theirs - ours).abs().max() < 1e-5 * ours.abs().max()
    assert (unfitted - ours).abs().max() > 0.1 * ours.abs().max()
    torch.testing.assert_close(outputs_of_diffusers(transformer), outputs(network), rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def vae() -> AutoencoderKL:
    from diffusers import AutoencoderKL

    torch.manual_seed(2)
    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    ).eval()


@pytest.mark.parametrize(
    ("prediction", "variance", "schedule", "spec", "guidance_scale"),
    [
        ("eps", "learned_range", Linear(), SPEC, 1.0),
        ("eps", "learned_range", Linear(), SPEC, 3.0),
        ("eps", "fixed_small", Cosine(), SPEC, 1.5),
        ("v", "fixed_small", Linear(), SPEC, 2.0),
        ("x0", "fixed_small", Linear(), SPEC, 1.0),
        ("eps", "fixed_small", Linear(), SPEC.model_copy(update={"num_classes": 0}), 1.0),
    ],
)
def test_the_pipeline_makes_the_same_images(tmp_path, vae, prediction, variance, schedule, spec, guidance_scale):
    """The same noise, DDIM in 20 steps: pixels within 1/255 of ours."""
    from diffusers import DiTPipeline

    network = random_dit(spec, learned_variance=variance == "learned_range")
    process = Discrete(schedule=schedule).build()
    scale = 0.4
    classes = ["cat", "dog", "fox", "owl", "newt"][: spec.num_classes]
    write_dit_pipeline(tmp_path / "diffusers", network, vae, scale, ddim_scheduler(process.betas, prediction), classes)
    pipeline = DiTPipeline.from_pretrained(tmp_path / "diffusers")
    pipeline.set_progress_bar_config(disable=True)

    labels = torch.tensor([1, 4])
    noise = initial_noise(image_streams(torch.tensor([7, 8])), (4, 8, 8))
    images = run(pipeline, noise, labels, guidance_scale, steps=20)

    sampler = Ddim(num_steps="ddim20")
    grid = process.grid(sampler.num_steps)
    cond = {"label": labels} if spec.num_classes else {}
    null = {"label": torch.tensor(spec.num_classes)} if spec.num_classes else {}
    steered = guided(network, guidance_scale, null)
    denoiser = NetworkDenoiser(steered, process, grid, prediction, variance, cond)
    with torch.no_grad():
        x0 = sampler(denoiser, grid, noise, image_streams(torch.tensor([7, 8])))
    ours = KlCodec({}, lambda: vae, scale).decode(x0)
    assert ours.float().std() > 20
    assert (images.int() - ours.int()).abs().max() <= 1
    if spec.num_classes:
        assert pipeline.get_label_ids(["dog", "newt"]) == [1, 4]


def test_the_pipeline_follows_a_flow_with_the_same_images(tmp_path, vae):
    """DPM-Solver++ at the scheduler's own times: 0.999 … 0.999 / 20 and then 0, the network given whole thousandths."""
    from diffusers import DiTPipeline

    network = random_dit(learned_variance=False)
    write_dit_pipeline(tmp_path / "diffusers", network, vae, 0.4, flow_scheduler(1000.0, "velocity"))
    pipeline = DiTPipeline.from_pretrained(tmp_path / "diffusers")
    pipeline.set_progress_bar_config(disable=True)
    labels, streams = torch.tensor([1, 4]), image_streams(torch.tensor([7, 8]))
    noise = initial_noise(streams, (4, 8, 8))

    sigma = torch.linspace(0.999, 0, 21, dtype=torch.float64)
    grid = Grid(time=(1000 * sigma[:-1]).floor(), alpha=1 - sigma, sigma=sigma)
    steered = guided(network, 2.0, {"label": torch.tensor(5)})
    process = Flow(time_scale=1000.0).build()
    denoiser = NetworkDenoiser(steered, process, grid, "velocity", cond={"label": labels})
    with torch.no_grad():
        ours = KlCodec({}, lambda: vae, 0.4).decode(DpmSolver()(denoiser, grid, noise, streams))
    images = run(pipeline, initial_scale(grid) * noise, labels, 2.0, steps=20)
    assert ours.float().std() > 20
    assert (images.int() - ours.int()).abs().max() <= 1


def run(pipeline: DiTPipeline, noise: torch.Tensor, labels: torch.Tensor, scale: float, steps: int) -> torch.Tensor:
    """Return the pipeline's images, uint8 [B, 3, H, W], from given noise instead of the pipeline's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusers.pipelines.dit.pipeline_dit.randn_tensor", lambda *_, **__: noise.clone())
        pictures = pipeline(labels.tolist(), guidance_scale=scale, num_inference_steps=steps, output_type="np").images
    return torch.from_numpy((pictures * 255).round()).to(torch.uint8).permute(0, 3, 1, 2)


def test_v_prediction_works_with_other_schedulers(tmp_path, vae):
    from diffusers import DiTPipeline, DPMSolverMultistepScheduler

    network = random_dit(learned_variance=False)
    write_dit_pipeline(tmp_path / "diffusers", network, vae, 0.4, ddim_scheduler(Discrete().build().betas, "v"))
    pipeline = DiTPipeline.from_pretrained(tmp_path / "diffusers")
    pipeline.set_progress_bar_config(disable=True)
    labels, noise = torch.tensor([1, 4]), torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    many = run(pipeline, noise, labels, 1.0, steps=250)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    fewer = run(pipeline, noise, labels, 1.0, steps=50)
    assert (fewer.float() - many.float()).abs().mean() < 8


def test_folder_is_replaced_and_autoencoder_is_unchanged(tmp_path, vae):
    from diffusers import AutoencoderKL, DDIMScheduler

    folder = tmp_path / "diffusers"
    folder.mkdir()
    (folder / "left over").touch()
    before = dict(vae.config)
    for _ in range(2):
        write_dit_pipeline(folder, random_dit(), vae, 0.4, ddim_scheduler(Discrete().build().betas, "eps"))
    assert names_in(tmp_path) == ["diffusers"]
    assert names_in(folder) == ["model_index.json", "scheduler", "transformer", "vae"]
    assert dict(vae.config) == before
    assert AutoencoderKL.from_pretrained(folder / "vae").config.scaling_factor == 0.4
    assert torch.allclose(DDIMScheduler.from_pretrained(folder / "scheduler").betas, Discrete().build().betas.float())
    assert torch.equal(outputs(built(read_dit(folder))), outputs(random_dit()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"qk_norm": True}, "has no qk_norm true"),
        (
            {"rope": True, "patch_bottleneck": 8, "class_tokens": 2},
            "no rope true and no patch_bottleneck and no",
        ),
        ({"norm": "rms_norm", "mlp": "swiglu"}, "has no norm rms_norm and no mlp swiglu"),
        ({"mlp_ratio": 2.0}, "mlp_ratio is 2.0; diffusers' DiT has 4"),
        ({"time_frequencies": "dit"}, "48 channels are too few .* Train with network.time_frequencies diffusers"),
    ],
)
def test_settings_without_equivalent_in_diffusers_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        to_diffusers_transformer(random_dit(**config))


def test_conditions_and_layers_that_diffusers_does_not_know_are_refused():
    with pytest.raises(ValueError, match="Diffusers' DiT has no conditions"):
        to_diffusers_transformer(random_dit(SPEC.model_copy(update={"conditions": {NUMBERS: (2, 2)}})))
    network = random_dit()
    network.register_module("extra", nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"no extra\.bias, extra\.weight\. Set export\.format"):
        to_diffusers_transformer(network)


def test_more_classes_than_pipeline_labels_are_refused():
    with pytest.raises(ValueError, match="has 1001 classes, but DiTPipeline takes label 1000 for none"):
        to_diffusers_transformer(random_dit(SPEC.model_copy(update={"num_classes": 1001})))


def test_predictions_unsupported_by_schedulers_are_refused():
    with pytest.raises(ValueError, match="predicts velocity, which diffusers' DDIM does not support; use eps, x0, v"):
        ddim_scheduler(Discrete().build().betas, "velocity")
    with pytest.raises(ValueError, match="predicts velocity at flow times multiplied by 1; diffusers needs"):
        flow_scheduler(1.0, "velocity")
    with pytest.raises(ValueError, match="predicts x0 at flow times multiplied by 1000"):
        flow_scheduler(1000.0, "x0")


def test_autoencoder_of_other_channels_is_refused(tmp_path, vae):
    three = random_dit(SPEC.model_copy(update={"channels": 3}))
    with pytest.raises(ValueError, match="autoencoder has 4 latent channels but the network was built for 3"):
        write_dit_pipeline(tmp_path / "diffusers", three, vae, 1.0, ddim_scheduler(Discrete().build().betas, "eps"))
    assert not (tmp_path / "diffusers").exists()


def test_faults_of_file_are_listed(tmp_path):
    state = random_dit(time_frequencies="dit").state_dict()

    def message(content, name="x.pt") -> str:
        torch.save(content, tmp_path / name)
        with pytest.raises(ValueError, match=name) as caught:
            read_dit(tmp_path / name, num_heads=3)
        return str(caught.value)

    part = {name: tensor for name, tensor in state.items() if name != "blocks.1.attn.proj.bias"}
    assert "missing: blocks.1.attn.proj.bias. Use weights" in message(part)
    assert "unexpected: extra. Use weights" in message(state | {"extra": torch.ones(1)})
    wrong = message(state | {"blocks.0.attn.qkv.bias": torch.ones(3)})
    assert "of another shape: blocks.0.attn.qkv.bias [3] instead of [144]" in wrong
    other = message({f"unet.{i}": torch.ones(1) for i in range(10)})
    assert "not a DiT: pos_embed, x_embedder.proj.weight" in other
    assert "unet.7 and 2 more" in other
    assert "neither a state dict nor a training checkpoint: it holds step" in message({"step": 1})
    assert "holds a list. Expected tensors by name" in message([1, 2])
    without_head = {name: tensor for name, tensor in state.items() if not name.startswith("pos_embed")}
    assert "not a DiT: pos_embed missing" in message(without_head)


def test_unknown_number_of_heads_is_an_error(tmp_path):
    torch.save(random_dit().state_dict(), tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"width 48, which is none of the paper's.* Set num_heads"):
        read_dit(tmp_path / "x.pt")


class Dangerous:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_file_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"ema": random_dit().state_dict(), "args": Dangerous()}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"more than tensors and plain data .*posix\.system.* would run code from it"):
        read_dit(tmp_path / "x.pt")
    assert names_in(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"text", b"\x80\x02}."])
def test_damaged_weights_file_is_an_error(tmp_path, content, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged, or not a file of tensors.* Copy it again\."):
        read_dit(path)


def test_truncated_weights_file_is_an_error(tmp_path):
    torch.save(random_dit().state_dict(), tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        read_dit(tmp_path / "x.pt")


def test_missing_weights_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"x\.pt does not exist\. Use a \.pt or \.safetensors file"):
        read_dit(tmp_path / "x.pt")


def test_faults_of_folder_are_listed(tmp_path):
    to_diffusers_transformer(random_dit()).save_pretrained(tmp_path / "whole")

    def message(change_weights=lambda tensors: tensors, **settings) -> str:
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder)
        tensors = safetensors.torch.load_file(folder / "diffusion_pytorch_model.safetensors")
        safetensors.torch.save_file(change_weights(tensors), folder / "diffusion_pytorch_model.safetensors")
        config = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="broken") as caught:
            read_dit(folder)
        return str(caught.value)

    bias = "transformer_blocks.1.ff.net.2.bias"
    assert f"missing: {bias}. Use" in message(lambda tensors: {k: v for k, v in tensors.items() if k != bias})
    assert "unexpected: extra. Use" in message(lambda tensors: tensors | {"extra": torch.ones(1)})
    embedder = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.bias"
    assert f"has another {embedder} than" in message(lambda tensors: tensors | {embedder: tensors[embedder] + 1})
    assert "norm_type 'ada_norm'; a DiT has 'ada_norm_zero'" in message(norm_type="ada_norm")
    (tmp_path / "whole" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"no diffusion_pytorch_model\.safetensors\. Use a folder that diffusers wrote"
    ):
        read_dit(tmp_path / "whole")
