"""Pairs of embeddings: stored rows, splits, reuse of shards, and rejected inputs."""

from __future__ import annotations

import hashlib
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import webdataset
from torch.nn import functional as F

from image_diffusion.core.config.base import parse, to_yaml
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.encoded import captions as captions_module
from image_diffusion.data.encoded.pairs import Splits, write_pairs
from image_diffusion.data.shards.reader import Shards, open_shards
from image_diffusion.data.sources.embeddings import Embeddings
from image_diffusion.metrics.features.classifier_training import DetectorTraining, train_detector
from image_diffusion.stages.train import prepare_training
from image_diffusion.systems.pairs.config import FilePairs, HashedPairs, PairInputs, PairsConfig
from image_diffusion.systems.prior.generation import text_encoder
from image_diffusion.text_encoders.hashing import HashingText

CPU = torch.device("cpu")
SIZES = (7, 40, 1)
"""Numbers of rows in the parts of a small data set."""


def write_parts(folder: Path, dim: int = 6, dtype: str = "float16") -> np.ndarray:
    """Write parts in the format of clip-retrieval. Return their rows [48, 2, dim]."""
    rows = np.random.default_rng(0).standard_normal((sum(SIZES), 2, dim)).astype(dtype)
    start = 0
    for number, size in enumerate(SIZES):
        part = rows[start : start + size]
        for which, name in enumerate(("img_emb", "text_emb")):
            (folder / name).mkdir(parents=True, exist_ok=True)
            np.save(folder / name / f"{name}_{number}.npy", part[:, which])
        write_captions(folder, number, [f"caption {start + i}" for i in range(size)])
        start += size
    return rows


def write_captions(folder: Path, number: int, captions: list[str | None]) -> None:
    (folder / "metadata").mkdir(exist_ok=True)
    columns = {"caption": captions, "key": [f"k{number}-{i}" for i in range(len(captions))]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "metadata" / f"metadata_{number}.parquet")


def written(source: Embeddings, output: Path, num_shards: int = 5, **settings: Any) -> tuple[dict[str, Any], int]:
    pairs = FilePairs(**settings)
    return write_pairs(
        pairs.build(PairInputs(None, source, num_shards, None, CPU)), "x", pairs.splits, pairs.dtype, output
    )


@pytest.fixture
def source(tmp_path: Path) -> Embeddings:
    write_parts(tmp_path / "in")
    return Embeddings(path=str(tmp_path / "in"))


def everything(data: Shards) -> np.ndarray:
    return data.gather(np.arange(data.num_samples)).float().numpy()


def test_every_row_of_every_part_is_stored_once_and_in_order(source, tmp_path):
    rows = write_parts(tmp_path / "in")
    manifest, count = written(source, tmp_path / "out")
    stored = open_shards(tmp_path / "out", "all", in_background=True)
    assert np.array_equal(everything(stored), rows.astype(np.float32))
    assert (manifest["kind"], manifest["num_samples"], count) == ("pairs", 48, 5)


def test_the_shards_are_ordinary_webdataset_tars(source, tmp_path):
    written(source, tmp_path / "out")
    tars = sorted(str(path) for path in (tmp_path / "out").glob("*.tar"))
    found = [sample["npy"] for sample in webdataset.WebDataset(tars, shardshuffle=False).decode()]
    assert np.array_equal(np.stack(found), everything(open_shards(tmp_path / "out", "all")).astype("float16"))


@pytest.mark.parametrize("splits", [(0.5, 0.3, 0.2), (0.7, 0.2, 0.1), (0.4, 0.0, 0.6), (0.4, 0.6, 0.0)])
def test_splits_are_disjoint_complete_and_determined_by_id(source, tmp_path, splits):
    """0.7, 0.2 and 0.1 do not sum to 1.0 in floating point (D-46)."""
    settings = {"splits": dict(zip(("train", "validation", "test"), splits, strict=True))}
    found = {}
    for column in (None, "key"):
        output = tmp_path / f"out-{column}"
        written(source.model_copy(update={"id_column": column}), output, **settings)
        parts = [everything(open_shards(output, name)) for name in ("train", "validation", "test")]
        assert sum(map(len, parts)) == 48
        rows = np.concatenate(parts).reshape(48, -1)
        assert len(np.unique(rows, axis=0)) == 48
        found[column] = parts[0]
        content = [
            int(hashlib.sha256(f"k{n}-{i}".encode()).hexdigest()[:16], 16)
            for n, s in enumerate(SIZES)
            for i in range(s)
        ]
        if column:
            assert len(parts[1]) == sum(each < splits[1] * 2.0**64 for each in content)
    assert found[None].shape != found["key"].shape or not np.array_equal(found[None], found["key"])


def test_second_run_writes_nothing_and_changed_row_rewrites_one_shard(source, tmp_path, capsys):
    before, _ = written(source, tmp_path / "out")
    assert written(source, tmp_path / "out") == (before, 0)
    ends = [line for line in capsys.readouterr().err.splitlines() if "(100%)" in line]
    count = before["num_samples"]
    assert [line.split(" (")[0] for line in ends] == [f"embed: {count} of {count} pairs"] * 2
    path = tmp_path / "in" / "text_emb" / "text_emb_1.npy"
    changed = np.load(path)
    changed[3] += 1
    np.save(path, changed)
    after, count = written(source, tmp_path / "out")
    assert count == 1
    differing = [a != b for a, b in zip(before["shards"], after["shards"], strict=True)]
    assert differing == [False, True, False, False, False]
    assert written(source, tmp_path / "out", dtype="float32")[1] == 5


def refused(source: Embeddings, tmp_path: Path, *words: str, **settings: Any) -> None:
    with pytest.raises(ValueError) as caught:
        written(source, tmp_path / "out", **settings)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and all(word in message for word in words), message
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_non_finite_or_zero_embeddings_are_rejected_by_name(source, tmp_path):
    path = tmp_path / "in" / "img_emb" / "img_emb_1.npy"
    good = np.load(path)
    for value, words in ((np.nan, "not finite"), (np.inf, "not finite"), (0.0, "all zeros")):
        bad = good.copy()
        bad[5] = value
        np.save(path, bad)
        refused(source, tmp_path, "1 of 48 pairs", "img_emb_1.npy row 5: its image embedding", words, "quarantine.csv")
        output = tmp_path / f"out-{words[:3]}-{value}"
        pairs = FilePairs()
        manifest, _ = write_pairs(
            pairs.build(PairInputs(None, source, 5, None, CPU)),
            "x",
            pairs.splits,
            pairs.dtype,
            output,
            max_bad_fraction=0.1,
        )
        assert (manifest["num_samples"], manifest["quarantined"]) == (47, 1)
        assert f"img_emb_1.npy row 5,its image embedding is {words}" in (output / "quarantine.csv").read_text()
        rest = np.delete(write_parts(tmp_path / "other"), SIZES[0] + 5, axis=0)
        assert np.array_equal(everything(open_shards(output, "all")), rest.astype(np.float32))
    wide = good.astype("float32")
    wide[5, 0] = 1e6
    np.save(path, wide)
    refused(source, tmp_path, "img_emb_1.npy row 5 is too large for float16", "float32")
    assert written(source, tmp_path / "out", dtype="float32")[0]["num_samples"] == 48


def test_missing_captions_are_rejected_by_row(source, tmp_path):
    write_captions(tmp_path / "in", 0, ["a", None, "c", " ", "e", "f", "g"])
    refused(source, tmp_path, "2 of 48 pairs", "img_emb_0.npy row 1: it has no caption")


def test_inconsistent_parts_are_rejected(source, tmp_path):
    folder = tmp_path / "in"
    np.save(folder / "text_emb" / "text_emb_0.npy", np.ones((6, 6), "float16"))
    refused(source, tmp_path, "img_emb_0.npy has 7 rows but", "text_emb_0.npy has 6")
    np.save(folder / "text_emb" / "text_emb_0.npy", np.ones((7, 5), "float16"))
    refused(source, tmp_path, "6 dimensions", "text_emb_0.npy of 5")
    write_parts(folder)
    write_captions(folder, 2, ["a", "b"])
    refused(source, tmp_path, "img_emb_2.npy has 1 rows but", "metadata_2.parquet has 2")
    (folder / "metadata" / "metadata_2.parquet").unlink()
    refused(source, tmp_path, "img_emb has a part 2", "metadata has none")
    write_parts(folder)
    (folder / "text_emb" / "text_emb_0.npy").write_bytes(b"no numbers")
    refused(source, tmp_path, "text_emb_0.npy is not a .npy file")
    refused(source.model_copy(update={"path": str(tmp_path / "nowhere")}), tmp_path, "nowhere/img_emb does not exist")
    refused(source.model_copy(update={"texts": None}), tmp_path, "pairs.clip")


def test_duplicate_ids_are_rejected(source, tmp_path):
    refused(source.model_copy(update={"id_column": "nothing"}), tmp_path, "no column 'nothing'", "caption, key")
    columns = {"caption": ["a"] * 7, "key": ["same"] * 7}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "in" / "metadata" / "metadata_0.parquet")
    refused(source.model_copy(update={"id_column": "key"}), tmp_path, "key does not name each pair on its own")


@pytest.mark.parametrize("splits", [{"train": 0.5}, {"train": 0.75, "validation": 0.3, "test": 0.1}])
def test_splits_that_do_not_sum_to_1_are_rejected(splits):
    with pytest.raises(ValueError, match=r"sum to (0\.75|1\.15)\. Choose shares that sum to 1"):
        parse(PairsConfig, {"type": "hashed", "splits": splits}, "pairs")


@pytest.fixture(scope="module")
def crops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crops of two classes and their detector."""
    folder = tmp_path_factory.mktemp("crops")
    generator = np.random.default_rng(0)
    for number in range(40):
        path = folder / f"in/{('dark', 'light')[number % 2]}/{number:02d}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 128, 192, dtype=np.uint8) + 127 * (number % 2)
        path.write_bytes(b"P6 8 8 255\n" + pixels.astype(np.uint8).tobytes())
    config = DataConfig(name="x", source={"type": "folder", "path": str(folder / "in")}, resolution=8, num_shards=3)  # type: ignore[arg-type]
    crop_dataset(config, folder / "crops")
    train_detector(open_shards(folder / "crops"), None, DetectorTraining(least_examples=128), folder / "detector")
    return folder


def test_hashed_pairs_hold_classifier_features_and_class_captions(crops, tmp_path):
    pairs = HashedPairs(num_tokens=4, dtype="float32", splits=Splits(train=0.5, validation=0.25, test=0.25))
    made = pairs.build(PairInputs(crops / "crops", None, 1, crops / "detector", CPU))
    manifest, _ = write_pairs(made, "x", pairs.splits, pairs.dtype, tmp_path)
    stored, images = open_shards(tmp_path, "all"), open_shards(crops / "crops", "all")
    rows = torch.from_numpy(everything(stored))
    assert rows.shape == (40, 6, 128)
    assert manifest["pairs"]["shared_space"] is False and len(manifest["shards"]) == 3
    text, tokens = HashingText(128, 4)(["a photo of a dark", "a photo of a light"])
    for label in (0, 1):
        mine = rows[torch.from_numpy(images.labels == label)]
        assert torch.equal(mine[:, 1:], torch.cat([text[label][None], tokens[label]]).expand(len(mine), 5, 128))
    torch.testing.assert_close(rows[:, 0].norm(dim=1), torch.ones(40))
    assert sum(open_shards(tmp_path, name).num_samples for name in ("train", "validation", "test")) == 40


def test_training_on_pairs_rejects_other_systems_and_flips(source, tmp_path):
    written(source, tmp_path / "pairs")
    train = {"steps": 1, "global_batch": 4}
    cases = {
        "holds pairs, from which a dit does not learn": ({"type": "dit"}, {}),
        "pairs have no mirror image": ({"type": "prior"}, {"flip_probability": 0.5}),
    }
    path = tmp_path / "train.yaml"
    for message, (system, changes) in cases.items():
        stage = {"experiment": "x", "codec": {"type": "rgb"}, "system": system, "train": train | changes, "preview": {}}
        path.write_text(to_yaml(stage))
        with pytest.raises(ValueError, match=message):
            prepare_training(path, tmp_path / "pairs" / "manifest.json", None)
    path.write_text(to_yaml(stage | {"train": train | {"flip_probability": 0}}))
    prepared = prepare_training(path, tmp_path / "pairs" / "manifest.json", None)
    assert prepared.model["spec"] == {"channels": 6, "resolution": 1, "num_classes": 0}


def test_captions_are_read_from_a_table_and_gaps_reported(crops, tmp_path):
    table = tmp_path / "captions.csv"
    names = [f"{('dark', 'light')[number % 2]}/{number:02d}.ppm" for number in range(40)]
    table.write_text("path,caption\n" + "".join(f"{name},number {name[-6:-4]}\n" for name in names))
    captions = {"type": "table", "path": str(table)}
    pairs = HashedPairs(captions=captions, dtype="float32")
    made = pairs.build(PairInputs(crops / "crops", None, 1, crops / "detector", CPU))
    first = made.samples(0)[0]
    text, _ = HashingText(128)([f"number {first.path[-6:-4]}"])
    np.testing.assert_array_equal(made.rows(0, 0, 1)[0, 1], text[0].numpy())

    gaps = tmp_path / "gaps.csv"
    gaps.write_text(
        "path,caption\n" + "".join(f"{name},\n" if name == first.path else f"{name},word\n" for name in names)
    )
    pairs = HashedPairs(captions={"type": "table", "path": str(gaps)})
    made = pairs.build(PairInputs(crops / "crops", None, 1, crops / "detector", CPU))
    with pytest.raises(ValueError, match=f"1 of 40 pairs .* The first is {first.path}: it has no caption"):
        write_pairs(made, "x", pairs.splits, pairs.dtype, tmp_path / "out")


@pytest.mark.parametrize("kind", ["folder", "webdataset"])
def test_captions_are_read_from_files_next_to_the_images_and_gaps_reported(crops, tmp_path, kind):
    folder, extensions = tmp_path / "in", (".txt", ".json")
    folder.mkdir()
    for number in range(12):
        name = f"{number:02d}"
        (folder / f"{name}.ppm").write_bytes(b"P6 8 8 255\n" + bytes([20 * number] * 192))
        text = f"number {name}" if number % 2 else f'{{"caption": "number {name}", "url": "x"}}'
        (folder / (name + extensions[number % 2 == 0])).write_text(text)

    def made(where: Path) -> tuple[Any, Any]:
        source = {"type": kind, "path": str(folder)}
        if kind == "webdataset":
            with tarfile.open(folder / "a.tar", "w") as tar:
                for path in sorted(folder.glob("[0-9]*")):
                    tar.add(path, path.name)
            source |= {"path": str(folder / "a.tar"), "labels": False}
        config = DataConfig(name="x", source=source, resolution=8, num_shards=1)  # type: ignore[arg-type]
        cropped = crop_dataset(config, where)
        assert cropped.manifest["quarantined"] == 0 and cropped.manifest["num_samples"] == 12
        pairs = HashedPairs(captions={"type": "beside"}, dtype="float32")
        return pairs, pairs.build(PairInputs(where, config.source, 1, crops / "detector", CPU))

    pairs, found = made(tmp_path / "crops")
    for row, sample in enumerate(found.samples(0)):
        name = Path(sample.path).stem if kind == "folder" else sample.path[-2:]
        np.testing.assert_array_equal(found.rows(0, row, row + 1)[0, 1], HashingText(128)([f"number {name}"])[0][0])
    (folder / "03.txt").unlink()
    captions_module._caption_columns.cache_clear()
    pairs, found = made(tmp_path / "again")
    with pytest.raises(ValueError, match="1 of 12 pairs .* The first is .*03.*: it has no caption"):
        write_pairs(found, "x", pairs.splits, pairs.dtype, tmp_path / "out")


def test_hashing_encoder_is_deterministic_and_depends_on_words_and_order():
    encode = HashingText(64, 3)
    texts, tokens = encode(["a red house", "A red house!", "a house red", "something else entirely", "one"])
    torch.testing.assert_close(texts.norm(dim=1), torch.ones(5))
    assert torch.equal(texts[0], texts[1]) and torch.equal(tokens[0], tokens[1])
    near, far = (F.cosine_similarity(texts[0], texts[i], dim=0).item() for i in (2, 3))
    assert 0.9 > near > 0.4 > abs(far)
    assert tokens[4, 0].any() and not tokens[4, 1:].any()
    # The directions are a part of the format: stored pairs must stay valid.
    torch.testing.assert_close(texts[4][:3], torch.tensor(FIXED), rtol=1e-5, atol=1e-6)
    assert not any(each.any() for each in encode(["!"])), "a caption without a word is left out of the pairs"


FIXED = [0.057920648, -0.030352317, -0.059305854]
"""The first numbers of the embedding of "one" in 64 dimensions."""


def test_missing_transformers_package_is_reported_in_one_line(crops, monkeypatch):
    pairs = parse(PairsConfig, {"type": "clip"}, "pairs")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'image-diffusion\[text\]'"):
        pairs.build(PairInputs(crops / "crops", None, 1, None, CPU))


def test_killed_embedding_run_resumes_bit_exactly(source, tmp_path):
    written(source, tmp_path / "once")
    pairs = FilePairs()
    made = pairs.build(PairInputs(None, source, 5, None, CPU))
    whole = made.rows

    def killed(shard: int, start: int, stop: int) -> np.ndarray:
        if shard == 2:
            raise KeyboardInterrupt
        return whole(shard, start, stop)

    made.rows = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        write_pairs(made, "x", pairs.splits, pairs.dtype, tmp_path / "twice")
    with pytest.raises(ValueError, match=r"manifest.json does not exist"):
        open_shards(tmp_path / "twice")
    assert written(source, tmp_path / "twice")[1] == 3
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("once", "twice")]
    assert files[0] == files[1]


class FakeClip(torch.nn.Module):
    """A tiny CLIP with the used part of the interface of transformers."""

    def __init__(self, width: int = 8, dim: int = 8) -> None:
        super().__init__()
        vision, text = SimpleNamespace(image_size=4), SimpleNamespace(max_position_embeddings=7, hidden_size=width)
        self.config = SimpleNamespace(projection_dim=dim, vision_config=vision, text_config=text)
        self.visual_projection = torch.nn.Linear(48, dim, bias=False)
        self.table = torch.nn.Embedding(100, width)
        self.text_projection = torch.nn.Linear(width, dim, bias=False)

    def vision_model(self, pixel_values: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(pooler_output=pixel_values.flatten(1))

    def text_model(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        hidden = self.table(input_ids)
        return SimpleNamespace(last_hidden_state=hidden, pooler_output=(hidden * attention_mask[..., None]).sum(1))


class FakeTokens(dict[str, torch.Tensor]):
    def to(self, device: torch.device) -> FakeTokens:
        return self


def fake_tokenizer(captions: list[str], max_length: int, **options: Any) -> FakeTokens:
    assert options == {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    ids, mask = torch.zeros(2, len(captions), max_length, dtype=torch.int64)
    for i, caption in enumerate(captions):
        words = caption.split()[:max_length]
        ids[i, : len(words)] = torch.tensor([len(word) for word in words])
        mask[i, : len(words)] = 1
    return FakeTokens(input_ids=ids, attention_mask=mask)


def test_clip_embeds_images_captions_and_tokens(crops, tmp_path, monkeypatch):
    fake = SimpleNamespace(
        CLIPModel=SimpleNamespace(from_pretrained=lambda name: FakeClip()),
        CLIPTokenizerFast=SimpleNamespace(from_pretrained=lambda name: fake_tokenizer),
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    pairs = parse(PairsConfig, {"type": "clip", "num_tokens": 6, "dtype": "float32"}, "pairs")
    torch.manual_seed(0)
    made = pairs.build(PairInputs(crops / "crops", None, 1, None, CPU))
    manifest, _ = write_pairs(made, "x", pairs.splits, pairs.dtype, tmp_path)
    rows = torch.from_numpy(everything(open_shards(tmp_path, "all")))
    assert rows.shape == (40, 8, 8) and manifest["pairs"]["shared_space"] is True
    torch.testing.assert_close(rows[:, :2].norm(dim=2), torch.ones(40, 2))
    assert rows[:, 2:7].any(dim=2).all() and not rows[:, 7].any(), "a caption has five words"

    fake.CLIPModel.from_pretrained = lambda name: FakeClip(width=5)
    with pytest.raises(ValueError, match="encodes tokens in 5 dimensions but embeds in 8"):
        pairs.build(PairInputs(crops / "crops", None, 1, None, CPU))


def test_replaced_clip_embeds_again_and_is_rejected_in_sampling(crops, tmp_path, monkeypatch):
    clips = [FakeClip(), FakeClip()]
    fake = SimpleNamespace(
        CLIPModel=SimpleNamespace(from_pretrained=lambda name: clips[0]),
        CLIPTokenizerFast=SimpleNamespace(from_pretrained=lambda name: fake_tokenizer),
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    pairs = parse(PairsConfig, {"type": "clip"}, "pairs")

    def embedded() -> tuple[dict[str, Any], int]:
        made = pairs.build(PairInputs(crops / "crops", None, 1, None, CPU))
        return write_pairs(made, "x", pairs.splits, pairs.dtype, tmp_path)

    before, count = embedded()
    assert (count, embedded()[1]) == (3, 0)
    text = before["pairs"]["text"]
    assert text_encoder(before["pairs"], None).identity == text
    clips.reverse()
    with pytest.raises(ValueError, match="but the text encoder is now .* Train again"):
        text_encoder(before["pairs"], None)
    text_encoder(
        {"text": {name: value for name, value in text.items() if name != "sha256"}}, None
    )  # an older prior has no sha256
    assert embedded()[1] == 3


def test_captions_without_text_embeddings_are_embedded_by_clip(source, tmp_path, monkeypatch):
    fake = SimpleNamespace(
        CLIPModel=SimpleNamespace(from_pretrained=lambda name: FakeClip(dim=6)),
        CLIPTokenizerFast=SimpleNamespace(from_pretrained=lambda name: fake_tokenizer),
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    captions_only = source.model_copy(update={"texts": None})
    written(captions_only, tmp_path / "out", clip={"weights": "x"}, dtype="float32")
    rows = everything(open_shards(tmp_path / "out", "all"))
    np.testing.assert_array_equal(rows[:, 0], write_parts(tmp_path / "in")[:, 0].astype("float32"))
    np.testing.assert_allclose(np.linalg.norm(rows[:, 1], axis=1), 1, rtol=1e-5)
    fake.CLIPModel.from_pretrained = lambda name: FakeClip(dim=5)
    refused(
        captions_only, tmp_path / "other", "6 dimensions but pairs.clip embeds captions in 5", clip={"weights": "x"}
    )


def test_missing_clip_weights_are_reported_in_one_line(crops, monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name} is not a local folder.\nMore lines.")

    monkeypatch.setitem(
        sys.modules, "transformers", SimpleNamespace(CLIPModel=SimpleNamespace(from_pretrained=missing))
    )
    with pytest.raises(
        ValueError, match="could not be loaded: .* is not a local folder. .* pairs.clip.weights"
    ) as caught:
        parse(PairsConfig, {"type": "clip"}, "pairs").build(PairInputs(crops / "crops", None, 1, None, CPU))
    assert len(str(caught.value).splitlines()) == 1
