"""Description of a synthetic data set in Croissant 1.0, JSON-LD for catalogues of data sets
(https://docs.mlcommons.org/croissant/docs/croissant-spec.html)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
