"""Datasheet of a data set, to read before training on it: a page of numbers and of findings to inspect.

Everything comes from the records that `crop` wrote beside its shards: what it saw of each original, and of its crop.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from image_diffusion.core.texts import table
from image_diffusion.data.quality.duplicates import FAINT, chains, groups
from image_diffusion.data.shards.records import Quarantined, Sample

FORMAT = 1
"""Version of datasheet.json."""
SHOWN = 50
"""Maximum number of examples of each finding, and of strange images."""

DARK, BRIGHT = 12.0, 243.0
ENLARGED, CUT = 2.0, 0.5
BLURRED = 1 / 8
RARE = 1 / 10
REPEATED = 3

_UNUSUAL = {"16bit", "cmyk", "colour_space", "first_frame", "alpha", "profile"}


def describe_images(
    manifest: Mapping[str, Any],
    samples: Sequence[Sample],
    quarantined: Sequence[Quarantined],
    dropped: Sequence[Sample],
    unwanted: Sequence[Quarantined],
    pairs: Sequence[tuple[int, int, float]] | None,
    is_held_out: NDArray[np.bool_],
    captions: Mapping[str, Sequence[str]] | None,
) -> dict[str, Any]:
    """Return the sheet, as plain data.

    manifest: of the crops. samples: in their order. unwanted: by `data.keep`. pairs: near duplicates by number, with
    their correlation; None where the images are too alike to tell. is_held_out: of each sample. captions: those of an
    image, by its path or by that without its extension; None where the source has none.
    """
    sizes = np.array([sample.size for sample in samples], dtype=np.float64).reshape(-1, 2)
    # Sides in units of the crop's, both times its area, so that the ratios of square crops are those of the pixels.
    rows, columns = manifest["shape"][-2:]
    sides = sizes * (rows, columns)
    short, long = sides.min(1, initial=np.inf), sides.max(1, initial=0)
    is_cut = manifest["crop"].get("cuts", True)
    seen = {
        "brightness": np.array([sample.brightness for sample in samples]),
        "contrast": np.array([sample.contrast for sample in samples]),
        "sharpness": np.array([sample.sharpness for sample in samples]),
    }
    measures = {
        "width": sizes[:, 0],
        "height": sizes[:, 1],
        "aspect ratio": sizes[:, 0] / sizes[:, 1],
        "share cut away": (1 - short / long) * is_cut,
        **seen,
    }
    same = [[int(place) for place in group] for group in groups(sample.pixels for sample in samples)]
    exact = {(group[0], other) for group in same for other in group[1:]}
    near = [(a, b) for a, b, _ in pairs or [] if samples[a].pixels != samples[b].pixels]
    every = [*sorted(exact), *near]
    findings = _Findings(samples)
    findings.add("unreadable", "files gave no crop", [f"{row.path}: {row.reason}" for row in quarantined])
    findings.add("not wanted", "images were left out by data.keep", [f"{row.path}: {row.reason}" for row in unwanted])
    findings.add("left out", "images were left out as duplicates", [sample.path for sample in dropped])
    findings.pairs("duplicate", "pairs of images give the same crop, byte for byte", sorted(exact))
    findings.pairs("near duplicate", "pairs of images show the same picture", near)
    findings.pairs("label conflict", "of those pairs are of two classes", [
        (a, b) for a, b in every if samples[a].label != samples[b].label
    ])  # fmt: skip
    findings.pairs("across splits", "of those pairs are parted into training and validation", [
        (a, b) for a, b in every if is_held_out[a] != is_held_out[b]
    ])  # fmt: skip
    brightness, contrast, sharp = seen["brightness"], seen["contrast"], seen["sharpness"]
    plain = contrast < FAINT
    findings.where("plain", "crops show next to nothing: one colour", plain)
    findings.where("dark", "crops are nearly black", (brightness < DARK) & ~plain)
    findings.where("bright", "crops are nearly white", (brightness > BRIGHT) & ~plain)
    detail = sharp / np.maximum(contrast, FAINT)
    typical = float(np.median(detail[~plain])) if (~plain).any() else 0.0
    findings.where(
        "blurred", "crops have less than an eighth of the usual detail", (detail < BLURRED * typical) & ~plain
    )
    fitted = short if is_cut else long
    findings.where("enlarged", f"images were enlarged {ENLARGED:g} times or more", fitted * ENLARGED <= rows * columns)
    findings.where("cut", "images lose more than half of themselves to the crop", measures["share cut away"] > CUT)
    for flag in sorted(_UNUSUAL):
        findings.where(
            flag, f"images are unusual: {flag}", np.array([flag in sample.flags for sample in samples], dtype=bool)
        )
    counts = dict(zip(manifest["classes"], manifest["histogram"], strict=True))
    usual = float(np.median(list(counts.values()))) if counts else 0.0
    findings.add("rare class", "classes have less than a tenth of the usual images", [
        name for name, count in counts.items() if 0 < count < RARE * usual
    ])  # fmt: skip
    findings.add("empty class", "classes have no image", [name for name, count in counts.items() if not count])
    caption_facts = _captions(samples, captions, findings)
    return {
        "format": FORMAT,
        "name": manifest["name"],
        "num_samples": len(samples),
        "classes": counts,
        "formats": _counted(sample.format or "not noted" for sample in samples),
        "modes": _counted(sample.mode or "not noted" for sample in samples),
        "flags": manifest["flags"],
        "measures": {name: _quantiles(values) for name, values in measures.items()},
        "captions": caption_facts,
        "too_alike": pairs is None,
        "moved": len(manifest.get("not_held_out", [])),
        "findings": findings.rows,
        "groups": [[samples[place].path for place in chain] for chain in chains(every)],
        "strange": [{"path": samples[i].path, "why": why} for i, why in strangest(samples, detail)],
    }


def strangest(samples: Sequence[Sample], detail: NDArray[np.float64]) -> list[tuple[int, str]]:
    """Return the numbers of the most unusual images, the strangest first, and the reason for each, such as dark.

    The score is the distance of a measure from its median, divided by the sum of 0.1 and 1.4826 times its median
    absolute deviation.
    """
    logarithms: dict[str, tuple[str, str, list[float]]] = {
        "aspect": ("tall", "wide", [np.log(sample.size[0] / sample.size[1]) for sample in samples]),
        "brightness": ("dark", "bright", [sample.brightness / 16 for sample in samples]),
        "contrast": ("faint", "harsh", [np.log(sample.contrast + 1) for sample in samples]),
        "detail": ("blurred", "grainy", np.log(detail + 0.01).tolist()),
    }
    best: dict[int, tuple[float, str]] = {}
    for low, high, values in logarithms.values():
        x = np.array(values)
        centre = float(np.median(x)) if len(x) else 0.0
        spread = 1.4826 * float(np.median(np.abs(x - centre))) if len(x) else 0.0
        for i, score in enumerate(((x - centre) / (spread + 0.1)).tolist()):
            best[i] = max(best.get(i, (0.0, "")), (abs(score), high if score > 0 else low))
    order = sorted(best, key=lambda i: (-best[i][0], samples[i].path))
    return [(i, best[i][1]) for i in order[:SHOWN]]


class _Findings:
    """Findings to inspect: kind, number, a sentence, and examples if there are any."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self.rows: list[dict[str, Any]] = []

    def add(self, kind: str, what: str, examples: Sequence[str]) -> None:
        if examples:
            self.rows.append({"kind": kind, "count": len(examples), "what": what, "examples": list(examples[:SHOWN])})

    def where(self, kind: str, what: str, mask: NDArray[np.bool_]) -> None:
        self.add(kind, what, [self._samples[i].path for i in np.flatnonzero(mask).tolist()])

    def pairs(self, kind: str, what: str, pairs: Sequence[tuple[int, int]]) -> None:
        self.add(kind, what, [f"{self._samples[a].path} = {self._samples[b].path}" for a, b in pairs])


def _captions(
    samples: Sequence[Sample], captions: Mapping[str, Sequence[str]] | None, findings: _Findings
) -> dict[str, Any] | None:
    if not captions:
        return None
    mine = {
        sample.path: captions.get(sample.path) or captions.get(sample.path.rpartition(".")[0]) or []
        for sample in samples
    }
    lacking = [path for path, texts in mine.items() if not texts]
    findings.add("no caption", "images have no caption, while others have one", lacking)
    often = Counter(text for texts in mine.values() for text in texts)
    repeated = [f"{count:,} x {text}" for text, count in often.most_common() if count >= REPEATED]
    findings.add("repeated caption", f"captions are those of {REPEATED} images or more", repeated)
    texts = [text for captions_of_image in mine.values() for text in captions_of_image]
    return {
        "captions": len(texts),
        "images without": len(lacking),
        "different": len(often),
        "characters": _quantiles(np.array([len(text) for text in texts])),
        "words": _quantiles(np.array([len(text.split()) for text in texts])),
    }


def _counted(values: Any) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _quantiles(values: NDArray[Any]) -> list[float]:
    """Return the minimum, 5 %, median, 95 % and maximum; empty without values."""
    values = np.asarray(values, dtype=np.float64)
    return [round(float(value), 4) for value in np.quantile(values, (0, 0.05, 0.5, 0.95, 1))] if len(values) else []


def body(sheet: Mapping[str, Any], picture: Callable[[str], str]) -> str:
    """Return the sheet as a part of a page. picture: the source of an image, by its file name."""
    parts = [f"<p>{sheet['num_samples']:,} images.</p>"]
    if sheet["findings"]:
        lines = [_finding(finding) for finding in sheet["findings"]]
        parts.append("<h3>To look at</h3>\n" + "\n".join(lines))
    else:
        parts.append("<p>Nothing stands out.</p>")
    if sheet["too_alike"]:
        parts.append("<p>The images are too alike to tell near duplicates from others.</p>")
    if sheet["moved"]:
        moved = "are trained on although they would have been held out: a near duplicate of each is trained on"
        parts.append(f"<p>{sheet['moved']:,} {moved}.</p>")
    shown = {"same.png": "Pictures that occur more than once", "strange.png": "The strangest images"}
    for name, title in shown.items():
        if name in sheet["files"]:
            parts.append(f'<h3>{title}</h3>\n<img alt="{title}" src="{picture(name)}">')
    heads = ["", "least", "5 %", "median", "95 %", "most"]
    lengths = {name: value for name, value in (sheet["captions"] or {}).items() if isinstance(value, list)}
    rows = [[name, *values] for name, values in {**sheet["measures"], **lengths}.items() if values]
    parts.append("<h3>Measures</h3>\n" + _table(heads, rows))
    numbers = {name: value for name, value in (sheet["captions"] or {}).items() if isinstance(value, int)}
    for title, counts in (
        ("Captions", numbers), ("Formats", sheet["formats"]), ("Colour modes", sheet["modes"]),
        ("Flags", sheet["flags"]), ("Classes", sheet["classes"]),
    ):  # fmt: skip
        if counts:
            counted = _table(["", "images"], [[name, count] for name, count in counts.items()])
            parts.append(f"<details><summary>{title}: {len(counts):,}</summary>{counted}</details>")
    return "\n".join(parts)


def _finding(finding: Mapping[str, Any]) -> str:
    examples = "<br>".join(html.escape(text) for text in finding["examples"])
    title = f"{html.escape(finding['kind'])}: {finding['count']:,} {html.escape(finding['what'])}"
    return f"<details><summary>{title}</summary>{examples}</details>"


def _table(heads: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, str):
            return f"<td>{html.escape(value)}</td>"
        return (
            f'<td class="number">{value:,.4g}</td>'
            if isinstance(value, float)
            else f'<td class="number">{value:,}</td>'
        )

    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    rows = "\n".join("<tr>" + "".join(map(cell, line)) + "</tr>" for line in lines)
    return f"<table>\n<tr>{head}</tr>\n{rows}\n</table>"


def summary(manifest: dict[str, Any], source: dict[str, Any]) -> str:
    """Return a page that answers the first questions of a user of the images (after Gebru et al. 2021, "Datasheets for
    Datasets").

    manifest: of the shards. source: where the images came from, as the experiment says.
    """
    counts = manifest.get("histogram") or []
    classes = [f"{name} ({count:,})" for name, count in zip(manifest.get("classes", []), counts, strict=False)]
    facts = {
        "Examples": f"{manifest['num_samples']:,}",
        "Classes": ", ".join(classes) or "none",
        "Shape of one": " x ".join(map(str, manifest["shape"])),
        "Held out for validation": f"{len(numbers):,} by name"
        if (numbers := manifest.get("held_out"))
        else f"{manifest.get('validation_fraction', 0):.0%}",
        "Left out because they could not be read": f"{manifest.get('quarantined', 0):,}",
        "Source": ", ".join(f"{key}: {value}" for key, value in source.items()),
        "Cut": ", ".join(f"{key}: {value}" for key, value in manifest.get("crop", {}).items()),
    }
    rows = [(key, value) for key, value in facts.items() if value]
    return (
        f"# {manifest['name']}\n\n{table(('', ''), rows)}\n\n"
        "Why the images were collected, who agreed to it, and what they may be used for is not known to the program "
        "that wrote this page.\n"
    )
