"""The folder of a set: its images, data card, Croissant file, scorecard, page, provenance and checksums. The
description of the set for catalogues of data sets is in Croissant 1.0, JSON-LD
(https://docs.mlcommons.org/croissant/docs/croissant-spec.html)."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from image_diffusion import __version__
from image_diffusion.core.files.atomic import atomic_folder, sha256_file, to_json, write_json, write_page
from image_diffusion.core.files.checksums import write_checksums
from image_diffusion.core.texts import plain_page, table
from image_diffusion.synthesis.config import SCORES, SynthesizeConfig
from image_diffusion.synthesis.layouts import WRITERS, SyntheticSet
from image_diffusion.synthesis.scorecard import Scores

_TERMS = (
    "citeAs", "column", "equivalentProperty", "extract", "field", "fileObject", "fileProperty", "fileSet", "format",
    "includes", "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet", "references", "regex",
    "repeated", "replace", "samplingRate", "separator", "source", "subField", "transform",
)  # fmt: skip
_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    **{term: f"cr:{term}" for term in _TERMS},
}
_IMAGE, _TEXT, _INTEGER, _FLOAT = "sc:ImageObject", "sc:Text", "sc:Integer", "sc:Float"

Entity = dict[str, Any]


@dataclass(frozen=True)
class DataSetFacts:
    """Facts about a data set that Croissant and the data card state. published: an ISO date. files: sha256 by path.
    numbers: columns of numbers that the images were requested with. has_classes: whether the images have classes."""

    name: str
    description: str
    licence: str
    creator: str
    version: str
    published: str
    files: Mapping[str, str]
    numbers: Sequence[str] = ()
    has_classes: bool = True


def croissant(facts: DataSetFacts, layout: str) -> Entity:
    """Return the metadata of a data set in one of the layouts of `layouts.WRITERS`."""
    distribution, fields = {"folders": _of_folders, "webdataset": _of_tars, "parquet": _of_tables}[layout](
        facts.files, facts.numbers
    )
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": facts.name,
        "description": facts.description,
        "license": facts.licence,
        "url": "./",
        "creator": {"@type": "sc:Organization", "name": facts.creator},
        "datePublished": facts.published,
        "version": facts.version,
        "rai:dataCollection": "Drawn from a trained image diffusion model; no image is a photograph or a scan.",
        "distribution": distribution,
        "recordSet": [{"@type": "cr:RecordSet", "@id": "images", "name": "images", "field": fields}],
    }


def _of_folders(files: Mapping[str, str], numbers: Sequence[str]) -> tuple[list[Entity], list[Entity]]:
    table = _file("images/metadata.csv", "text/csv", files)
    pictures = _file_set("pictures", "image/png", "images/*/*.png")
    columns = {"file_name": _TEXT, "label": _TEXT, "seed": _INTEGER} | dict.fromkeys(numbers, _FLOAT)
    return [table, pictures], [
        _field(name, kind, {"fileObject": {"@id": table["@id"]}, "extract": {"column": name}})
        for name, kind in columns.items()
    ]


def _of_tars(files: Mapping[str, str], numbers: Sequence[str]) -> tuple[list[Entity], list[Entity]]:
    tars = [_file(name, "application/x-tar", files) for name in sorted(files) if name.endswith(".tar")]
    pictures = _file_set("pictures", "image/png", "*.png") | {"containedIn": [{"@id": tar["@id"]} for tar in tars]}
    source = {"fileSet": {"@id": "pictures"}}
    return [*tars, pictures], [
        _field("image", _IMAGE, source | {"extract": {"fileProperty": "content"}}),
        _field(
            "seed", _TEXT, source | {"extract": {"fileProperty": "filename"}, "transform": {"regex": r"(\d+)\.png"}}
        ),
    ]


def _of_tables(files: Mapping[str, str], numbers: Sequence[str]) -> tuple[list[Entity], list[Entity]]:
    tables = [_file(name, "application/x-parquet", files) for name in sorted(files) if name.endswith(".parquet")]
    rows = _file_set("rows", "application/x-parquet", "data/*.parquet")

    def column(name: str) -> Entity:
        return {"fileSet": {"@id": "rows"}, "extract": {"column": name}}

    return [*tables, rows], [
        _field("image", _IMAGE, column("image") | {"transform": {"jsonPath": "bytes"}}),
        _field("label", _INTEGER, column("label")),
        _field("seed", _INTEGER, column("seed")),
        *(_field(name, _FLOAT, column(name)) for name in numbers),
    ]


def _file(name: str, encoding: str, files: Mapping[str, str]) -> Entity:
    about = {"contentUrl": name, "encodingFormat": encoding, "sha256": files[name]}
    return {"@type": "cr:FileObject", "@id": name, "name": name} | about


def _file_set(name: str, encoding: str, pattern: str) -> Entity:
    return {"@type": "cr:FileSet", "@id": name, "name": name, "encodingFormat": encoding, "includes": pattern}


def _field(name: str, kind: str, source: Entity) -> Entity:
    return {"@type": "cr:Field", "@id": f"images/{name}", "name": name, "dataType": kind, "source": source}


_FILES = {"folders": "images/**", "webdataset": "shard-*.tar", "parquet": "data/*.parquet"}
_READING = {
    "folders": 'torchvision.datasets.ImageFolder("images")',
    "webdataset": 'webdataset.WebDataset("shard-00000.tar").decode("pil").to_tuple("png", "cls")',
    "parquet": 'datasets.load_dataset("parquet", data_files="data/*.parquet")',
}
HEADS = ("score", "value", "95 % interval", "real images", "better", "meaning")
_LICENCE = "Not stated. What these images may be used for follows from the licence of the model's training images."


def write_set(
    folder: Path,
    images: SyntheticSet,
    config: SynthesizeConfig,
    scores: Scores,
    wrong: list[str],
    counts: Mapping[str, Mapping[str, int]],
    described: dict[str, Any],
    experiment: str,
    weights: Path,
) -> None:
    """Write the folder of a set atomically. wrong: a sentence for each condition of the requirement that is not met.
    counts: `Selection.counts`. described: how the images were made. weights: of the model; their modification time is
    the date of the set.
    """
    counts = {name: of_class for name, of_class in counts.items() if of_class["drawn"]}
    filled = sum(of_class["kept"] > 0 for of_class in counts.values())
    with atomic_folder(folder) as unfinished:
        WRITERS[config.format](unfinished, images)
        written = sorted(path for path in unfinished.rglob("*") if path.is_file())
        facts = DataSetFacts(
            name=f"{experiment}-synthetic",
            description=f"{images.samples.num_samples:,} synthetic images of {filled:,} "
            f"{'class' if filled == 1 else 'classes'}, drawn from a diffusion model that was trained on "
            f"{described['training_data']['name']}.",
            licence=_LICENCE,
            creator=f"image-diffusion {__version__}",
            version="1.0.0",
            published=datetime.fromtimestamp(weights.stat().st_mtime, UTC).date().isoformat(),
            files={str(path.relative_to(unfinished)): sha256_file(path) for path in written},
            numbers=tuple(images.numbers),
            has_classes=bool(images.classes),
        )
        (unfinished / "croissant.json").write_text(to_json(croissant(facts, config.format)), encoding="utf-8")
        card = data_card(facts, config.format, counts, scores, experiment)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        page = score_page(facts, scores, config.require, wrong, counts)
        write_page(unfinished / "index.html", page)
        scorecard = {"scores": scores, "images": counts, "require": config.require, "faults": wrong}
        write_json(unfinished / "scorecard.json", scorecard)
        write_json(unfinished / "provenance.json", described)
        write_checksums(unfinished)


def data_card(
    facts: DataSetFacts, layout: str, counts: Mapping[str, Mapping[str, int]], scores: Scores, experiment: str
) -> str:
    """Return README.md, with the front matter of the Hugging Face Hub. counts: `Selection.counts`."""
    head, *rows = counts_table(counts)
    measured = [row[:4] for _, rows in _rows_by_group(scores) for row in rows if row[1] != "not measured"]
    return f"""---
license: other
license_name: not-stated
tags: [synthetic]
configs:
- config_name: default
  data_files: "{_FILES[layout]}"
---

# {facts.name}

{facts.description}

**How it was made.** Each image was drawn from its own seed by the model of the experiment `{experiment}`. No image is a
photograph or a scan. `provenance.json` states the weights, the sampler and the training data. To draw an image again:
{_command(facts, experiment)}

**Licence.** {facts.licence}

**What not to use it for.** Do not report results on these images as results on real ones, do not use them as a test
set, and do not take them for evidence of what exists. The model repeats the gaps and the biases of its training images.
A low privacy score is a measurement by the attacks below, not a proof of anonymity.

**How to read it.** `{_READING[layout]}`

{table(head, rows)}

{table(HEADS[:4], measured)}

`index.html` explains the scores. `croissant.json` describes the files for catalogues, and `SHA256SUMS` has their sums.
"""


def _command(facts: DataSetFacts, experiment: str) -> str:
    """Return the command that draws an image of the set again, with the notation of missing numbers."""
    label = " --label CLASS" if facts.has_classes else ""
    command = f"image-diffusion sample {experiment}{label} --num 1 --set sample.first_seed=SEED"
    if not facts.numbers:
        return f"`{command}`."
    row = ", ".join(f"{json.dumps(column, ensure_ascii=False)}: NUMBER" for column in facts.numbers)
    return f"`{command} --set {shlex.quote(f'sample.conditions=[{{{row}}}]')}`. A missing number is `null`."


_COUNTS = {
    "drawn": "Drawn",
    "other_class": "Rejected: other class",
    "confidence": "Rejected: confidence",
    "near_training": "Rejected: near a training image",
    "rejected": "Rejected in all",
    "not_needed": "Not needed",
    "kept": "Images",
}


def counts_table(counts: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Return the head and the rows of a table of `Selection.counts`; without selection, only the numbers of images."""
    of_each = [of_class.keys() for of_class in counts.values()]
    selected = any(of_class["drawn"] != of_class["kept"] for of_class in counts.values())
    shown = [name for name in _COUNTS if name == "kept" or (selected and all(name in names for names in of_each))]
    rows = [[name, *(f"{of_class[key]:,}" for key in shown)] for name, of_class in counts.items()]
    return [["Class", *(_COUNTS[name] for name in shown)], *rows]


def score_page(
    facts: DataSetFacts,
    scores: Scores,
    require: str,
    wrong: Sequence[str],
    counts: Mapping[str, Mapping[str, int]],
) -> str:
    """Return the page of a scorecard. require: the requirement; wrong: a sentence for each condition that is not met.
    counts: `Selection.counts`."""
    body = [f"<p>{html.escape(facts.description)}</p>", *_release(require, wrong)]
    for group, rows in _rows_by_group(scores):
        body += [f"<h2>{group}</h2>", "<table>", _line(HEADS, "th")]
        body += [*(_line(row, "td") for row in rows), "</table>"]
    head, *of_classes = counts_table(counts)
    body += ["<h2>Images</h2>", "<table>", _line(head, "th"), *(_line(row, "td") for row in of_classes), "</table>"]
    body.append(
        "<p>Real images: what held-out images get by the same measure; for utility the accuracy with real images alone."
        " Fidelity, diversity and copies_in_features are measured on the features of the data set's own detector, the"
        " rest of privacy on pixels. An image may be rejected for several reasons.</p>"
    )
    return plain_page(f"Scorecard of {facts.name}", "\n".join(body))


def _release(require: str, wrong: Sequence[str]) -> list[str]:
    if not require:
        return ["<p>Released. No requirement was set.</p>"]
    if not wrong:
        return [f"<p>Released. The requirement holds: <code>{html.escape(require)}</code></p>"]
    listed = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in wrong)
    return [f'<p class="wrong">Not released. These conditions of synthesize.require do not hold:</p><ul>{listed}</ul>']


def _rows_by_group(scores: Scores) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return the rows of the scorecard by group."""
    return [
        (group, [_row(name, scores[name]) for name, _ in named])
        for group, named in groupby(SCORES.items(), key=lambda item: item[1].group)
    ]


def _row(name: str, score: Mapping[str, Any]) -> tuple[str, ...]:
    value, low, high, real = (score[field] for field in ("value", "lower", "upper", "real"))
    meaning = "; ".join(filter(None, (SCORES[name].meaning, score["note"])))
    return (
        name,
        "not measured" if value is None else f"{value:.4g}" + (f", {score['verdict']}" if score.get("verdict") else ""),
        "none" if low is None else f"{low:.4g} to {high:.4g}",
        "" if real is None else f"{real:.4g}",
        SCORES[name].better,
        meaning,
    )


def _line(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
