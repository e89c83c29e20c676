"""Training states of the originals, read by `export --read`: the average is taken, and one forward pass is theirs.

The files are put together here, as the originals' code writes them, from golden weights: those of DiT (m01, case a),
improved-diffusion's U-Net (m02, plain), RIN (m03, adaln), DALLE-pytorch's discrete VAE (m04, a and noresnet_rgba) and
DALLE2-pytorch's prior (m05, net_a). SiT's network is DiT's, without the second half of its output.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from image_diffusion.core.files.weights import without_wrappers
from image_diffusion.core.process import command
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.process.flow import Flow
from image_diffusion.stages import export
from image_diffusion.stages.export import read_foreign
from image_diffusion.systems import SYSTEMS
from image_diffusion.systems.base import Model
from image_diffusion.training.load_model import load_model
from tiny_autoencoders import write_autoencoder

CLOSE = {"rtol": 0, "atol": 1e-5}
OPTIMIZER = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-4, "params": [0]}]}


class Dangerous:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("ran",)


def described(folder: Path, system: dict[str, Any], resolution: int, channels: int = 3) -> Path:
    """Write an experiment file."""
    data = {
        "name": "x", "source": {"type": "folder", "path": "images"}, "resolution": resolution, "channels": channels,
    }  # fmt: skip
    path = folder / "described.yaml"
    path.write_text(yaml.safe_dump({"data": data, "system": system, "train": {"steps": 1}}))
    return path


def shifted(tensors: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return weights that differ from the average, as trained ones do."""
    return {f"{prefix}{name}": each + 1 for name, each in tensors.items()}


def dit_state(golden: Any) -> dict[str, Any]:
    tensors = golden("m01_dit.npz").tensors("a/sd")
    return {"model": shifted(tensors), "ema": tensors, "opt": OPTIMIZER, "args": argparse.Namespace(model="DiT-S/2")}


def unet_state(golden: Any) -> dict[str, Any]:
    tensors: dict[str, Any] = golden("m02_unet.npz").tensors("plain/sd")
    return tensors


def rin_state(golden: Any) -> dict[str, Any]:
    tensors = golden("m03_rin.npz").tensors("adaln/sd")
    ema = {"initted": torch.tensor(True), "step": torch.tensor(7)}
    ema |= shifted(tensors, "online_model.model.") | {f"ema_model.model.{name}": each for name, each in tensors.items()}
    return {"step": 7, "model": shifted(tensors, "model."), "opt": OPTIMIZER, "ema": ema, "scaler": None}


def vae_state(golden: Any, case: str = "a") -> dict[str, Any]:
    file = golden("m04_dvae.npz")
    names = ("image_size", "num_layers", "num_tokens", "codebook_dim", "hidden_dim", "num_resnet_blocks", "channels")
    told = {name: value for name, value in file.params(case).items() if name in names}
    return {"hparams": told, "weights": file.tensors(f"{case}/sd")}


def prior_state(golden: Any) -> dict[str, Any]:
    tensors = golden("m05_prior.npz").tensors("net_a/sd")
    ema = {f"net.{name}": each for name, each in tensors.items()} | {"noise_scheduler.betas": torch.zeros(20)}
    return {"model": shifted(tensors, "net."), "ema_model": ema, "optimizer": OPTIMIZER, "step": 3, "epoch": 1}


RIN = {
    "type": "rin",
    "network": {
        "width": 32, "patch": 4, "depth": 2, "latent_depth": 1, "latent_width": 24, "num_latents": 6, "num_heads": 2,
        "head_width": 8,
    },
}  # fmt: skip
UNET = {
    "type": "iddpm",
    "network": {
        "channels": 32, "multipliers": [1, 2], "num_res_blocks": 1, "attention_resolutions": [4], "num_heads": 2,
        "scale_shift_norm": False,
    },
    "objective": {"type": "denoising", "variance": "fixed_large", "loss": "simple"},
}  # fmt: skip
DIT = {"type": "dit", "network": {"depth": 3, "width": 48, "num_heads": 3, "patch": 2, "time_frequencies": "dit"}}
SIT = DIT | {"process": {"type": "flow"}, "objective": {"type": "flow_matching", "label_drop_probability": 0.1}}


def read(
    folder: Path, content: dict[str, Any], experiment: Path | None = None, name: str = "x.pt"
) -> tuple[Model, str]:
    """Return the model read from a file, and the printed description of it."""
    torch.save(content, folder / name)
    write_autoencoder("sd", folder / "vae")
    told = read_foreign(folder / name, str(folder / "vae"), experiment, folder / "train")
    return load_model(folder / "train"), told


@pytest.mark.usefixtures("golden_sinusoids")
def test_dit(golden: Callable[[str], Any], tmp_path: Path) -> None:
    file = golden("m01_dit.npz")
    content = dit_state(golden) | {"args": argparse.Namespace(model="none of these")}
    model, told = read(tmp_path, content, described(tmp_path, DIT, 64))
    found = model.network(file["a/x"], file["a/t"], label=file["a/y"])
    torch.testing.assert_close(found, file["a/out"], **CLOSE)
    assert told == "a DiT of depth 3; not read: model, opt, args"


def test_sit_is_named_by_user_and_predicts_velocity_in_our_time(golden: Callable[[str], Any], tmp_path: Path) -> None:
    file = golden("m01_dit.npz")
    model, told = read(tmp_path, dit_state(golden), described(tmp_path, SIT, 64))
    assert told.startswith("a SiT of depth 3, as --experiment says") and isinstance(model.system.process, Flow)  # type: ignore[attr-defined]
    (tmp_path / "dit").mkdir()
    theirs, _ = read(tmp_path / "dit", dit_state(golden), described(tmp_path / "dit", DIT, 64))
    x, label = file["a/x"], file["a/y"]
    for t in (0.0, 0.25, 0.7, 1.0):
        time = torch.full((len(x),), t)
        velocity = theirs.network(x, time, label=label)[:, :4]
        torch.testing.assert_close(model.network(x, 1 - time, label=label), -velocity, **CLOSE)


def test_dit_without_description_is_reported_as_dit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = DiTConfig(depth=1, width=384, num_heads=6, patch=2).build(DataSpec(channels=4, resolution=4))
    _, told = read(tmp_path, network.state_dict())
    assert told == "a DiT of depth 1 that predicts eps; if it is a SiT, say so: --experiment"


def test_rin(golden: Callable[[str], Any], tmp_path: Path) -> None:
    file = golden("m03_rin.npz")
    with pytest.raises(
        ValueError, match=r"x\.pt is a RIN, but its tensors do not determine .* Give an experiment .* --experiment"
    ):
        read(tmp_path, rin_state(golden))
    model, told = read(tmp_path, rin_state(golden), described(tmp_path, RIN, 16))
    found = model.network(file["adaln/x"], file["adaln/t"])
    torch.testing.assert_close(found, file["adaln/out"], **CLOSE)
    assert told == "a RIN, its entry ema; not read: step, model, opt, scaler"


@pytest.mark.parametrize("case", ["a", "noresnet_rgba"])
def test_discrete_vae_is_described_by_its_hparams(golden: Callable[[str], Any], tmp_path: Path, case: str) -> None:
    file = golden("m04_dvae.npz")
    model, told = read(tmp_path, vae_state(golden, case) | {"epoch": 3})
    pixels = 2 * file[f"{case}/img"] - 1
    torch.testing.assert_close(model.network.logits(pixels), file[f"{case}/logits"], **CLOSE)  # type: ignore[operator]
    assert told == "a discrete VAE; not read: epoch"


def test_insufficient_hparams_are_an_error(golden: Callable[[str], Any], tmp_path: Path) -> None:
    content = vae_state(golden)
    del content["hparams"]["num_layers"]
    with pytest.raises(ValueError, match=r"hparams do not say how to build it \(missing: num_layers; not known: vq\)"):
        read(tmp_path, content | {"hparams": content["hparams"] | {"vq": True}})


def described_prior(golden: Any, folder: Path) -> Path:
    """Write an experiment file of the golden prior."""
    network = {
        "depth": 2, "num_heads": 4, "head_width": 16, "ff_mult": 2, "max_text_len": 5, "num_timesteps": 20,
        "divide_by_maximum": True,
    }  # fmt: skip
    network |= {"num_heads": golden("m05_prior.npz").params("net_a")["heads"]}
    system = {"type": "prior", "network": network, "process": {"num_timesteps": 20}}
    path = folder / "described.yaml"
    data = {"name": "x", "source": {"type": "folder", "path": "images"}, "resolution": 64}
    pairs = {"type": "hashed", "num_tokens": 5}
    path.write_text(yaml.safe_dump({"data": data, "system": system, "train": {"steps": 1}, "pairs": pairs}))
    return path


def test_the_prior(golden: Callable[[str], Any], tmp_path: Path) -> None:
    file = golden("m05_prior.npz")
    model, told = read(tmp_path, prior_state(golden), described_prior(golden, tmp_path))
    cond = {name: file[f"net_a/{name}"] for name in ("text_embed", "text_encodings")}
    found = model.network(file["net_a/image_embed"], file["net_a/t"], **cond)
    torch.testing.assert_close(found, file["net_a/out"], **CLOSE)
    assert told == "a prior, its entry ema_model; not read: model, optimizer, step, epoch"


def test_improved_diffusion(golden: Callable[[str], Any], tmp_path: Path) -> None:
    """It writes three files: model000010.pt, ema_0.9999_000010.pt and opt000010.pt."""
    file = golden("m02_unet.npz")
    tensors, experiment = file.tensors("plain/sd"), described(tmp_path, UNET, 8)
    model, told = read(tmp_path, tensors, experiment, "ema_0.9999_000010.pt")
    assert told == "a U-Net"
    torch.testing.assert_close(model.network(file["plain/x"], file["plain/t"]), file["plain/out"], **CLOSE)
    _, told = read(tmp_path, shifted(tensors), experiment, "model000010.pt")
    assert told == "a U-Net; averages of it lie beside it: ema_0.9999_000010.pt"


WRAPPERS = ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "ema.", "net.model."]


def wrapped(tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """Return the state dict of a network in wrappers, as AveragedModel and torch.compile write it."""
    counter: dict[str, Any] = {"n_averaged": torch.tensor(5)} if prefix == "module." else {}
    return counter | {f"{prefix}{name}": each for name, each in tensors.items()}


@pytest.mark.parametrize("prefix", WRAPPERS)
@pytest.mark.parametrize("kind", ["dit", "dit state", "unet", "rin", "dvae", "prior"])
def test_names_are_read_without_the_prefixes_of_wrappers(
    golden: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, prefix: str
) -> None:
    content: dict[str, Any]
    experiment: Path | None = None
    if kind.startswith("dit"):
        plain = dit_state(golden)["ema"]
        content, experiment = wrapped(plain, prefix), described(tmp_path, DIT, 64)
        content = content if kind == "dit" else {"ema": content, "opt": OPTIMIZER}
    elif kind == "unet":
        plain = unet_state(golden)
        content, experiment = wrapped(plain, prefix), described(tmp_path, UNET, 8)
    elif kind == "rin":
        plain = golden("m03_rin.npz").tensors("adaln/sd")
        content, experiment = {"step": 7, "model": wrapped(plain, prefix)}, described(tmp_path, RIN, 16)
    elif kind == "dvae":
        state = vae_state(golden)
        plain, content = state["weights"], state | {"weights": wrapped(state["weights"], prefix)}
    else:
        plain = golden("m05_prior.npz").tensors("net_a/sd")
        content, experiment = {"model": wrapped(plain, prefix)}, described_prior(golden, tmp_path)
    model, _ = read(tmp_path, content, experiment)
    found = model.network.state_dict()
    assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name].float()) for name in plain)
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "of a wrapper are dropped" in line
    assert all(f"{part}." in line for part in prefix.rstrip(".").split("."))


def test_wrappers_of_single_blocks_are_removed_from_names(golden: Callable[[str], Any], tmp_path: Path) -> None:
    plain = dit_state(golden)["ema"]
    blocks = {name.replace("blocks.1.", "blocks.1._orig_mod."): each for name, each in plain.items()}
    model, _ = read(tmp_path, blocks, described(tmp_path, DIT, 64))
    assert model.network.state_dict().keys() == plain.keys()


def test_prefix_missing_in_some_names_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for names in (["model.a", "b"], ["module.model.a", "model.b"], ["_orig_mod.a", "a"], ["modules.a", "modules.b"]):
        content = {name: torch.zeros(1) for name in names}
        assert list(without_wrappers(content, tmp_path / "x.pt")) == names
    assert capsys.readouterr().err == ""


def test_optimizer_state_is_distinguished_from_weights(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"opt000010\.pt is the state of an optimizer.* Use the file of weights beside it.*ema_"
    ):
        read(tmp_path, OPTIMIZER, name="opt000010.pt")


def test_another_class_of_diffusers_is_named(tmp_path: Path) -> None:
    (tmp_path / "flux").mkdir()
    (tmp_path / "flux/config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    with pytest.raises(ValueError, match="a folder of diffusers' FluxTransformer2DModel, which no system reads"):
        read_foreign(tmp_path / "flux", "", None, tmp_path / "train")


STATES: dict[str, tuple[Callable[[Any], dict[str, Any]], dict[str, Any] | None]] = {
    "dit": (dit_state, DIT), "unet": (unet_state, UNET), "rin": (rin_state, RIN), "dvae": (vae_state, None),
    "prior": (prior_state, None),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_file_that_would_run_code_is_refused(
    golden: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In each place of the format that may contain objects other than tensors."""
    monkeypatch.chdir(tmp_path)
    content = STATES[name][0](golden)
    for entry in list(content)[:8]:
        torch.save(content | {entry: Dangerous()}, tmp_path / "x.pt")
        with pytest.raises(ValueError, match=r"more than tensors and plain data .*mkdir.* would run code from it"):
            read_foreign(tmp_path / "x.pt", "", None, tmp_path / "train")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "train").exists()


class TheirConv(nn.Module):
    """`dall_e.utils.Conv2d`: weights w and b, and as much padding as keeps the size."""

    def __init__(self, c_in: int, c_out: int, kernel: int) -> None:
        super().__init__()
        self.w, self.b = (
            nn.Parameter(torch.randn(c_out, c_in, kernel, kernel) / c_in**0.5),
            nn.Parameter(torch.randn(c_out)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.w, self.b, padding=(self.w.shape[2] - 1) // 2)


class TheirBlock(nn.Module):
    """`dall_e.encoder.EncoderBlock` and `dall_e.decoder.DecoderBlock`."""

    def __init__(self, c_in: int, c_out: int, layers: int, kernels: tuple[int, ...]) -> None:
        super().__init__()
        inner = c_out // 4
        self.post_gain, self.device = 1 / layers**2, torch.device("cpu")
        self.id_path = TheirConv(c_in, c_out, 1) if c_in != c_out else nn.Identity()
        path = OrderedDict[str, nn.Module]()
        for i, (a, b) in enumerate(((c_in, inner), (inner, inner), (inner, inner), (inner, c_out))):
            path |= {f"relu_{i + 1}": nn.ReLU(), f"conv_{i + 1}": TheirConv(a, b, kernels[i])}
        self.res_path = nn.Sequential(path)

    def forward(self, x: Tensor) -> Tensor:
        return self.id_path(x) + self.post_gain * self.res_path(x)


class TheirSide(nn.Module):
    """`dall_e.encoder.Encoder` and `dall_e.decoder.Decoder`, of 3 groups of 2 blocks: n_hid 8, n_init 6, 16 tokens."""

    def __init__(
        self, widths: list[int], first: int, start: nn.Module, end: nn.Module, kernels: tuple[int, ...]
    ) -> None:
        super().__init__()
        parts = OrderedDict[str, nn.Module](input=start)
        between: dict[str, nn.Module] = {"pool": nn.MaxPool2d(kernel_size=2)}
        if kernels[0] == 1:
            between = {"upsample": nn.Upsample(scale_factor=2, mode="nearest")}
        for i, width in enumerate(widths):
            before = first if i == 0 else widths[i - 1]
            blocks = {f"block_{k + 1}": TheirBlock(before if k == 0 else width, width, 6, kernels) for k in range(2)}
            parts[f"group_{i + 1}"] = nn.Sequential(OrderedDict(**blocks, **(between if i < len(widths) - 1 else {})))
        parts["output"] = nn.Sequential(OrderedDict(relu=nn.ReLU(), conv=end))
        self.blocks = nn.Sequential(parts)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


@contextmanager
def called(names: dict[type, str]) -> Iterator[None]:
    """Classes of this file by other names, as pickles will know them: "package.module.Class"."""
    own = [(kind, kind.__module__, kind.__qualname__) for kind in names]
    places: dict[str, Any] = {"dall_e": SimpleNamespace()}
    for kind, name in names.items():
        kind.__module__, _, kind.__qualname__ = name.rpartition(".")
        vars(places.setdefault(kind.__module__, SimpleNamespace()))[kind.__qualname__] = kind
    sys.modules.update(places)
    try:
        yield
    finally:
        for kind, module, qualname in own:
            kind.__module__, kind.__qualname__ = module, qualname
        for place in places:
            del sys.modules[place]


def write_openai(folder: Path) -> tuple[TheirSide, TheirSide]:
    """encoder.pkl and decoder.pkl: pickled modules, by the names that the package `dall_e` has for them."""
    torch.manual_seed(0)
    encoder = TheirSide([8, 16, 32], 8, TheirConv(3, 8, 7), TheirConv(32, 16, 1), (3, 3, 3, 1))
    decoder = TheirSide([32, 16, 8], 6, TheirConv(16, 6, 1), TheirConv(8, 6, 1), (1, 3, 3, 3))
    for side, module in (("Encoder", encoder), ("Decoder", decoder)):
        place = f"dall_e.{side.lower()}.{side}"
        with called({TheirSide: place, TheirBlock: f"{place}Block", TheirConv: "dall_e.utils.Conv2d"}):
            torch.save(module, folder / f"{side.lower()}.pkl")
    return encoder, decoder


def test_openais_discrete_vae_is_read_without_its_code(tmp_path: Path) -> None:
    (tmp_path / "dalle").mkdir()
    encoder, decoder = write_openai(tmp_path / "dalle")
    experiment = described(tmp_path, {"type": "dvae"}, 16)
    told = read_foreign(tmp_path / "dalle", "", experiment, tmp_path / "train")
    assert told == "a discrete VAE" and "dall_e" not in sys.modules
    network: Any = load_model(tmp_path / "train").network
    pixels = torch.rand(2, 3, 16, 16)
    logits = encoder(0.8 * pixels + 0.1)
    torch.testing.assert_close(network.logits(2 * pixels - 1), logits, **CLOSE)
    assert torch.equal(network.indices(2 * pixels - 1), logits.argmax(1))
    tokens = torch.arange(32).view(2, 4, 4) % 16
    one_hot = F.one_hot(tokens, 16).permute(0, 3, 1, 2).float()
    theirs = (torch.sigmoid(decoder(one_hot)[:, :3]) - 0.1) / 0.8
    torch.testing.assert_close((network.decode(network.hard_latent(tokens)) + 1) / 2, theirs, **CLOSE)


def test_openais_files_with_more_than_its_parts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_openai(tmp_path)
    for name in ("encoder.pkl", "decoder.pkl"):
        whole = (tmp_path / name).read_bytes()
        for content in ({"blocks": Dangerous()}, Dangerous()):
            torch.save(content, tmp_path / name)
            with pytest.raises(
                ValueError, match=rf"{name} holds more than the parts of OpenAI's .*mkdir.* would run code"
            ):
                read_foreign(tmp_path, "", None, tmp_path / "train")
        (tmp_path / name).write_bytes(pickle.dumps(Dangerous()))
        with pytest.raises(ValueError, match=rf"{name} (holds more than the parts|is damaged)"):
            read_foreign(tmp_path, "", None, tmp_path / "train")
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=rf"{name} is damaged"):
            read_foreign(tmp_path, "", None, tmp_path / "train")
        (tmp_path / name).write_bytes(whole)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "train").exists()


@pytest.mark.parametrize("name", ["encoder.pkl", "decoder.pkl", "vae.pt"])
def test_a_bare_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """OpenAI's discrete VAE consists of two pickles of modules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps({"weights": Dangerous()}))
    with pytest.raises(ValueError, match=rf"{name} (holds more than tensors|is damaged)"):
        read_foreign(tmp_path / name, "", None, tmp_path / "train")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "train").exists()


@pytest.mark.parametrize("name", STATES)
def test_missing_entries_are_one_line_errors(golden: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    """For every tensor, and every entry, removed from a file."""
    make, system = STATES[name]
    edge = {"dit": 64, "unet": 8}.get(name, 16)
    experiment = None if system is None else described(tmp_path, system, edge)
    write_autoencoder("sd", tmp_path / "vae")
    inner = {"dit": "ema", "rin": "ema", "dvae": "weights", "prior": "ema_model"}.get(name)
    whole = make(golden)
    weights = whole[inner] if inner else whole
    of_others = ("initted", "step", "noise_scheduler.", "online_model.")
    for lost in [each for each in weights if not each.startswith(of_others)][:: max(1, len(weights) // 12)]:
        rest: dict[str, Any] = {key: each for key, each in weights.items() if key != lost}
        hparams = {"hparams": whole["hparams"]} if name == "dvae" else {}
        torch.save({inner: rest, **hparams} if inner else rest, tmp_path / "x.pt")
        with pytest.raises(ValueError, match=r"x\.pt .*\. (Use|Give|Expected)"):
            read_foreign(tmp_path / "x.pt", str(tmp_path / "vae"), experiment, tmp_path / "train")
    for left_out in list(whole)[:8]:
        torch.save({key: each for key, each in whole.items() if key != left_out}, tmp_path / "x.pt")
        try:
            read_foreign(tmp_path / "x.pt", str(tmp_path / "vae"), experiment, tmp_path / "train")
        except ValueError as error:
            assert "x.pt" in str(error)


@pytest.mark.parametrize(
    ("name", "file", "entries"),
    [
        ("dit", "x.pt", {"blocks.20000.x": torch.zeros(1)}),
        ("dit", "x.pt", {"blocks.x.y": torch.zeros(1)}),
        ("dit", "x.pt", {"x_embedder.proj.weight": torch.zeros(3)}),
        ("dit", "x.pt", {"x_embedder.proj.weight": torch.zeros(0, 4, 2, 2)}),
        ("prior", "ema472M.pth", {"causal_transformer.layers.20000.x": torch.zeros(1)}),
        ("prior", "ema472M.pth", {"causal_transformer.layers.x.y": torch.zeros(1)}),
        ("unet", "cifar10_uncond_50M_500K.pt", {"output_blocks.20000.x": torch.zeros(1)}),
        ("unet", "cifar10_uncond_50M_500K.pt", {"output_blocks.x.y": torch.zeros(1)}),
    ],
)
def test_odd_names_and_shapes_are_one_line_errors_without_delay(
    golden: Callable[[str], Any], tmp_path: Path, name: str, file: str, entries: dict[str, Tensor]
) -> None:
    """The number of blocks is that of the blocks in the file, whatever numbers their names have; a DiT of 20,001 blocks
    would take minutes to build."""
    inner = {"dit": "ema", "prior": "ema_model"}.get(name)
    whole = STATES[name][0](golden)
    prefix = "net." if name == "prior" else ""
    weights = (whole[inner] if inner else whole) | {f"{prefix}{entry}": each for entry, each in entries.items()}
    torch.save(whole | {inner: weights} if inner else weights, tmp_path / file)
    experiment = described(tmp_path, DIT, 64) if name == "dit" else None
    begin = time.monotonic()
    with pytest.raises(ValueError, match=rf"{re.escape(file)} .*\. (Use|Give|Expected)") as error:
        read_foreign(tmp_path / file, "", experiment, tmp_path / "train")
    assert "\n" not in str(error.value) and time.monotonic() - begin < 30


def test_command_prints_recognised_model(
    golden: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(vae_state(golden), tmp_path / "vae.pt")
    given = ["--read", str(tmp_path / "vae.pt"), "--output", str(tmp_path / "train")]
    monkeypatch.setattr(sys, "argv", ["export", *given])
    command.run(export.main)
    assert capsys.readouterr().out == f"export: wrote {tmp_path}/train from {tmp_path}/vae.pt: a discrete VAE\n"
    assert len({system.__name__ for system in SYSTEMS}) == len(SYSTEMS)
