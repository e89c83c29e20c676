"""Inputs of the rules, and the command line options for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from image_diffusion.core.files.atomic import write_json
from image_diffusion.workflow.inputs import Files
from image_diffusion.workflow.parts import Parts
from image_diffusion.workflow.plans import Plan, Plans
from plans import a_plan, a_set, plans_of

DATA = "out/datasets/dots-16"


def files(*plans: Plan) -> Files:
    return Files("out", plans_of(*plans))


def inputs(of: Files, name: str, job: Mapping[str, str] | None = None) -> list[str]:
    return of.inputs(name)[name](job or ONE)


def option(of: Files, name: str, job: Mapping[str, str] | None = None) -> list[str]:
    return of.options(name)[name](job or ONE)


ONE = {"experiment": "one"}


def test_a_plain_experiment_needs_crops_and_nothing_else() -> None:
    known = files(a_plan())
    assert known.training_data(ONE) == known.real_data(ONE) == f"{DATA}/crops/manifest.json"
    for name in ("codec", "start", "pairs", "reference", "small_images", "embeddings", "prompts"):
        assert inputs(known, name) == option(known, name) == []
    parts = Parts("out", plans_of(a_plan()))
    assert parts.sampled_parts(ONE) == parts.parts_option(ONE, SimpleNamespace(parts=[])) == []


def test_everything_lists_outputs_of_each_experiment_and_shared_pages() -> None:
    known = files(a_plan(export="diffusers", sweep={"guidance_scale": {"1": "a.yaml"}}), a_plan("two"))
    both = known.outputs({})
    assert both == [*known.outputs(ONE), *known.outputs({"experiment": "two"})]
    assert {"out/one/diffusers", "out/one/sweep/guidance_scale/curve.json", "out/two/metrics.json"} <= set(both)
    assert set(known.everything({})) - set(both) == {
        "out/summary.html",
        f"{DATA}/crops/manifest.json",
        f"{DATA}/detector/detector.json",
        f"{DATA}/references/inpipe/reference.json",
        *(f"out/{name}/{page}" for name in ("one", "two") for page in ("tracked.json", "report/index.html")),
    }


def test_codec_of_another_experiment_is_an_input_and_an_option() -> None:
    known = files(a_plan(codec="vae", codec_experiment="vae"))
    weights = "out/vae/train/weights.safetensors"
    assert known.training_data(ONE) == f"{DATA}/vae/manifest.json"
    assert known.real_data(ONE) == f"{DATA}/crops/manifest.json"
    assert inputs(known, "codec") == inputs(known, "codec", {"dataset": "dots-16", "codec": "vae"}) == [weights]
    assert option(known, "codec") == ["--codec-weights", weights]


def test_many_shards_and_images_are_split_into_jobs() -> None:
    known = Parts("out", plans_of(a_plan(num_shards=48, codec="vae", sample_jobs=2)))
    latents = {"dataset": "dots-16", "codec": "vae"}
    assert known.encoded_parts(latents) == [f"{DATA}/vae/part-{part}-of-3.done" for part in range(3)]
    looked = {"dataset": "dots-16", "judge": "inception"}
    parts = [f"{DATA}/references/inception/parts/part-{part}-of-3.npz" for part in range(3)]
    assert known.reference_parts(looked) == parts
    parts = ["out/one/samples/part-0-of-2.npz", "out/one/samples/part-1-of-2.npz"]
    assert known.sampled_parts(ONE) == parts
    assert known.parts_option(ONE, SimpleNamespace(parts=parts)) == ["--made", *parts]
    assert known.synthesized_parts(ONE) == []
    shared = Parts("out", plans_of(a_plan(synthesize_jobs=2)))
    parts = ["out/one/synthetic_parts/part-0-of-2.npz", "out/one/synthetic_parts/part-1-of-2.npz"]
    assert shared.synthesized_parts(ONE) == parts
    for shards, jobs in ((31, 0), (32, 2), (10_000, 64)):
        shared = Parts("out", plans_of(a_plan(num_shards=shards, codec="vae")))
        assert len(shared.encoded_parts(latents)) == len(shared.reference_parts(looked)) == jobs


@pytest.mark.parametrize(
    ("at_once", "shards", "data", "jobs", "batches", "samples"),
    [
        (1, 16, 0, 1, 40, 0),
        (8, 16, 8, 1, 40, 8),
        (8, 4, 4, 1, 5, 5),
        (8, 512, 32, 10, 400, 16),
        (8, 10_000, 64, 10, 12, 12),
        (3, 33, 3, 4, 40, 6),
        (8, 1, 0, 0, 0, 0),
    ],
)
def test_work_is_split_evenly_over_several_gpus(
    at_once: int, shards: int, data: int, jobs: int, batches: int, samples: int
) -> None:
    plan = a_plan(num_shards=shards, codec="vae", sample_jobs=jobs, sample_batches=batches)
    known = Parts("out", plans_of(plan), lambda plan: at_once)
    assert len(known.encoded_parts({"dataset": "dots-16", "codec": "vae"})) == data
    assert len(known.reference_parts({"dataset": "dots-16", "judge": "inception"})) == data
    assert len(known.sampled_parts(ONE)) == samples
    judged = Parts("out", plans_of(replace(plan, keeps_samples=False, sample_jobs=1)), lambda plan: at_once)
    assert judged.sampled_parts(ONE) == [], "evaluate makes them as it looks at them"


@pytest.mark.parametrize(
    ("num_files", "num_bytes", "shards", "jobs"),
    [
        (3_999_999, 4 * 10**8, 4096, 0),
        (4_000_000, 10**9, 4096, 2),
        (1_300_000, 150 * 10**9, 512, 0),
        (1000, 10**12, 4096, 5),
        (10**8, 10**13, 4096, 50),
        (10**8, 10**13, 16, 16),
        (10**9, 10**14, 4096, 64),
    ],
)
def test_large_image_sets_are_cropped_by_several_jobs(
    tmp_path: Path, num_files: int, num_bytes: int, shards: int, jobs: int
) -> None:
    """By the number of files, or by their size where a file holds many images."""
    known, crops = Parts(str(tmp_path), plans_of(a_plan(num_shards=shards))), {"dataset": "dots-16"}
    note = str(tmp_path / "datasets/dots-16/source.json")
    whole = ["--source", note, "--journal", str(tmp_path / "datasets/dots-16/journal")]
    assert known.cropped_parts(crops) == [] and known.crop_whole_option(crops) == whole, "nobody has looked for files"
    part = crops | {"part": "0", "parts": "2"}
    assert known.cropped_parts(part) == known.crop_whole_option(part) == known.journal_option(part) == []
    assert known.part_option(part) == ["--part", "0/2"] and known.part_option(crops) == []
    assert known.crop_memory_mb(crops) == 8000
    write_json(tmp_path / "datasets/dots-16/source.json", {"files": num_files, "bytes": num_bytes, "revision": "x"})
    folder = tmp_path / "datasets/dots-16/crops"
    assert known.cropped_parts(crops) == [str(folder / f"part-{part}-of-{jobs}.json") for part in range(jobs)]
    made = ["--made", *known.cropped_parts(crops)] if jobs else []
    assert known.crop_whole_option(crops) == [*whole[:2], *made, *whole[2:]]
    assert known.crop_memory_mb(crops) == max(8000, num_files // 500, num_bytes // 10**5 // 500)


@pytest.mark.parametrize(
    ("num_files", "shards", "minutes"),
    [(None, 2, 240), (0, 2, 240), (60, 2, 15), (1_281_167, 16, 143), (3_900_000, 16, 240), (100_000_000, 64, 215)],
)
def test_crop_jobs_request_time_by_number_of_images(
    tmp_path: Path, num_files: int | None, shards: int, minutes: int
) -> None:
    known = Parts(str(tmp_path), plans_of(a_plan(num_shards=shards)))
    if num_files is not None:
        write_json(tmp_path / "datasets/dots-16/source.json", {"files": num_files, "bytes": 0, "revision": "x"})
    assert known.crop_runtime_min({"dataset": "dots-16"}) == minutes


def test_inputs_of_super_resolution() -> None:
    another = files(a_plan(small_images_experiment="small"))
    assert inputs(another, "small_images") == ["out/small/samples/samples.npz"]
    assert option(another, "small_images") == ["--small-images", "out/small/samples/samples.npz"]
    held_out = files(a_plan(small_images="validation"))
    assert inputs(held_out, "small_images") == [f"{DATA}/crops/manifest.json"]
    assert option(held_out, "small_images") == ["--small-images", f"{DATA}/crops"]
    a_file = files(a_plan(small_images="small.npz"))
    assert inputs(a_file, "small_images") == ["small.npz"]
    assert option(a_file, "small_images") == ["--small-images", "small.npz"]


def test_inputs_of_embeddings(tmp_path: Path) -> None:
    drawn = files(a_plan(embeddings_experiment="prior", pairs={"hashed": a_set()}, pairs_beside=True))
    assert inputs(drawn, "embeddings") == ["out/prior/samples/embeddings.json"]
    assert option(drawn, "embeddings") == ["--embeddings", "out/prior/samples"]
    held_out = files(a_plan(embeddings="validation", pairs={"hashed": a_set()}, pairs_beside=True))
    assert inputs(held_out, "embeddings") == [f"{DATA}/hashed/manifest.json", f"{DATA}/crops/manifest.json"]
    assert option(held_out, "embeddings") == ["--embeddings", f"{DATA}/hashed", f"{DATA}/crops"]
    for name in ("img_emb/img_emb_0.npy", "metadata/metadata_0.parquet"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert inputs(files(a_plan(embeddings="nowhere")), "embeddings") == ["nowhere/img_emb/img_emb_0.npy"]
    given = files(a_plan(embeddings=str(tmp_path)))
    assert [Path(path).name for path in inputs(given, "embeddings")] == ["img_emb_0.npy", "metadata_0.parquet"]
    assert option(given, "embeddings") == ["--embeddings", str(tmp_path)]
    assert inputs(files(a_plan()), "embeddings") == option(files(a_plan()), "embeddings") == []
    made = files(a_plan(makes_samples=False, makes_embeddings=True)).outputs(ONE)
    assert [path for path in made if "samples" in path] == ["out/one/samples/embeddings.json"]


def test_inputs_of_evaluation() -> None:
    assert option(files(a_plan(against="real.npz")), "reference") == ["--reference", "real.npz"]
    assert inputs(files(a_plan(against_experiment="two")), "reference") == ["out/two/samples/samples.npz"]
    assert option(files(a_plan()), "detector") == ["--detector", f"{DATA}/detector"]
    assert option(files(a_plan(detectors=["inception"])), "detector") == []
    assert inputs(files(a_plan(detectors=[])), "detector") == []
    two = files(a_plan(detectors=["inception", "inpipe"], references={"inception": "a.yaml", "inpipe": "b.yaml"}))
    assert inputs(two, "detector") == [f"{DATA}/detector/detector.json"]
    assert option(two, "references") == ["--references", f"{DATA}/references/inception", f"{DATA}/references/inpipe"]
    inception, inpipe = ({"dataset": "dots-16", "judge": judge} for judge in ("inception", "inpipe"))
    assert two.reference_detector_option(inception) == []
    assert two.reference_detector_option(inpipe) == ["--detector", f"{DATA}/detector"]
    assert option(files(a_plan(references={})), "references") == []


def test_experiments_without_samples_have_no_sample_inputs() -> None:
    makes, judged = files(a_plan()), files(a_plan(makes_samples=False))
    assert option(makes, "samples") == ["--samples", "out/one/samples/samples.npz"]
    assert inputs(makes, "samples") == ["out/one/samples/samples.npz", "out/one/samples/samples.json"]
    assert option(makes, "grid") == ["--grid", "out/one/samples/grid.png"]
    assert (
        inputs(judged, "samples") == option(judged, "samples") == inputs(judged, "grid") == option(judged, "grid") == []
    )
    assert not [path for path in judged.outputs(ONE) if "samples" in path]


def test_unstored_images_are_made_by_evaluate() -> None:
    kept = files(a_plan(codec_experiment="one", prompts="words.txt"))
    made = files(a_plan(codec_experiment="one", prompts="words.txt", keeps_samples=False, sweep={"ema": {"1": "a"}}))
    assert kept.made_with(ONE) == kept.sampling_options(ONE) == []
    assert made.made_with(ONE) == ["out/one/train/weights.safetensors", "words.txt"]
    codec = ["--codec-weights", "out/one/train/weights.safetensors"]
    assert made.sampling_options(ONE) == ["--making", "results/one/config/sample.yaml", *codec]
    assert made.sampling_options({"experiment": "one", "axis": "ema", "value": "1"}) == ["--making", "a", *codec]


def test_condition_images_are_inputs_and_cropped_like_the_data_set() -> None:
    made, plain = files(a_plan(pictures=["images/a.png", "mask.png"])), files(a_plan())
    assert inputs(made, "pictures") == ["images/a.png", "mask.png"]
    assert inputs(made, "crop") == ["results/datasets/dots-16/config/crop.yaml"]
    assert option(made, "crop") == ["--crop", "results/datasets/dots-16/config/crop.yaml"]
    assert option(plain, "crop") == inputs(plain, "crop") == inputs(plain, "pictures") == []


def test_inputs_and_options_of_pairs() -> None:
    made = files(a_plan(pairs={"hashed": a_set(of_detector=True, files="captions.csv")}))
    job = {"dataset": "dots-16", "pairs": "hashed"}
    assert made.pair_sources(job) == [f"{DATA}/crops/manifest.json", "captions.csv"]
    assert made.pair_detector(job) == [f"{DATA}/detector/detector.json"]
    assert made.pair_options(job) == ["--data", f"{DATA}/crops/manifest.json", "--detector", f"{DATA}/detector"]
    assert made.real_data(ONE) == made.training_data(ONE) == f"{DATA}/hashed/manifest.json"
    assert inputs(made, "detector") == []
    given = files(a_plan(pairs={"files": a_set(of_images=False, of_source=True)}))
    assert given.pair_sources({"dataset": "dots-16", "pairs": "files"}) == [f"{DATA}/source.json"]
    assert given.pair_options({"dataset": "dots-16", "pairs": "files"}) == []


def test_changed_files_of_the_pairs_folder_change_a_parameter(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    mask = tmp_path / "a" / "1.png"
    mask.write_bytes(b"1")
    pairs = {"pairs": {"images": a_set(files=str(tmp_path))}, "pairs_beside": True, "judged_on_pairs": True}
    made, job = files(a_plan(**pairs)), {"dataset": "dots-16", "pairs": "images"}
    assert made.pair_sources(job) == [f"{DATA}/crops/manifest.json", str(tmp_path)]
    before = made.pair_files(job)
    assert before[:-1] == made.pair_options(job) == ["--data", f"{DATA}/crops/manifest.json"]
    assert made.pair_files(job) == before
    mask.write_bytes(b"22")
    assert made.pair_files(job)[:-1] == before[:-1] and made.pair_files(job) != before
    assert option(made, "judged_pairs") == ["--pairs", f"{DATA}/images"]
    of_clip = files(a_plan(pairs={"images": a_set(weights=str(tmp_path))}))
    before = of_clip.pair_files(job)
    mask.write_bytes(b"333")
    assert of_clip.pair_files(job)[:-1] == of_clip.pair_options(job) and of_clip.pair_files(job) != before
    of_table = files(a_plan(pairs={"numbers": a_set(files="numbers.csv", weights="openai/clip")}, pairs_beside=True))
    of_numbers = {"dataset": "dots-16", "pairs": "numbers"}
    assert of_table.pair_files(of_numbers) == of_table.pair_options(of_numbers), "no other pairs are made again"
    assert option(of_table, "judged_pairs") == inputs(of_table, "judged_pairs") == []


def test_captions_are_inputs_and_depend_on_the_source() -> None:
    captions = {"captions-hashed": a_set(of_source=True)}
    made = files(a_plan(pairs=captions, pairs_beside=True, prompts="prompts.txt"))
    job = {"dataset": "dots-16", "pairs": "captions-hashed"}
    assert made.pair_sources(job) == [f"{DATA}/crops/manifest.json", f"{DATA}/source.json"]
    assert made.real_data(ONE) == made.training_data(ONE) == f"{DATA}/crops/manifest.json"
    assert option(made, "pairs") == ["--pairs", f"{DATA}/captions-hashed/manifest.json"]
    assert inputs(made, "detector") == [f"{DATA}/detector/detector.json"] and inputs(made, "prompts") == ["prompts.txt"]
    plain = files(a_plan())
    assert option(plain, "pairs") == inputs(plain, "pairs") == inputs(plain, "prompts") == []


def test_sets_of_pairs_have_a_fixed_order_and_their_own_configurations() -> None:
    names = ("images", "numbers")
    sets = {"images": a_set(files="masks"), "numbers": a_set(files="numbers.csv")}
    configs = {f"embed-{name}": f"embed-{name}.yaml" for name in names} | {"crop": "crop.yaml", "train": "train.yaml"}
    plan = a_plan(pairs=sets, pairs_beside=True, judged_on_pairs=True, embeddings="validation", configs=configs)
    made = files(plan)
    manifests = [f"{DATA}/{name}/manifest.json" for name in names]
    assert option(made, "pairs") == ["--pairs", *manifests] and inputs(made, "judged_pairs") == manifests
    assert option(made, "judged_pairs") == ["--pairs", f"{DATA}/images", f"{DATA}/numbers"]
    assert option(made, "embeddings") == ["--embeddings", f"{DATA}/images", f"{DATA}/numbers", f"{DATA}/crops"]
    jobs = [{"dataset": "dots-16", "pairs": name} for name in names]
    assert [made.pair_sources(job)[-1] for job in jobs] == ["masks", "numbers.csv"]
    assert [made.pair_config(job) for job in jobs] == ["embed-images.yaml", "embed-numbers.yaml"]
    assert made.configs_before("train")(ONE) == ["crop.yaml", "embed-images.yaml", "embed-numbers.yaml"]
    assert set(manifests) <= set(made.everything({}))
    assert plans_of(plan).pattern("pairs") == "images|numbers"
    with_codec = a_plan("large", codec="kl", pairs=sets, configs=configs | {"encode": "encode-kl.yaml"})
    for known in (made, files(plan, with_codec)):  # a codec experiment does not change other pairs
        assert known.configs_before("embed")(jobs[0]) == ["crop.yaml"]


def test_stages_depend_on_their_and_earlier_configurations() -> None:
    known = files(a_plan(), a_plan("large", small_images_experiment="one"))
    assert known.config("train")(ONE) == "results/one/config/train.yaml"
    crop = "results/datasets/dots-16/config/crop.yaml"
    assert known.configs_before("sample")(ONE) == [crop, "results/one/config/train.yaml"]
    below = ["results/one/config/train.yaml", "results/one/config/sample.yaml"]
    large = {"experiment": "large"}
    assert known.configs_before("sample")(large) == [crop, "results/large/config/train.yaml", *below]
    assert known.configs_before("train")(large) == [crop]
    assert option(known, "sample") == ["--sample", "results/one/config/sample.yaml"]
    assert option(files(a_plan(configs={"crop": crop})), "sample") == []


def test_sweep_curve_has_a_point_per_value() -> None:
    swept = {"guidance_scale": {"1": "one.yaml", "2": "two.yaml"}, "checkpoint": {"100": "earlier.yaml"}}
    known = files(a_plan(sweep=swept))
    curve = ONE | {"axis": "guidance_scale"}
    path = "out/one/sweep/guidance_scale/{}/metrics.json"
    assert known.swept_points(curve) == {"1": path.format(1), "2": path.format(2)}
    assert known.swept_config(curve | {"value": "2"}) == "two.yaml"
    assert known.swept_weights(curve | {"value": "2"}) == "out/one/train/weights.safetensors"
    earlier = ONE | {"axis": "checkpoint", "value": "100"}
    assert known.swept_weights(earlier) == "out/one/sweep/checkpoint/100/weights/weights.safetensors"
    averaged = {**ONE, "axis": "ema", "value": "0.999"}
    assert known.swept_weights(averaged) == "out/one/sweep/ema/0.999/weights/weights.safetensors"


def test_tables_are_identified_by_content_and_arrays_by_size_and_time(tmp_path: Path) -> None:
    """Snakemake does not notice a file that an older one replaces."""
    table, array = tmp_path / "rows.csv", tmp_path / "images.npz"
    (tmp_path / "img_emb").mkdir()
    embeddings = tmp_path / "img_emb" / "img_emb_0.npy"
    read = {"prompts": str(table), "synthesize_table": str(table), "small_images": str(array)}
    made = files(a_plan(**read, embeddings=str(tmp_path), keeps_samples=False))
    rules = (made.sample_stamps, made.synthesize_stamps, made.detector_stamps)
    none = [[], [], files(a_plan()).detector_stamps(ONE)]
    assert [stamps(ONE) for stamps in rules] == none
    for path in (table, array, embeddings):
        path.write_bytes(b"1")
        os.utime(path, (9, 9))
    before = [stamps(ONE) for stamps in rules]
    assert [len(words) for words in before] == [3, 1, len(none[2]) + 3]
    table.write_bytes(b"2")  # of the same size, and older
    os.utime(table, (1, 1))
    assert all(stamps(ONE) != words for stamps, words in zip(rules, before, strict=True))
    table.write_bytes(b"1")  # of the same content, and newer
    assert [stamps(ONE) for stamps in rules] == before
    for path in (array, embeddings):
        sample, _, evaluate = (stamps(ONE) for stamps in rules)
        os.utime(path, (1, 1))
        assert made.sample_stamps(ONE) != sample and made.detector_stamps(ONE) != evaluate
    assert files(a_plan(small_images="validation", embeddings_experiment="one")).sample_stamps(ONE) == []


def test_external_files_are_identified_by_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"1")
    made = files(a_plan(codec_files=[str(path), str(tmp_path / "gone")], decoder_files=[str(path)]))
    first = made.stamps("codec_files")(ONE)
    assert len(first) == 1 and made.stamps("decoder_files", "weaker_files")(ONE) == first
    os.utime(path, (1, 1))
    assert made.stamps("codec_files")(ONE) == [f"{path} 1 1000000000"] != first
    stamp = f"{path} 1 1000000000"
    started = files(a_plan(start_files=[str(path)], detector_files={"inception-1": [str(path)]}))
    assert started.start_stamps(ONE) == [stamp]
    assert started.detector_stamps(ONE) == ["--detector", f"{DATA}/detector", stamp]
    judge = {"dataset": "dots-16", "judge": "inception-1"}
    assert started.reference_stamps(judge) == [stamp] and started.reference_stamps(judge | {"judge": "dinov2"}) == []
    path.unlink()
    assert made.stamps("codec_files")(ONE) == []
    assert started.start_stamps(ONE) == started.options("start")["start"](ONE), "which Snakemake knows already"
    assert started.detector_stamps(ONE) == started.options("detector")["detector"](ONE)


def test_study_targets_are_its_page_and_tracking_file(tmp_path: Path) -> None:
    folder = tmp_path / "studies" / "seeds"
    base = {"name": "base", "source": None, "experiment": "one", "changes": {}, "runs": ["one", "one-1a2b3c4d"]}
    write_json(folder / "plan.json", {"base": "one", "seeds": [0, 1], "variants": [base]})
    for plan in (a_plan("one"), a_plan("one-1a2b3c4d")):
        write_json(tmp_path / plan.experiment / "config" / "plan.json", asdict(plan))
    inputs = Files(str(tmp_path), Plans.read(tmp_path, [], ["seeds"]))
    assert set(inputs.plans.by_name) == {"one", "one-1a2b3c4d"} and inputs.plans.requested == ()
    assert set(inputs.everything({})) == {f"{folder}/index.html", f"{folder}/tracked.json"}
    assert inputs.study_runs({"study": "seeds"})[0] == f"{tmp_path}/one/train/weights.safetensors"
    assert inputs.plans.studies["seeds"].experiments == {"one"}


def test_latents_encoded_elsewhere_replace_crops() -> None:
    found = files(a_plan(has_images=False, codec="kl", references={}, detectors=["inception"]))
    assert found.to_encode(ONE) == f"{DATA}/source.json"
    assert found.real_data(ONE) == found.training_data(ONE) == f"{DATA}/kl/manifest.json"
    assert inputs(found, "datasheet") == inputs(found, "detector") == []
    assert files(a_plan(codec="kl")).to_encode(ONE) == f"{DATA}/crops/manifest.json"
