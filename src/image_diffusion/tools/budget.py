"""Inspect the images and the machine, and size an experiment for a budget with `experiments.proposal`."""

from __future__ import annotations

import os
import re
import tempfile
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import torch

from image_diffusion.core.devices import best_device, has_gpu
from image_diffusion.core.process.errors import log_line_once
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded.captions import read_captions
from image_diffusion.data.encoded.latents import encode_shards, write_manifest
from image_diffusion.data.quality.facts import Facts, describe_source, source_of, spread
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.data.sources.folder import Folder, files_in, stem_of
from image_diffusion.experiments.experiment import EncodeStage, Experiment
from image_diffusion.experiments.proposal import Proposal, images_in_words, machine_in_words, propose, seconds_of
from image_diffusion.experiments.request import Machine, Speed, captions_of, classes_of, masks_of, start_of
from image_diffusion.experiments.resolve import embed_stage, encode_stage, write_stages
from image_diffusion.metrics.features.classifier_training import DetectorTraining, train_detector
from image_diffusion.metrics.images.segmentation import training_s
from image_diffusion.stages.embed import embed
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.pairs.images import ImageFilePairs
from image_diffusion.training.flops import counted
from image_diffusion.training.forecast import GIB, Deadline, forecast, memory_limit

_MEASURING_S = 6.0
"""Seconds for measuring the steps and passes of one design."""
_DETECTOR_EXAMPLES = 1024
_USABLE = 0.9  # share of the memory; the rest is for the driver, libraries and other stages


def propose_for(images: Path, budget: str, cores: int | None, weights: Path | None = None) -> Proposal:
    """Return the experiment that fits into a budget. images: a folder, a zip or a table. cores: of the CPU; unset: all.
    weights: a folder of weights to train from; unset: random ones.

    Raises ValueError if there are no or too few images, if the budget is not a duration or too small, and if the
    weights do not fit.
    """
    start_s = time.process_time()  # of this process, which has imported the modules of a stage
    seconds_of(budget)
    start = None if weights is None else start_of(weights)
    facts = describe_source(source_of(images))
    machine = machine_of(cores, start_s)
    torch.set_num_threads(machine.cores)
    name = re.sub(r"[^A-Za-z0-9._]", "_", images.resolve().stem).lstrip("._") or "images"

    def measure(experiment: Experiment) -> Speed:
        log_line_once(f"init: measuring {machine_in_words(machine)} on {images_in_words(facts)} …")
        return measured(experiment, facts, machine)

    return propose(facts, name, machine, budget, measure, start)


def machine_of(cores: int | None, start_s: float) -> Machine:
    """Return this machine, with the number of cores to use; unset: all."""
    gpus = torch.cuda.device_count() if has_gpu() else 0
    memory_gib = _USABLE * memory_limit(gpus > 0, None)
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cores or available, gpus, memory_gib, start_s)


def measured(experiment: Experiment, facts: Facts, machine: Machine) -> Speed:
    """Return the speed of an experiment: its stages crop, detect and train on some of its images, as `doctor` does."""
    with tempfile.TemporaryDirectory(prefix="image-diffusion-") as temporary, redirect_stderr(StringIO()):
        return _measured(experiment, facts, machine, Path(temporary))


def _measured(experiment: Experiment, facts: Facts, machine: Machine, folder: Path) -> Speed:
    items = spread(facts.source.listing().items, 2 * experiment.train.global_batch)
    captions = captions_of(facts)
    texts = read_captions(facts.source, (captions.column,), [item.name for item in items]) if captions else []
    masks = masks_of(facts)
    mask_files = {} if masks is None else files_in(masks.path, "masks")
    for number, item in enumerate(items):
        path = folder / "images" / (f"{item.label}" if classes_of(facts) else "") / f"{number:04}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(facts.source.read(item))
        if captions:
            path.with_suffix(".txt").write_text("\n".join(texts[number]), encoding="utf-8")
        if (mask := mask_files.get(stem_of(item.name))) is not None:
            path = folder / "masks" / path.relative_to(folder / "images")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(mask.read_bytes())
    source = Folder(path=str(folder / "images"), classes="folders" if classes_of(facts) else "none")
    part = {"source": source, "validation_fraction": 0.0, "num_shards": 1, "max_bad_fraction": 0.5}
    data = experiment.data.model_copy(update=part)
    train = experiment.train.model_copy(update={"weights": "ema"})  # needs no held-out images
    pairs = experiment.pairs
    if isinstance(pairs, ImageFilePairs):
        pairs = pairs.model_copy(update={"path": str(folder / "masks")})
    sample = experiment.model_copy(update={"data": data, "train": train, "pairs": pairs})
    started = time.perf_counter()
    crop_dataset(data, folder / "crops")
    crop_s = (time.perf_counter() - started) / len(items)
    for pair_set in sample.pair_sets:
        embed(embed_stage(sample, pair_set), folder / "crops", None, folder / pair_set.name)
    manifests = [folder / pair_set.name / "manifest.json" for pair_set in sample.pair_sets]
    write_stages("measured", sample, folder)
    learnt, encode_s, decode_s = folder / "crops", 0.0, 0.0
    if sample.codec.name is not None:
        learnt = folder / "latents"
        encode_s, decode_s = _encoded(encode_stage(sample), folder / "crops", learnt)
    training = prepare_training(folder / "measured/config/train.yaml", learnt / "manifest.json", None, manifests)
    processes = max(1, machine.gpus)
    peak = counted(training.network, training.task, training.stage.train, processes).peak / GIB
    if peak > machine.memory_gib:
        return Speed(0.0, 0.0, 0.0, 0.0, peak)
    labels = 0 if masks is None else len(masks.values)
    mask_s = training_s(data.num_channels, labels, data.size) if labels else 0.0
    precision = training.stage.system.sampling().precision(experiment.section("sample"))
    cost = forecast(training.build, training.stage.train, processes, 20, [precision], Deadline(_MEASURING_S))
    crops = open_shards(folder / "crops", "all", renders=True)  # as in the stage detect
    settings = DetectorTraining(least_examples=_DETECTOR_EXAMPLES, most_examples=_DETECTOR_EXAMPLES, stop_accuracy=2)
    device = "cuda" if machine.gpus else "cpu"
    started = time.perf_counter()
    seen = train_detector(crops, None, settings, folder, device)
    tested = 8 * seen["num_held_out"] / 3
    detector_s = (time.perf_counter() - started) / (seen["examples_seen"] + tested)
    pass_s = cost.passes_s[precision]
    return Speed(cost.step_s, pass_s, crop_s, detector_s, cost.memory_gib, mask_s, encode_s, decode_s)


def _encoded(stage: EncodeStage, crops: Path, latents: Path) -> tuple[float, float]:
    """Encode crops, as the stage `encode` does. Returns the seconds for encoding and for decoding one image."""
    device = best_device()
    codec = stage.codec.build(None, None, device, stage.encode.compute_dtype)
    images = open_shards(crops, "all")
    x = codec.encode(images.gather(np.arange(1)).to(device))[:, 0]  # also loads its weights
    started = time.perf_counter()
    encode_shards(crops, latents, codec, stage.encode, device)
    encode_s = (time.perf_counter() - started) / images.num_samples
    write_manifest(crops, latents, codec, stage.encode)
    started = time.perf_counter()
    codec.decode(codec.normalise(x))
    return encode_s, time.perf_counter() - started
