"""Sections and keys without effect are reported in one line before any work."""

from __future__ import annotations

from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_diffusion.core.process.errors import log_line_once
from image_diffusion.experiments.experiment import experiment_of, parse_experiment
from image_diffusion.experiments.resolve import load_all
from image_diffusion.systems import SYSTEMS
from image_diffusion.systems.base import System

DATA = {"name": "digits", "source": {"type": "digits"}, "resolution": 16}
SMALL_DIT = {"type": "dit", "network": {"depth": 1, "width": 16, "num_heads": 2, "patch": 4}}
PLAIN_DIT = SMALL_DIT | {"objective": {"label_drop_probability": 0}}
PRIOR = {"system": {"type": "prior"}, "pairs": {"type": "hashed"}, "train": {"steps": 1, "flip_probability": 0}}
RIN = {"system": {"type": "rin", "network": {"patch": 4}}}
DVAE = {"system": {"type": "dvae", "network": {"num_layers": 2}}}
DIT = {"system": SMALL_DIT}
EMBEDDED = {
    "system": SMALL_DIT | {"condition": {"type": "embedding"}},
    "pairs": {"type": "hashed"},
    "data": DATA | {"validation_fraction": 0.2},
}
UNLABELLED = DATA | {"source": {"type": "folder", "path": ".", "classes": "none"}}
CLASS_TOKENS = SMALL_DIT["network"] | {"class_tokens": 2}
FLOW = {"process": {"type": "flow"}, "objective": {"type": "flow_matching", "contrastive": 0.1}}
CONTRASTIVE = {"system": SMALL_DIT | FLOW}
AUGMENTED = {"train": {"steps": 1, "augment": {}}}
GREY = DIT | {"data": DATA | {"channels": 1}}
LATENT = {"codec": {"type": "diffusers", "weights": "vae"}}
SMALL_IMAGES = {
    "system": {
        "type": "iddpm",
        "network": {"channels": 32, "multipliers": [1, 1]},
        "condition": {"type": "image", "from": "self", "shrink": 2},
    },
    "sample": {"small_images": "small.npz"},
}
ALIGNED = {"system": SMALL_DIT | {"alignment": {"block": 1}}, "pairs": {"type": "features"}}
TEXT = {
    "system": SMALL_DIT | {"condition": {"type": "text"}},
    "pairs": {"type": "captions"},
    "preview": {"prompts": ["a seven"]},
    "sample": {"prompts": ["a seven"]},
}


def told(folder: Path, sections: dict[str, Any]) -> str:
    """Return the error message for an experiment; empty if it is valid."""
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"data": DATA, "train": {"steps": 1}} | sections))
    try:
        load_all([path])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (PRIOR | {"export": {"format": "diffusers"}}, "PriorTransformer is another network than network.type prior"),
        (RIN | {"export": {"format": "diffusers"}}, "export.format is diffusers, but a system of type rin"),
        (DVAE | {"export": {"format": "diffusers"}}, "export.format is diffusers, but a system of type dvae"),
        (DIT | {"export": {"format": "diffusers"}}, "works on latents, but this model works on pixels"),
        (PRIOR | {"train": PRIOR["train"] | AUGMENTED["train"]}, "of a system of type prior does not take it"),
        (AUGMENTED | DVAE, "the network of a system of type dvae does not take it as a condition"),
        (AUGMENTED | DIT | LATENT, "augment.probability is 0.12, but latents allow the stored mirror image alone"),
        (AUGMENTED | SMALL_IMAGES, "train.augment is set, but system.condition is image: the images of the"),
        (AUGMENTED | ALIGNED, "train.augment is set, but so is system.alignment, whose features do not move"),
        (GREY | {"train": {"steps": 1, "augment": {"saturation": 1}}}, "is 1, but the images have 1 channels"),
        (DIT | {"train": {"steps": 1, "flip_probability": 0, "augment": {"probability": 0}}}, "no image is augmented"),
        (DIT | {"train": {"steps": 1, "augment": {"rotate": 1}}}, "train.augment.rotate is not a known key"),
        (DIT | {"resources": {"one_job": True}}, "one_job puts stages that need a GPU and others into one job"),
        (DIT | {"resources": {"one_job": True, "gpus_per_node": 0, "nodes": 2}}, "Set nodes: 1 and gpus_per_node: 0"),
        (PRIOR | {"sweep": {"num_steps": [5]}}, "sweep is set, but a system of type prior has no use for it"),
        (PRIOR | {"sample": {"num_samples": 4}}, "sample.prompts is required"),
        (PRIOR | {"sample": {"prompts": []}}, "sample.prompts: it holds no prompt"),
        (PRIOR | {"sample": {"prompts": ["a"], "sampler": {"num_steps": 1001}}}, "sample.sampler: "),
        (PRIOR | {"preview": {"num_samples": 4}}, "preview is set, but a system of type prior has no use for it"),
        (PRIOR | {"evaluate": {"detectors": ["inpipe"]}}, "evaluate is set, but a system of type prior"),
        (DIT | {"prediction": {"num_candidates": 1}}, "prediction is set, but a system of type dit has no use for it"),
        (DVAE | {"pairs": {"type": "hashed"}}, "pairs is set, but a system of type dvae has no use for it"),
        (DIT | {"pairs": {"type": "captions"}}, "has captions, but system.condition.type is label: nothing reads them"),
        (DIT | {"sample": {"prompts": ["a seven"]}}, "sample.prompts or sample.negative_prompt is set, but"),
        (
            DIT | {"system": SMALL_DIT | {"condition": {"type": "text"}}},
            "system.condition.type is text, but pairs is missing. It needs captions",
        ),
        (
            TEXT | {"pairs": {"type": "hashed"}},
            "system.condition.type is text, but pairs.type is hashed. It needs captions",
        ),
        (
            TEXT | {"pairs": {"type": "files"}},
            "Unknown pairs 'files'. Known: captions, numbers, images, features, hashed, contrastive, clip.",
        ),
        (TEXT | {"sample": {}}, "sample.prompts is missing: the network takes words"),
        (TEXT | {"sample": {"prompts": []}}, "sample.prompts: it holds no prompt"),
        (TEXT | {"sample": TEXT["sample"] | {"labels": ["3"]}}, "sample.labels is set, but the network takes words"),
        (TEXT | {"preview": {"num_samples": 4}}, "preview.prompts is missing"),
        (TEXT | {"evaluate": {"likelihood": {}}}, "evaluate.likelihood is set, but is not available with text or"),
        (
            TEXT | {"system": TEXT["system"] | {"condition": {"type": "text", "caption_weights": [0, 0]}}},
            "would draw no caption",
        ),
        (
            TEXT | {"system": TEXT["system"] | {"condition": {"type": "text", "caption_weights": [1, 1]}}},
            "caption_weights has 2 numbers, but pairs.num_captions is 1",
        ),
        (RIN | {"sample": {"prompts": ["a seven"]}}, "sample.prompts is set, but a system of type rin"),
        (
            DIT | {"system": EMBEDDED["system"]},
            "system.condition.type is embedding, but pairs is missing. It needs pairs: add a section, such as",
        ),
        (EMBEDDED | {"data": DATA}, "sample.embeddings is unset, so held-out images provide the embeddings"),
        (EMBEDDED | {"sample": {"prompts": ["a seven"]}}, "Write prompts for a prior, and name that"),
        (EMBEDDED | {"sample": {"labels": ["3"]}}, "sample.labels is set, but the network takes embeddings"),
        (EMBEDDED | {"preview": {"embeddings": "x"}}, "preview.embeddings is set, but a system of type dit has no use"),
        (EMBEDDED | {"evaluate": {"likelihood": {}}}, "evaluate.likelihood is set, but is not available with text or"),
        (EMBEDDED | {"sample": {"embeddings": {"experiment": "mine"}}}, "experiment makes no embeddings. Name one"),
        (DIT | {"sample": {"embeddings": "x"}}, "sample.embeddings is set, but the network takes no embeddings"),
        (RIN | {"sample": {"embeddings": "x"}}, "sample.embeddings is set, but a system of type rin has no use for it"),
        (DVAE | {"sample": {"num_samples": 4}}, "sample is set, but a system of type dvae has no use for it"),
        (DVAE | {"preview": {"num_samples": 4}}, "preview.num_samples is set, but a system of type dvae"),
        (DVAE | {"evaluate": {"likelihood": {}}}, "evaluate.likelihood is set, but a system of type dvae"),
        (
            DIT | {"evaluate": {"lpips": {"backbone": "a", "heads": "b"}}},
            "evaluate.lpips is set, but a system of type dit has no use for it",
        ),
        (
            EMBEDDED | {"system": EMBEDDED["system"] | {"network": CLASS_TOKENS}},
            "system.network.class_tokens is 2, but system.condition has no class. Leave it out, or add {type: label}.",
        ),
        (
            {"system": SMALL_DIT | {"network": CLASS_TOKENS}, "data": UNLABELLED},
            "system.network.class_tokens is 2, but the data have no classes. Leave it out.",
        ),
        (DIT | {"sample": {"num_samples": 4}}, "sample.num_samples is 4, but evaluate needs at least 5 samples"),
        (
            DIT | {"sweep": {"num_steps": [2], "num_samples": 6}, "evaluate": {"neighbours": 5}},
            "sweep.num_samples is 6, but evaluate needs at least 7 samples, two more than evaluate.neighbours",
        ),
        (
            CONTRASTIVE | {"train": {"steps": 1, "microbatch": 3}},
            "pairs the samples of a batch, but train.microbatch is 3, an odd number",
        ),
        (
            {"system": PLAIN_DIT, "data": UNLABELLED, "sample": {"labels": "random"}},
            "sample.labels is random, but the data have no classes. Leave it out.",
        ),
        (DIT | {"encode": {"tokens": True}}, "encode.tokens is set, but a system of type dit has no use for it"),
        (DIT | {"encode": {"batch_size": 4}}, "encode is set, but pixels are not encoded"),
        (
            RIN | {"sample": {"sampler": {"type": "heun", "time_difference": 0.1}}},
            "sample.sampler.time_difference is not a known key",
        ),
        (
            DIT | {"sample": {"sampler": {"type": "ddim", "time_difference": 0.1}}},
            "sample.sampler: time_difference is 0.1, but in the process discrete time is not continuous",
        ),
        (
            {"system": PLAIN_DIT, "sample": {"guidance": {"guidance_scale": 2}}},
            "sample.guidance.guidance_scale is 2, but the network never learns to do without a label",
        ),
        (
            {"system": PLAIN_DIT, "preview": {"guidance": {"guidance_scale": 2.0}}},
            "preview.guidance.guidance_scale is 2, but the network never learns to do without a label",
        ),
        (DIT | {"sample": {"labels": ["seven"]}}, "sample.labels names the class 'seven', but the classes are 0 to 9"),
        (DIT | {"preview": {"labels": [10]}}, "preview.labels names the class 10, but the classes are 0 to 9"),
        (
            {
                "system": SMALL_DIT
                | {"network": SMALL_DIT["network"] | {"null_label": False}}
                | {"objective": {"type": "denoising", "label_drop_probability": 0.1}}
            },
            "system.network.null_label is false: the network has no null label",
        ),
        (
            {"system": RIN["system"] | {"objective": {"prediction": "previous_x", "weighting": {"type": "uniform"}}}},
            "system.objective.prediction is previous_x, but in continuous time there is no previous x",
        ),
        (
            PRIOR
            | {"pairs": {"type": "hashed", "num_tokens": 8}}
            | {"system": {"type": "prior", "network": {"max_text_len": 6}}},
            "pairs.num_tokens is 8, but the network has places for 6",
        ),
        ({"system": SMALL_DIT | {"process": {"type": "edm"}}}, "Use objective edm"),
        ({"system": SMALL_DIT | {"objective": {"type": "flow_matching"}}}, "Objective flow_matching needs the flow"),
        (
            DIT | {"sample": {"keep": False, "pictures": True}},
            "sample.keep is false, so that images are looked at once, but sample.pictures needs them again",
        ),
        (DIT | {"sample": {"first_seed": 10**20}}, "sample.first_seed is 100000000000000000000: input should be less"),
        (DIT | {"preview": {"weaker_weights": "a"}}, "preview.weaker_weights is set, but a system of type dit has"),
        (DIT | {"preview": {"keep": False}}, "preview.keep is set, but a system of type dit has no use for it"),
        (PRIOR | {"codec": {"type": "stability_vae"}}, "codec is set, but a system of type prior has no use for it"),
        ({"system": {"type": "prior"}}, "pairs is missing, and a system of type prior needs it"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_reported(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    found = told(tmp_path, sections)
    assert message in found and len(found.splitlines()) == 1, found
    assert found.startswith(str(tmp_path / "mine.yaml"))


JSD = {"type": "discrete", "schedule": {"type": "jsd"}}
FLOW_OF_EPS = {"process": {"type": "flow"}, "objective": {"type": "flow_matching", "prediction": "eps"}}
NOT_CLIPPED = {"type": "euler", "clip_denoised": False}
UNCLIPPED = {"sample": {"sampler": NOT_CLIPPED}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"system": SMALL_DIT | {"process": JSD}} | LATENT, ".prediction to v."),
        (
            {"system": SMALL_DIT | {"process": JSD}} | UNCLIPPED,
            ".prediction to v, or sample.sampler.clip_denoised to true.",
        ),
        ({"system": SMALL_DIT | FLOW_OF_EPS, "sample": {"sampler": {"type": "euler"}}} | LATENT, ".prediction to v."),
        ({"system": SMALL_DIT | {"process": JSD}, "sample": {"sampler": NOT_CLIPPED | {"num_steps": "ddim50"}}}, ""),
        ({"system": SMALL_DIT | {"process": JSD, "objective": {"prediction": "v"}}} | UNCLIPPED, ""),
        ({"system": SMALL_DIT | {"process": JSD}}, ""),
        ({"system": SMALL_DIT} | UNCLIPPED, ""),
    ],
)
def test_eps_prediction_from_pure_noise_is_rejected(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    """With 1 % of error in eps, samples had a standard deviation of millions."""
    found = told(tmp_path, {"train": {"steps": 1, "grid_every_steps": None}} | sections)
    begins = "sample.sampler begins where alpha is 0, so that eps does not determine x0. Set system.objective"
    assert found == (f"{tmp_path / 'mine.yaml'}: {begins}{message}" if message else "")


@pytest.mark.parametrize("section", ["sample", "preview"])
def test_first_three_guidance_requires_three_channels(tmp_path: Path, section: str) -> None:
    sections = GREY | {section: {"guidance": {"channels": "first_three"}}}
    message = f"{section}.guidance.channels is first_three, but x has 1 channel. Use all."
    assert message in told(tmp_path, sections)
    assert not told(tmp_path, sections | {"data": DATA})


@pytest.mark.parametrize(("num_steps", "is_told"), [(50, True), (250, False), ("ddim125", True), ("", True)])
def test_sampling_at_untrained_timesteps_gives_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_steps: int | str, is_told: bool
) -> None:
    log_line_once.cache_clear()
    system = SMALL_DIT | {"process": {"type": "discrete", "respacing": 250}}
    sample = {"sampler": {"type": "ddim", "num_steps": num_steps}}
    train = {"steps": 1, "grid_every_steps": None}
    assert told(tmp_path, {"system": system, "sample": sample, "train": train}) == ""
    warned = [line for line in capsys.readouterr().err.splitlines() if "respacing" in line]
    expected = (
        "warning: sample.sampler asks the network at timesteps that system.process.respacing 250 leaves out of "
        "training. Set num_steps: 250 for those that it was trained at."
    )
    assert warned == [expected] * is_told


@pytest.mark.parametrize("sections", [PRIOR, RIN, DVAE, DIT, DVAE | {"preview": {"batch_size": 4}}])
def test_valid_sections_are_accepted(tmp_path: Path, sections: dict[str, Any]) -> None:
    assert told(tmp_path, sections) == ""


def test_labels_are_checked_against_folder_classes_before_any_work(tmp_path: Path) -> None:
    for name in ("ant", "bee", "empty"):
        (tmp_path / "images" / name).mkdir(parents=True)
    for name in ("ant", "bee"):
        (tmp_path / "images" / name / "1.png").touch()
    data = DATA | {"source": {"type": "folder", "path": str(tmp_path / "images")}}
    assert told(tmp_path, DIT | {"data": data, "sample": {"labels": ["bee", 0]}}) == ""
    assert "names the class 'empty', but the classes are 0 to 1: ant, bee" in told(
        tmp_path, DIT | {"data": data, "sample": {"labels": ["empty"]}}
    )
    flat = DATA | {"source": {"type": "folder", "path": str(tmp_path / "images" / "ant")}}
    assert "sample.labels names classes, but the data have none" in told(
        tmp_path, DIT | {"data": flat, "sample": {"labels": [0]}}
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_system_lists_only_keys_of_its_sections(system: Any) -> None:
    for section in system.sections.values():
        if section.keys is not None:
            assert section.keys < set(section.kind.model_fields)
    assert system().evaluation().section in system.sections
    assert experiment_of(system) is experiment_of(system)


def test_system_interface_stays_small() -> None:
    """Methods about samples or metrics belong to `Sampling` or `Evaluation`."""
    questions = [
        name
        for name, value in vars(System).items()
        if (isfunction(value) or isinstance(value, property)) and not name.startswith(("_", "model_"))
    ]
    assert len(questions) <= 10 and len(questions) + len(System.__class_vars__) <= 15


def test_error_for_unknown_system_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Unknown system 'vqgan'\. Known: dit, iddpm, rin, autoencoder, dvae, prior"):
        parse_experiment({"data": DATA, "train": {"steps": 1}, "system": {"type": "vqgan"}}, "x")


TOKENS = {"system": {"type": "tokens"}, "codec": {"type": "tokens", "of": {"type": "trained", "experiment": "vae"}}}
EDM = SMALL_DIT | {"process": {"type": "edm", "sigma_max": 1e30}, "objective": {"type": "edm"}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (DIT | {"sample": {"guidance": {"guidance_scale": 1e40}}}, "guidance_scale is 1e+40: input should be less"),
        (DIT | {"sample": {"sampler": {"type": "heun", "s_noise": 1e30}}}, "s_noise is 1e+30: input should be less"),
        (DIT | {"sample": {"sampler": {"type": "euler", "shift": 1e-30}}}, "shift is 1e-30: input should be greater"),
        (TOKENS | {"sample": {"guidance": {"guidance_scale": 1e40}}}, "guidance_scale is 1e+40: input should be less"),
        (TOKENS | {"sample": {"sampler": {"type": "masked", "temperature": 1e-320}}}, "temperature is 1e-320: input"),
        ({"system": {"type": "dit", "network": {"mlp_ratio": 1e30}}}, "mlp_ratio is 1e+30: input should be less"),
        ({"system": EDM}, "sigma_max is 1e+30: input should be less"),
    ],
)
def test_numbers_that_overflow_in_float32_are_rejected(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in told(tmp_path, sections)


@pytest.mark.parametrize(
    ("train", "key"), [({"weights": "best"}, "weights is best"), ({"patience": 0.2}, "patience is set")]
)
def test_settings_that_need_held_out_images_are_rejected_without_any(
    train: dict[str, Any], key: str, tmp_path: Path
) -> None:
    sections = DIT | {"train": {"steps": 1, "validate_every_steps": 1} | train}
    assert f"train.{key}, but no images are held out" in told(tmp_path, sections)
    assert told(tmp_path, sections | {"data": DATA | {"validation_fraction": 0.2}}) == ""
