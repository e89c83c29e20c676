"""Which files a stage reads, and how its command is told of them."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from image_diffusion.core.files import write_json
from image_diffusion.metrics.differences import Measured
from image_diffusion.workflow.files import Files
from image_diffusion.workflow.plans import Plan, Plans
from plans import a_plan, plans_of

DATA = "out/datasets/dots-16"


def files(*plans: Plan) -> Files:
    return Files("out", plans_of(*plans))


ONE = {"experiment": "one"}


def test_a_plain_experiment_needs_crops_and_nothing_else() -> None:
    known = files(a_plan())
    assert known.training_data(ONE) == known.real_data(ONE) == f"{DATA}/crops/manifest.json"
    assert known.data_folder(ONE) == f"{DATA}/crops"
    assert known.dataset_folder(ONE) == DATA and known.dataset(ONE) == "dots-16"
    nothing = [known.codec_weights, known.reference, known.small_images, known.sampled_parts, known.pair_detector]
    options = [known.codec_option, known.reference_option, known.small_images_option]
    assert [each(ONE) for each in (*nothing, *options)] == [[]] * 8
    assert known.made_option(ONE, SimpleNamespace(parts=[])) == []
    assert known.headline(ONE) == "inpipe_fd"


def test_everything_is_what_is_made_of_each_and_of_all() -> None:
    known = files(a_plan(export="diffusers", sweep={"guidance_scale": {"1": "a.yaml"}}), a_plan("two"))
    both = known.made({})
    assert both == [*known.made(ONE), *known.made({"experiment": "two"})]
    assert {"out/one/diffusers", "out/one/sweep/guidance_scale/curve.json", "out/two/metrics.json"} <= set(both)
    assert set(known.everything({})) - set(both) == {
        "out/summary.html",
        f"{DATA}/crops/manifest.json",
        f"{DATA}/detector/detector.json",
        f"{DATA}/references/inpipe/reference.json",
        *(f"out/{name}/{page}" for name in ("one", "two") for page in ("tracked.json", "report/index.html")),
    }


def test_a_codec_of_another_experiment_is_waited_for_and_told() -> None:
    known = files(a_plan(codec="vae", codec_experiment="vae"))
    weights = "out/vae/train/weights.safetensors"
    assert known.training_data(ONE) == f"{DATA}/vae/manifest.json"
    assert known.real_data(ONE) == f"{DATA}/crops/manifest.json"
    assert known.codec_weights(ONE) == known.codec_weights({"dataset": "dots-16", "codec": "vae"}) == weights
    assert known.codec_option(ONE) == ["--codec-weights", weights]


def test_many_shards_and_many_images_are_shared_by_jobs() -> None:
    known = files(a_plan(num_shards=48, codec="vae", sample_jobs=2))
    latents = {"dataset": "dots-16", "codec": "vae"}
    assert known.encoded_parts(latents) == [f"{DATA}/vae/part-{part}-of-3.done" for part in range(3)]
    looked = {"dataset": "dots-16", "judge": "inception"}
    parts = [f"{DATA}/references/inception/parts/part-{part}-of-3.npz" for part in range(3)]
    assert known.reference_parts(looked) == parts
    parts = ["out/one/samples/part-0-of-2.npz", "out/one/samples/part-1-of-2.npz"]
    assert known.sampled_parts(ONE) == parts
    assert known.made_option(ONE, SimpleNamespace(parts=parts)) == ["--made", *parts]
    for shards, jobs in ((31, 0), (32, 2), (10_000, 64)):
        shared = files(a_plan(num_shards=shards, codec="vae"))
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
def test_each_of_several_gpus_has_the_same_to_do(
    at_once: int, shards: int, data: int, jobs: int, batches: int, samples: int
) -> None:
    plan = a_plan(num_shards=shards, codec="vae", sample_jobs=jobs, sample_batches=batches)
    known = Files("out", plans_of(plan), lambda plan: at_once)
    assert len(known.encoded_parts({"dataset": "dots-16", "codec": "vae"})) == data
    assert len(known.reference_parts({"dataset": "dots-16", "judge": "inception"})) == data
    assert len(known.sampled_parts(ONE)) == samples
    judged = Files("out", plans_of(replace(plan, keeps_samples=False, sample_jobs=1)), lambda plan: at_once)
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
def test_very_many_images_are_cropped_by_several_jobs(
    tmp_path: Path, num_files: int, num_bytes: int, shards: int, jobs: int
) -> None:
    """By their number, or their size where a file holds many."""
    known, crops = Files(str(tmp_path), plans_of(a_plan(num_shards=shards))), {"dataset": "dots-16"}
    assert known.cropped_parts(crops) == known.cropped_option(crops) == [], "nobody has looked for files"
    assert known.crop_memory_mb(crops) == 8000
    write_json(tmp_path / "datasets/dots-16/source.json", {"files": num_files, "bytes": num_bytes, "revision": "x"})
    folder = tmp_path / "datasets/dots-16/crops"
    assert known.cropped_parts(crops) == [str(folder / f"part-{part}-of-{jobs}.json") for part in range(jobs)]
    assert known.cropped_option(crops) == (["--made", *known.cropped_parts(crops)] if jobs else [])
    assert known.crop_memory_mb(crops) == max(8000, num_files // 500, num_bytes // 10**5 // 500)


@pytest.mark.parametrize(
    ("num_files", "shards", "minutes"),
    [(None, 2, 240), (0, 2, 240), (60, 2, 15), (1_281_167, 16, 143), (3_900_000, 16, 240), (100_000_000, 64, 215)],
)
def test_a_job_that_crops_asks_for_time_by_its_images(
    tmp_path: Path, num_files: int | None, shards: int, minutes: int
) -> None:
    known = Files(str(tmp_path), plans_of(a_plan(num_shards=shards)))
    if num_files is not None:
        write_json(tmp_path / "datasets/dots-16/source.json", {"files": num_files, "bytes": 0, "revision": "x"})
    assert known.crop_runtime_min({"dataset": "dots-16"}) == minutes


def test_what_is_enlarged() -> None:
    another = files(a_plan(small_images_experiment="small"))
    assert another.small_images(ONE) == "out/small/samples/samples.npz"
    assert another.small_images_option(ONE) == ["--small-images", "out/small/samples/samples.npz"]
    held_out = files(a_plan(small_images="validation"))
    assert held_out.small_images(ONE) == f"{DATA}/crops/manifest.json"
    assert held_out.small_images_option(ONE) == ["--small-images", f"{DATA}/crops"]
    a_file = files(a_plan(small_images="small.npz"))
    assert a_file.small_images(ONE) == "small.npz"
    assert a_file.small_images_option(ONE) == ["--small-images", "small.npz"]


def test_what_images_are_made_of(tmp_path: Path) -> None:
    drawn = files(a_plan(embeddings_experiment="prior", pairs="hashed", pairs_beside=True))
    assert drawn.embeddings(ONE) == ["out/prior/samples/embeddings.json"]
    assert drawn.embeddings_option(ONE) == ["--embeddings", "out/prior/samples"]
    held_out = files(a_plan(embeddings="validation", pairs="hashed", pairs_beside=True))
    assert held_out.embeddings(ONE) == [f"{DATA}/hashed/manifest.json", f"{DATA}/crops/manifest.json"]
    assert held_out.embeddings_option(ONE) == ["--embeddings", f"{DATA}/hashed", f"{DATA}/crops"]
    for name in ("img_emb/img_emb_0.npy", "metadata/metadata_0.parquet"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert files(a_plan(embeddings="nowhere")).embeddings(ONE) == ["nowhere/img_emb/img_emb_0.npy"]
    given = files(a_plan(embeddings=str(tmp_path)))
    assert [Path(path).name for path in given.embeddings(ONE)] == ["img_emb_0.npy", "metadata_0.parquet"]
    assert given.embeddings_option(ONE) == ["--embeddings", str(tmp_path)]
    assert files(a_plan()).embeddings(ONE) == files(a_plan()).embeddings_option(ONE) == []
    made = files(a_plan(makes_samples=False, makes_embeddings=True)).made(ONE)
    assert [path for path in made if "samples" in path] == ["out/one/samples/embeddings.json"]


def test_what_samples_are_compared_with() -> None:
    assert files(a_plan(against="real.npz")).reference_option(ONE) == ["--reference", "real.npz"]
    assert files(a_plan(against_experiment="two")).reference(ONE) == "out/two/samples/samples.npz"
    assert files(a_plan()).detector_option(ONE) == ["--detector", f"{DATA}/detector"]
    assert files(a_plan(detectors=["inception"])).detector_option(ONE) == []
    assert files(a_plan(detectors=[])).detector(ONE) == []
    two = files(a_plan(detectors=["inception", "inpipe"], references={"inception": "a.yaml", "inpipe": "b.yaml"}))
    assert two.detector(ONE) == f"{DATA}/detector/detector.json"
    assert two.references_option(ONE) == ["--references", f"{DATA}/references/inception", f"{DATA}/references/inpipe"]
    inception, inpipe = ({"dataset": "dots-16", "judge": judge} for judge in ("inception", "inpipe"))
    assert (two.reference_config(inception), two.reference_config(inpipe)) == ("a.yaml", "b.yaml")
    assert two.reference_detector_option(inception) == []
    assert two.reference_detector_option(inpipe) == ["--detector", f"{DATA}/detector"]
    assert files(a_plan(references={})).references_option(ONE) == []


def test_what_makes_no_samples_has_none_to_be_judged_or_shown() -> None:
    makes, judged = files(a_plan()), files(a_plan(makes_samples=False))
    assert makes.samples_option(ONE) == ["--samples", "out/one/samples/samples.npz"]
    assert makes.samples(ONE) == ["out/one/samples/samples.npz", "out/one/samples/samples.json"]
    assert makes.grid_option(ONE) == ["--grid", "out/one/samples/grid.png"]
    assert judged.samples(ONE) == judged.samples_option(ONE) == judged.grid(ONE) == judged.grid_option(ONE) == []
    assert not [path for path in judged.made(ONE) if "samples" in path]


def test_images_that_are_not_stored_are_made_by_who_judges_them() -> None:
    kept = files(a_plan(codec_experiment="one", prompts="words.txt"))
    made = files(a_plan(codec_experiment="one", prompts="words.txt", keeps_samples=False, sweep={"ema": {"1": "a"}}))
    assert kept.made_with(ONE) == kept.making_option(ONE) == []
    assert made.made_with(ONE) == ["out/one/train/weights.safetensors", "words.txt"]
    codec = ["--codec-weights", "out/one/train/weights.safetensors"]
    assert made.making_option(ONE) == ["--making", "results/one/config/sample.yaml", *codec]
    assert made.making_option({"experiment": "one", "axis": "ema", "value": "1"}) == ["--making", "a", *codec]


def test_pairs_of_embeddings() -> None:
    made = files(a_plan(pairs="hashed", pairs_of_images=True, pairs_of_detector=True, captions="captions.csv"))
    job = {"dataset": "dots-16", "pairs": "hashed"}
    assert made.pair_sources(job) == [f"{DATA}/crops/manifest.json", "captions.csv"]
    assert made.pair_detector(job) == f"{DATA}/detector/detector.json"
    assert made.pair_options(job) == ["--data", f"{DATA}/crops/manifest.json", "--detector", f"{DATA}/detector"]
    assert made.real_data(ONE) == made.training_data(ONE) == f"{DATA}/hashed/manifest.json"
    assert made.detector(ONE) == []
    given = files(a_plan(pairs="files", pairs_of_source=True))
    assert given.pair_sources({"dataset": "dots-16", "pairs": "files"}) == [f"{DATA}/source.json"]
    assert given.pair_options({"dataset": "dots-16", "pairs": "files"}) == []


def test_captions_are_read_beside_the_data_and_follow_the_source() -> None:
    captions = {"pairs": "captions-hashed", "pairs_beside": True, "pairs_of_images": True, "pairs_of_source": True}
    made = files(a_plan(**captions, prompts="prompts.txt"))
    job = {"dataset": "dots-16", "pairs": "captions-hashed"}
    assert made.pair_sources(job) == [f"{DATA}/crops/manifest.json", f"{DATA}/source.json"]
    assert made.real_data(ONE) == made.training_data(ONE) == f"{DATA}/crops/manifest.json"
    assert made.pairs_beside_option(ONE) == ["--pairs", f"{DATA}/captions-hashed/manifest.json"]
    assert made.detector(ONE) == f"{DATA}/detector/detector.json" and made.prompts(ONE) == "prompts.txt"
    plain = files(a_plan())
    assert plain.pairs_beside_option(ONE) == plain.pairs_beside(ONE) == plain.prompts(ONE) == []


def test_a_stage_reads_its_configuration_and_those_of_the_stages_before() -> None:
    known = files(a_plan(), a_plan("large", small_images_experiment="one"))
    assert known.config("train")(ONE) == "results/one/config/train.yaml"
    crop = "results/datasets/dots-16/config/crop.yaml"
    assert known.configs_before("sample")(ONE) == [crop, "results/one/config/train.yaml"]
    below = ["results/one/config/train.yaml", "results/one/config/sample.yaml"]
    large = {"experiment": "large"}
    assert known.configs_before("sample")(large) == [crop, "results/large/config/train.yaml", *below]
    assert known.configs_before("train")(large) == [crop]
    assert known.sample_config_option(ONE) == ["--sample", "results/one/config/sample.yaml"]
    assert files(a_plan(configs={"crop": crop})).sample_config_option(ONE) == []


def test_a_curve_has_a_point_for_each_value() -> None:
    swept = {"guidance_scale": {"1": "one.yaml", "2": "two.yaml"}, "checkpoint": {"100": "earlier.yaml"}}
    known = files(a_plan(sweep=swept))
    curve = ONE | {"axis": "guidance_scale"}
    assert known.swept_points(curve) == [f"out/one/sweep/guidance_scale/{value}/metrics.json" for value in (1, 2)]
    assert known.swept_point_options(curve)[1] == "2=out/one/sweep/guidance_scale/2/metrics.json"
    assert known.swept_config(curve | {"value": "2"}) == "two.yaml"
    assert known.swept_weights(curve | {"value": "2"}) == "out/one/train/weights.safetensors"
    earlier = ONE | {"axis": "checkpoint", "value": "100"}
    assert known.swept_weights(earlier) == "out/one/sweep/checkpoint/100/weights/weights.safetensors"
    assert known.swept_weights_option(earlier) == ["--step", "100"]
    averaged = {**ONE, "axis": "ema", "value": "0.999"}
    assert known.swept_weights(averaged) == "out/one/sweep/ema/0.999/weights/weights.safetensors"
    assert known.swept_weights_option(averaged) == ["--average", "0.999"]


def test_files_of_others_are_told_apart_by_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"1")
    made = files(a_plan(codec_files=[str(path), str(tmp_path / "gone")], decoder_files=[str(path)]))
    first = made.codec_stamps(ONE)
    assert len(first) == 1 and made.decoder_stamps(ONE) == first
    os.utime(path, (1, 1))
    assert made.codec_stamps(ONE) == [f"{path} 1 1000000000"] != first
    path.unlink()
    assert made.codec_stamps(ONE) == []


def test_several_seeds_bring_their_page_beside_what_each_makes(tmp_path: Path) -> None:
    folder = tmp_path / "ledgers" / "one-seeds"
    row = {"name": "base", "source": None, "experiment": "one", "changes": {}, "runs": ["one", "one-1a2b3c4d"]}
    write_json(folder / "plan.json", {"base": "one", "seeds": [0, 1], "rows": [row]})
    for plan in (a_plan("one", seeds="one-seeds"), a_plan("one-1a2b3c4d")):
        write_json(tmp_path / plan.experiment / "config" / "plan.json", asdict(plan))
    known = Files(str(tmp_path), Plans.read(tmp_path, ["one"]))
    assert set(known.plans.by_name) == {"one", "one-1a2b3c4d"} and known.plans.asked == ("one",)
    pages = {f"{folder}/index.html", f"{folder}/tracked.json"}
    assert pages <= set(known.all_of("one")) and not pages & set(known.all_of("one-1a2b3c4d"))
    everything = set(known.everything({}))
    assert pages | {f"{tmp_path}/{name}/report/index.html" for name in known.plans.by_name} <= everything
    assert known.ledger_runs({"ledger": "one-seeds"})[0] == f"{tmp_path}/one/train/weights.safetensors"
    assert known.plans.ledgers["one-seeds"].experiments == {"one"}


def test_a_page_of_several_seeds_tells_each_number_with_both_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Path(__file__).parents[2] / "workflow" / "scripts"
    monkeypatch.syspath_prepend(str(scripts))
    spec = importlib.util.spec_from_file_location("ledger_page", scripts / "ledger.py")
    assert spec is not None and spec.loader is not None
    ledger = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ledger_page", ledger)
    spec.loader.exec_module(ledger)
    runs = [
        ledger.Run("one", seed, {"inpipe_kd": Measured(value, 0.01)}) for seed, value in enumerate((0.5, 0.52, 0.48))
    ]
    row = ledger.Row("base", None, {}, runs)
    plan = {"ledger": "one-seeds", "base": "one", "seeds": [0, 1, 2], "budget": {"steps": None, "operations": None}}
    [line] = ledger.levels(row, ["inpipe_kd", "missing"])[1]
    assert line == ["inpipe_kd", "0.5", "0.4503 to 0.5497", "0.4887 to 0.5113", "3"]
    shown = ledger.page(plan, [row], ["inpipe_kd"], Path("results"))
    assert "one with seeds 0, 1, 2" in shown and "0.4503 to 0.5497" in shown and "95 % over seeds" in shown
    assert "0.4887 to 0.5113" in ledger.markdown(plan, [row], ["inpipe_kd"])
    assert "inpipe_kd_over_seeds_low" in ledger.as_csv([row], ["inpipe_kd"], [0, 1, 2])


def test_latents_that_others_have_encoded_stand_in_for_crops() -> None:
    found = files(a_plan(has_images=False, codec="kl", references={}, detectors=["inception"]))
    assert found.to_encode(ONE) == f"{DATA}/source.json"
    assert found.real_data(ONE) == found.training_data(ONE) == f"{DATA}/kl/manifest.json"
    assert found.datasheet(ONE) == found.detector(ONE) == []
    assert files(a_plan(codec="kl")).to_encode(ONE) == f"{DATA}/crops/manifest.json"
