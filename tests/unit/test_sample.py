"""Sampling: images depend only on their seeds; weights of other projects are sampled without training."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import dump, to_yaml
from image_diffusion.core.files.atomic import atomic_write, write_json
from image_diffusion.core.files.checksums import describe
from image_diffusion.core.files.image_arrays import read_arrays, save_samples
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.journal.reader import read_journal
from image_diffusion.core.types import DataSpec
from image_diffusion.metrics.samples import read_samples
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.process.discrete import Cosine, Discrete
from image_diffusion.samplers.ancestral import Ddim, Ddpm
from image_diffusion.samplers.guidance import Guidance
from image_diffusion.stages import export, sample
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig, requested_labels
from image_diffusion.systems.sample_batches import joined, remove_stale_parts

SPEC = DataSpec(channels=3, resolution=8, num_classes=4)
NETWORK = DiTConfig(depth=2, width=16, num_heads=2, patch=2)


def system(drop: float = 0.1) -> DiTSystem:
    objective = Denoising(prediction="v", label_drop_probability=drop)
    return DiTSystem(network=NETWORK, process=Discrete(schedule=Cosine()), objective=objective)


def random_network(of: DiTSystem, spec: DataSpec = SPEC, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    network = of.build_network(spec)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return network.eval()


def settings(**changes: object) -> SampleConfig:
    return SampleConfig.model_validate({"sampler": {"type": "ddpm", "num_steps": 4, "clip_denoised": True}} | changes)


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_an_image_is_the_same_in_any_batch(guidance_scale: float) -> None:
    chosen = settings(guidance={"guidance_scale": guidance_scale})
    generator = Generator(random_network(system()), system().reading, SPEC, Rgb(), chosen)
    seeds, labels = torch.arange(7), torch.arange(7) % 4
    whole = generator(seeds, labels)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 7)):
        # One grey level: sums in a batch of another size may differ in the last bit.
        difference = generator(seeds[rows], labels[rows]).int() - whole[rows].int()
        assert difference.abs().max() <= 1
    assert len(np.unique(whole.flatten(1).numpy(), axis=0)) == 7


def test_autoguidance_leads_away_from_the_weaker_network() -> None:
    strong, weak = random_network(system(0.0), seed=0), random_network(system(0.0), seed=1)
    seeds, labels = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    make = {
        scale: Generator(strong, system(0.0).reading, SPEC, Rgb(), settings(guidance={"guidance_scale": scale}), weak)(
            seeds, labels
        )
        for scale in (0.0, 1.0, 2.0)
    }
    alone = {
        each: Generator(each, system(0.0).reading, SPEC, Rgb(), settings())(seeds, labels) for each in (strong, weak)
    }
    assert (make[0.0].int() - alone[weak].int()).abs().max() <= 1
    assert torch.equal(make[1.0], alone[strong])
    assert not torch.equal(make[2.0], make[1.0])


@pytest.mark.parametrize(
    ("labels", "expected"),
    [("balanced", [0, 1, 2, 0, 1]), (["b", 2], [1, 2, 1, 2, 1]), ([0], [0, 0, 0, 0, 0])],
)
def test_requested_labels_are_used(labels: object, expected: list[int]) -> None:
    found = requested_labels(labels, ["a", "b", "c"], torch.arange(5))  # type: ignore[arg-type]
    assert found is not None and found.tolist() == expected


def test_random_labels_follow_the_seed_and_are_none_without_classes() -> None:
    whole = requested_labels("random", ["a", "b", "c"], torch.arange(100))
    part = requested_labels("random", ["a", "b", "c"], torch.arange(50, 100))
    assert whole is not None and part is not None
    assert torch.equal(whole[50:], part) and set(whole.tolist()) == {0, 1, 2}
    assert requested_labels("balanced", [], torch.arange(4)) is None


@pytest.mark.parametrize("label", ["d", 3, -1])
def test_unknown_class_is_rejected(label: int | str) -> None:
    with pytest.raises(ValueError, match="the classes are 0 to 2: a, b, c"):
        requested_labels([label], ["a", "b", "c"], torch.arange(1))


def test_guidance_without_label_dropout_in_training_is_rejected() -> None:
    with pytest.raises(ValueError, match="no labels were dropped in training"):
        Generator(
            random_network(system(0.0)), system(0.0).reading, SPEC, Rgb(), settings(guidance={"guidance_scale": 2.0})
        )


def test_sampler_uses_the_variance_of_the_objective() -> None:
    """Unless the sampler sets another: samples and bits per dimension then use the same model."""
    of = DiTSystem(network=system().network, objective={"variance": "fixed_large", "loss": "simple"})
    network, seeds, labels = random_network(of), torch.arange(4), torch.zeros(4, dtype=torch.int64)
    images = {
        variance: Generator(
            network,
            of.reading,
            SPEC,
            Rgb(),
            SampleConfig.model_validate({"sampler": {"type": "ddpm", "num_steps": 4} | named}),
        )(seeds, labels)
        for variance, named in {
            "unset": {},
            "large": {"variance": "fixed_large"},
            "small": {"variance": "fixed_small"},
            "unclipped": {"clip_denoised": False},
        }.items()
    }
    assert torch.equal(images["unset"], images["large"])
    assert not torch.equal(images["unset"], images["small"]) and not torch.equal(images["unset"], images["unclipped"])


def run(monkeypatch: pytest.MonkeyPatch, module: object, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    module.main()  # type: ignore[attr-defined]


def test_foreign_weights_are_sampled_without_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
    )
    vae.save_pretrained(tmp_path / "vae")
    spec = DataSpec(channels=4, resolution=4, num_classes=1000)
    config = DiTConfig(size="DiT-S/4", depth=1, time_frequencies="dit")
    objective = Denoising(prediction="eps", variance="learned_range", loss="hybrid", label_drop_probability=0.1)
    network = random_network(DiTSystem(network=config, objective=objective), spec)
    torch.save({"ema": network.state_dict()}, tmp_path / "DiT.pt")
    (tmp_path / "sample.yaml").write_text(
        to_yaml({"sample": dump(SampleConfig(num_samples=3, sampler=Ddpm(num_steps=2), labels=[207, 360]))})
    )

    run(monkeypatch, export, "--read", tmp_path / "DiT.pt", "--codec", tmp_path / "vae", "--output", tmp_path / "read")
    weights, npz = tmp_path / "read" / "weights.safetensors", tmp_path / "samples" / "samples.npz"
    run(monkeypatch, sample, "--config", tmp_path / "sample.yaml", "--weights", weights, "--output", npz)
    with np.load(npz) as arrays:
        assert arrays["arr_0"].shape == (3, 32, 32, 3) and arrays["arr_1"].tolist() == [207, 360, 207]
    assert json.loads((npz.parent / "samples.json").read_text())["num_samples"] == 3

    first = npz.read_bytes()
    run(monkeypatch, sample, "--config", tmp_path / "sample.yaml", "--weights", weights, "--output", npz)
    assert npz.read_bytes() == first


def write_model(folder: Path) -> Path:
    model = {
        "system": dump(system()),
        "spec": dump(SPEC),
        "codec": {"config": dump(Rgb()), "identity": Rgb().identity, "scale": None},
        "classes": ["a", "b", "c", "d"],
        "step": 1,
        "examples_seen": 1,
    }
    save_weights(folder, random_network(system()).state_dict(), model)
    return folder / "weights.safetensors"


def test_joined_parts_are_identical_to_one_job_and_pictures_are_kept_if_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(num_samples=23, batch_size=4, images_per_job=8, first_seed=5, pictures=True)
    assert chosen.num_jobs == 3
    (tmp_path / "sample.yaml").write_text(to_yaml({"sample": dump(chosen)}))
    given = ["--config", tmp_path / "sample.yaml", "--weights", write_model(tmp_path / "train")]
    run(monkeypatch, sample, *given, "--output", tmp_path / "one" / "samples.npz")
    parts = [tmp_path / "parts" / f"{i}.npz" for i in range(3)]
    for i, path in reversed(list(enumerate(parts))):
        run(monkeypatch, sample, *given, "--part", f"{i}/3", "--output", path)
    assert [len(np.load(path)["arr_0"]) for path in parts] == [8, 8, 7]
    with pytest.raises(ValueError, match="--made holds 16 samples, but sample.num_samples is 23"):
        run(monkeypatch, sample, *given, "--made", *parts[:2], "--output", tmp_path / "three" / "samples.npz")
    assert all(path.exists() for path in parts)
    run(monkeypatch, sample, *given, "--made", *parts, "--output", tmp_path / "two" / "samples.npz")
    assert not any(path.exists() for path in parts), "a killed Snakemake would leave them for ever"
    for name in ("samples.npz", "samples.json", "grid.png", "steps.png", "pictures/00000005.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    with np.load(tmp_path / "two" / "samples.npz") as arrays:
        images, labels = arrays["arr_0"], arrays["arr_1"]
    assert images.shape == (23, 8, 8, 3) and labels.tolist() == [i % 4 for i in range(23)]
    pictures = sorted((tmp_path / "two" / "pictures").iterdir())
    assert len(pictures) == 23
    with Image.open(pictures[-1]) as picture:
        assert (np.asarray(picture) == images[-1]).all()


def test_leftovers_of_killed_runs_are_removed_but_not_parts_to_join(tmp_path: Path) -> None:
    names = ["part-0-of-3.npz", ".part-1-of-3.npz.ab_c.tmp", "part-0-of-2.npz", ".part-1-of-2.npz.x.tmp"]
    others = [".samples.npz.x.tmp", "samples.npz", "apart-0-of-9.npz", "part-0-of-9.npz.txt"]
    for name in (*names, *others):
        (tmp_path / name).touch()
    halfway = [tmp_path / f".part-0-of-{parts}.npz.halfway" for parts in (2, 3)]
    for each in halfway:
        (each / "0").mkdir(parents=True)
    with atomic_write(tmp_path / "part-5-of-7.npz") as file:
        remove_stale_parts(tmp_path / "part-1-of-2.npz", (1, 2), [])
        held = {each.name for each in tmp_path.glob(".part-5*")}
        assert {path.name for path in tmp_path.iterdir()} == {
            *others,
            *names[2:],
            *held,
            halfway[0].name,
        }
        file.write(b"whole")
    remove_stale_parts(tmp_path / "samples.npz", None, [tmp_path / "part-0-of-2.npz"])
    assert {path.name for path in tmp_path.iterdir()} == {*others, "part-0-of-2.npz"}


def test_damaged_part_is_reported_and_removed(tmp_path: Path) -> None:
    for name in ("part-0-of-2.npz", "part-1-of-2.npz"):
        save_samples(tmp_path / name, torch.zeros(4, 3, 8, 8, dtype=torch.uint8), None)
    parts = [tmp_path / "part-0-of-2.npz", tmp_path / "part-1-of-2.npz"]
    data = bytearray(parts[1].read_bytes())
    data[len(data) // 2] ^= 1
    parts[1].write_bytes(data)
    with pytest.raises(
        ValueError, match=r"part-1-of-2\.npz is damaged or not an \.npz file: .* It is removed: run the same"
    ):
        list(joined(parts, settings(num_samples=8)))
    assert list(tmp_path.iterdir()) == parts[:1]


def test_samples_are_memory_mapped(tmp_path: Path) -> None:
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    save_samples(tmp_path / "ours.npz", images, torch.tensor([1, 0]))
    pixels = images.permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "plain.npz", pixels, np.array([1, 0]))
    np.savez_compressed(tmp_path / "small.npz", pixels, np.array([1, 0]))
    for name in ("ours", "plain", "small"):
        arrays = read_arrays(tmp_path / f"{name}.npz")
        assert (arrays["arr_0"] == pixels).all() and arrays["arr_1"].tolist() == [1, 0]
        assert isinstance(arrays["arr_0"], np.memmap) == (name != "small")
    with np.load(tmp_path / "ours.npz") as arrays:
        assert (arrays["arr_0"] == pixels).all() and arrays["arr_1"].tolist() == [1, 0]


@pytest.mark.parametrize("name", ["ours", "small"])
def test_flipped_bit_in_samples_is_detected(tmp_path: Path, name: str) -> None:
    images = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8)
    save_samples(tmp_path / "ours.npz", images, torch.zeros(20, dtype=torch.int64))
    np.savez_compressed(tmp_path / "small.npz", images.permute(0, 2, 3, 1).numpy())
    data = bytearray((tmp_path / f"{name}.npz").read_bytes())
    data[2000] ^= 4
    (tmp_path / f"{name}.npz").write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name}\.npz is damaged or not an \.npz file: .*\. Write it again\."):
        read_arrays(tmp_path / f"{name}.npz")


def test_samples_that_do_not_match_their_description_are_rejected(tmp_path: Path) -> None:
    for name in ("one", "two"):
        images = torch.full((4, 3, 8, 8), len(name) + (name == "two"), dtype=torch.uint8)
        save_samples(tmp_path / name / "samples.npz", images, None)
        files = describe(tmp_path / name, [tmp_path / name / "samples.npz"])
        write_json(tmp_path / name / "samples.json", {"files": files})
    assert read_samples(tmp_path / "one/samples.npz").num_samples == 4
    (tmp_path / "one/samples.npz").write_bytes((tmp_path / "two/samples.npz").read_bytes())
    with pytest.raises(ValueError, match=r"samples\.npz is not the file that .*samples\.json describes\. Run sample"):
        read_samples(tmp_path / "one/samples.npz")


def test_shown_option_makes_only_grid_images_and_journal_records_examples_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_model(tmp_path / "train")
    (tmp_path / "sample.yaml").write_text(to_yaml({"sample": dump(settings(num_samples=9, grid_images=4))}))
    made = {}
    for name, options in (("all", ()), ("shown", ("--shown",))):
        npz = tmp_path / name / "samples.npz"
        run(
            monkeypatch, sample, "--config", tmp_path / "sample.yaml", "--weights", weights, "--output", npz,
            "--journal", tmp_path / name / "journal", *options,
        )  # fmt: skip
        with np.load(npz) as arrays:
            made[name] = arrays["arr_0"]
    assert len(made["all"]) == 9 and np.array_equal(made["shown"], made["all"][:4])
    history = read_journal(tmp_path / "all/journal/sample")
    assert history is not None
    assert ("examples_seen", 1, 1.0) in {(point.key, point.step, point.value) for point in history.points}


def test_weaker_network_of_other_data_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, classes in (("strong", 4), ("weak", 3)):
        spec = SPEC.model_copy(update={"num_classes": classes})
        model = {
            "system": dump(system()),
            "spec": dump(spec),
            "codec": {"config": dump(Rgb()), "identity": Rgb().identity, "scale": None},
            "classes": [str(i) for i in range(classes)],
            "step": 1,
            "examples_seen": 1,
        }
        save_weights(tmp_path / name, random_network(system(), spec).state_dict(), model)
    chosen = SampleConfig(
        sampler=Ddim(num_steps=2), guidance=Guidance(guidance_scale=2.0), weaker_weights=str(tmp_path / "weak")
    )
    (tmp_path / "sample.yaml").write_text(to_yaml({"sample": dump(chosen)}))
    with pytest.raises(ValueError, match="other data or another codec"):
        run(
            monkeypatch, sample, "--config", tmp_path / "sample.yaml", "--output", tmp_path / "out" / "samples.npz",
            "--weights", tmp_path / "strong" / "weights.safetensors",
        )  # fmt: skip
