"""Export of a DiT to diffusers: the transformer, and the pipeline folder that `DiTPipeline.from_pretrained` loads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from image_diffusion.core.files.atomic import atomic_folder
from image_diffusion.core.resolution import size_text
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import DiT, DiTConfig
from image_diffusion.networks.weights.dit import diffusers_names
from image_diffusion.nn.inputs import TIME_CHANNELS
from image_diffusion.nn.positions import grid_positions, sinusoid

if TYPE_CHECKING:  # diffusers takes seconds to import
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

NULL_LABEL = 1000
"""Label that means no label in DiTPipeline, for any number of classes."""

_TIME_ERROR = 1e-4  # maximum error of the refitted time embedding, relative to its largest value


def check_transformer(config: DiTConfig, spec: DataSpec) -> None:
    """Raise ValueError for what diffusers' DiT does not have: RMSNorm, normalised queries and keys, SwiGLU, rotary
    positions, a bottleneck, class tokens, conditions beside the class, another MLP, more than 1000 classes, or
    rectangles."""
    foreign = {
        "qk_norm true": config.qk_norm,
        "norm rms_norm": config.norm != "layer_norm",
        "mlp swiglu": config.mlp != "gelu",
        "rope true": config.rope,
        "patch_bottleneck": config.patch_bottleneck is not None,
        "class_tokens": config.class_tokens > 0,
        "conditions": bool(spec.conditions),
    }
    if any(foreign.values()):
        raise ValueError(
            f"Diffusers' DiT has no {' and no '.join(name for name, used in foreign.items() if used)}. "
            f"Set export.format to pipeline, or train without."
        )
    if config.mlp_ratio != 4:
        raise ValueError(
            f"network.mlp_ratio is {config.mlp_ratio}; diffusers' DiT has 4. Set export.format to pipeline."
        )
    if spec.num_classes > NULL_LABEL:
        raise ValueError(
            f"The network has {spec.num_classes} classes, but DiTPipeline takes label {NULL_LABEL} for none. "
            f"Set export.format to pipeline."
        )
    if not isinstance(spec.resolution, int):
        raise ValueError(
            f"The network works on {size_text(spec.resolution)} values, but diffusers' DiT takes squares alone. Set "
            "export.format to pipeline."
        )


def to_diffusers_transformer(network: DiT, num_timesteps: int = 1000) -> DiTTransformer2DModel:
    """Return an equivalent DiTTransformer2DModel for timesteps 0 … num_timesteps - 1.

    Its label table has 1001 rows, the last for no label, as DiTPipeline asks for label 1000 then; rows between the
    classes and that one are copies of it. For a network of unlabelled data every row is zero. A network whose
    time_frequencies are "dit" gets another time embedding, with the same values at every timestep (`_refit_time`). A
    network of intervals becomes what it is without one: the velocity at a time.

    Raises ValueError for what diffusers' DiT does not have: `check_transformer`, positions that were interpolated, or
    DiT's own frequencies in a network of too few channels.
    """
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    config, spec = network.config, network.spec
    check_transformer(config, spec)
    depth, width, num_heads, patch = config.shape
    if not torch.allclose(network.pos_embed.cpu(), grid_positions(width, network.grid_size)[None], atol=1e-5):
        raise ValueError(
            "The network's positions were interpolated from another resolution (train.init_from), but diffusers' DiT "
            "computes its own. Set export.format to pipeline."
        )
    tensors, names = _without_interval(network), diffusers_names(depth)
    if unknown := sorted(tensors.keys() - names.keys() - {"pos_embed"}):
        raise ValueError(f"Diffusers' DiT has no {', '.join(unknown)}. Set export.format to pipeline.")
    transformer = DiTTransformer2DModel(
        num_attention_heads=num_heads,
        attention_head_dim=width // num_heads,
        in_channels=spec.channels,
        out_channels=spec.channels * (2 if network.learned_variance else 1),
        num_layers=depth,
        sample_size=spec.resolution,
        patch_size=patch,
        num_embeds_ada_norm=NULL_LABEL,
        norm_eps=1e-6,
    )
    if config.time_frequencies == "dit":
        tensors |= _refit_time(tensors, num_timesteps)
    tensors["y_embedder.embedding_table.weight"] = _label_table(network, tensors)
    theirs: dict[str, Tensor] = {}
    for ours, places in names.items():
        parts = tensors[ours].chunk(3) if ".attn.qkv." in ours else [tensors[ours]] * len(places)
        theirs |= dict(zip(places, parts, strict=True))
    transformer.load_state_dict(theirs)
    return transformer.eval()


_PREDICTIONS = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}


def prediction_type(prediction: str, scheduler: str) -> str:
    """Return diffusers' name of a prediction on a discrete process. scheduler: to name in the message. Raises
    ValueError for a prediction that diffusers does not have."""
    if prediction not in _PREDICTIONS:
        raise ValueError(
            f"The network predicts {prediction}, which diffusers' {scheduler} does not support; use "
            f"{', '.join(_PREDICTIONS)}. Or set export.format to pipeline."
        )
    return _PREDICTIONS[prediction]


def ddim_scheduler(betas: Tensor, prediction: str) -> DDIMScheduler:
    """Return DDIM without noise, for a discrete process: our Ddim with num_steps "ddim50" for num_inference_steps 50.

    betas: float64 [T], of every timestep of the schedule; the network is given 0 … T - 1. prediction: eps, x0 or v,
    what the network returns. Raises ValueError for others.
    """
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    return DDIMScheduler(
        num_train_timesteps=len(betas),
        trained_betas=betas.tolist(),
        clip_sample=False,
        set_alpha_to_one=True,
        prediction_type=prediction_type(prediction, "DDIM"),
    )


def check_flow(time_scale: float, prediction: str) -> None:
    """Raise ValueError unless the network predicts the velocity at times in [0, 1] that are multiplied by 1000."""
    if prediction != "velocity" or time_scale != 1000:
        raise ValueError(
            f"The network predicts {prediction} at flow times multiplied by {time_scale:g}; diffusers needs velocity "
            f"and 1000. Train with process.time_scale 1000 and prediction velocity, or set export.format to pipeline."
        )


def flow_scheduler(time_scale: float, prediction: str) -> DPMSolverMultistepScheduler:
    """Return DPM-Solver++ (2M) for a flow process, at N times evenly spaced from 0.999 to 0.999 / N, and then 0.

    The scheduler for flows that DiTPipeline can call. It gives the network thousandths of the time, rounded down.
    time_scale: factor of times in [0, 1] for the network. Raises ValueError unless it is 1000, as for
    all flows in diffusers, and the network predicts the velocity.
    """
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

    check_flow(time_scale, prediction)
    return DPMSolverMultistepScheduler(
        num_train_timesteps=1000, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
    )


def write_dit_pipeline(
    folder: Path,
    network: DiT,
    vae: AutoencoderKL,
    scale: float,
    scheduler: DDIMScheduler | DPMSolverMultistepScheduler,
    classes: Sequence[str] = (),
) -> None:
    """Write a folder that `DiTPipeline.from_pretrained` loads. It is completed before it replaces an existing one.

    scale: what a latent was multiplied with for the network. scheduler: `ddim_scheduler` or `flow_scheduler`.
    classes: their names, none for unlabelled data, for which the pipeline takes any label.

    The pipeline guides all channels of x, which needs a network trained with label dropout. Raises ValueError for a
    network that diffusers has no place for (`to_diffusers_transformer`), and for an autoencoder of other latents.
    """
    from diffusers.pipelines.dit.pipeline_dit import DiTPipeline

    if vae.config.latent_channels != network.spec.channels:
        raise ValueError(
            f"The autoencoder has {vae.config.latent_channels} latent channels but the network was built for "
            f"{network.spec.channels}. Use the autoencoder that encoded its latents."
        )
    transformer = to_diffusers_transformer(network, scheduler.config.num_train_timesteps)
    pipeline: Any = DiTPipeline(transformer=transformer, vae=_scaled(vae, scale), scheduler=scheduler)
    pipeline.register_to_config(id2label={str(i): name for i, name in enumerate(classes)})
    with atomic_folder(folder) as written:
        pipeline.save_pretrained(written)


@torch.no_grad()
def _without_interval(network: DiT) -> dict[str, Tensor]:
    """Return the tensors of a network, float32. The embedding of the interval 0 joins the bias of the time's."""
    tensors = {name: tensor.detach().cpu().float() for name, tensor in network.state_dict().items()}
    if hasattr(network, "interval_embedder"):
        zero = network.pos_embed.new_zeros(1)
        constant = network.interval_embedder(zero, zero.dtype)[0].cpu().float()  # [D]
        tensors["t_embedder.mlp.2.bias"] = tensors["t_embedder.mlp.2.bias"] + constant
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("interval_embedder.")}


def _label_table(network: DiT, tensors: dict[str, Tensor]) -> Tensor:
    """Return the label table [1001, D]: the classes, and no label in every other row."""
    width, num_classes = network.config.shape.width, network.spec.num_classes
    table = tensors.get("y_embedder.embedding_table.weight", torch.zeros(0, width))
    null = table[num_classes] if len(table) > num_classes else torch.zeros(width)
    return torch.cat([table[:num_classes], null.expand(NULL_LABEL + 1 - num_classes, width)])


def _refit_time(tensors: dict[str, Tensor], num_timesteps: int) -> dict[str, Tensor]:
    """Return a time embedding for diffusers' frequencies with the values of this one for DiT's frequencies.

    No linear map converts the sines. But only num_timesteps values count, which an MLP with as many hidden channels can
    fit: the first layer is fixed and random, and the second is solved for in float64.
    """
    first, second = "t_embedder.mlp.0", "t_embedder.mlp.2"
    width = tensors[f"{second}.bias"].numel()
    t = torch.arange(num_timesteps)
    old, new = (sinusoid(t, TIME_CHANNELS, endpoint=endpoint).double() for endpoint in (False, True))  # [T, 256]
    target = F.linear(old, tensors[f"{first}.weight"].double(), tensors[f"{first}.bias"].double())
    target = F.linear(
        F.silu(target), tensors[f"{second}.weight"].double(), tensors[f"{second}.bias"].double()
    )  # [T, D]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, TIME_CHANNELS, generator=generator)
    bias = torch.randn(width, generator=generator)
    hidden = F.silu(F.linear(new, weight.double(), bias.double()))  # [T, D]
    design = torch.cat([hidden, hidden.new_ones(num_timesteps, 1)], dim=1)
    solution = torch.linalg.lstsq(design, target, driver="gelsd").solution.float()  # [D + 1, D]
    got = F.linear(F.silu(F.linear(new.float(), weight, bias)), solution[:-1].T, solution[-1])
    error = ((got - target).abs().max() / target.abs().max()).item()
    if not error < _TIME_ERROR:
        raise ValueError(
            f"The network has time_frequencies dit, but diffusers' DiT computes others, and {width} channels are too "
            f"few to make up for that at {num_timesteps} timesteps: the embedding would be off by {error:.1%}. Train "
            f"with network.time_frequencies diffusers, or set export.format to pipeline."
        )
    return {
        f"{first}.weight": weight,
        f"{first}.bias": bias,
        f"{second}.weight": solution[:-1].T.contiguous(),
        f"{second}.bias": solution[-1],
    }


def _scaled(vae: AutoencoderKL, scale: float) -> AutoencoderKL:
    """Return the same autoencoder with its scale in its configuration, which DiTPipeline divides by; `vae` keeps its
    own."""
    scaled: AutoencoderKL = copy.copy(vae)
    scaled.register_to_config(scaling_factor=scale)
    return scaled
