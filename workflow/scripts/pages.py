"""Parts that the HTML pages share: templates, numbers as text, pictures and charts inside the file, without a network;
and Snakemake's measurements.

The templates are Jinja's, in workflow/pages. Charts are drawn by Bokeh's script, which every page with a chart carries
(1.4 MB; Plotly's has 4.8 MB).
"""

from __future__ import annotations

import base64
import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from image_diffusion.core.config.yaml12 import in_line
from image_diffusion.core.journal.metric_definitions import definition_of
from image_diffusion.core.journal.reader import has_resumed

TEMPLATES = Path(__file__).resolve().parents[1] / "pages"
MOST_POINTS = 1000
"""Points of a curve; of more, the lowest and the highest of each stretch are drawn."""
ARROWS = {"higher": "↑", "lower": "↓"}


def render(template: str, **values: Any) -> str:
    """A page from a template of workflow/pages. The same values give the same text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "interval": interval, "metric": metric, "real": real}
    environment.tests["fair_floor"] = has_fair_floor
    environment.globals |= {"style": _own("style.css"), "script": _own("page.js"), "bokeh": _bokeh, "bar": bar}
    return environment.get_template(template).render(**values)


def _own(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def _bokeh() -> Markup:
    from bokeh.resources import Resources

    return Markup("\n".join(Resources(mode="inline", components=["bokeh", "bokeh-api"], minified=True).js_raw))


def number(value: object) -> str:
    """A value for people: 1,234, 0.1235, the text that it is, or else as YAML has it."""
    if value is None:
        return ""
    if isinstance(value, bool | list | dict):
        return in_line(value)
    if not isinstance(value, int | float):
        return str(value)
    is_whole = isinstance(value, int) or (abs(value) < 1e15 and value.is_integer())
    return f"{int(value):,}" if is_whole else f"{value:.4g}"


def interval(bounds: Sequence[float] | None) -> str:
    """An interval for people."""
    return " to ".join(f"{bound:.4g}" for bound in bounds or [])


def metric(name: str) -> Markup:
    """A metric in words with the arrow of what is better, and its key; what it means shows when one points at it."""
    definition = definition_of(name)
    if definition is None:
        return escape(name)
    arrow = ARROWS.get(definition.better, "")
    aim = f" Better: {definition.better}." if definition.better else ""
    title = f"{definition.meaning.replace('`', '')}.{aim} From: {definition.source}."
    return Markup('<abbr tabindex="0" title="{}">{}</abbr>{} <small class="key">{}</small>').format(
        title, definition.title, f" {arrow}" if arrow else "", name
    )


def has_fair_floor(entry: Mapping[str, Any]) -> bool:
    """True if the score of real images compares with the value: it is of as many images, or does not depend on their
    number. entry: of metrics.json."""
    return entry.get("at_floor_n") is None or entry["n"] == entry["floor_n"]


def real(entry: Mapping[str, Any]) -> str:
    """The score of real images, with the value on as many samples where it compares with that alone."""
    if has_fair_floor(entry):
        return number(entry.get("floor"))
    return f"{number(entry['floor'])}, as many samples ({number(entry['floor_n'])}): {number(entry['at_floor_n'])}"


def bar(entry: Mapping[str, Any]) -> Markup:
    """A value with its interval, and a line where real images are if they compare with it, from 0 or the least to the
    most of them."""
    value, floor = entry["value"], entry.get("floor") if has_fair_floor(entry) else None
    low, high = entry.get("interval") or (value, value)
    values = [each for each in (value, low, high, floor, 0.0) if each is not None and math.isfinite(each)]
    least, most = min(values), max(values)
    if least == most:
        return Markup("")

    def place(each: float) -> str:
        return f"{4 + 112 * (each - least) / (most - least):.1f}"

    real = Markup('<path class="real" d="M{0} 0V14"/>').format(place(floor)) if floor is not None else ""
    spread = Markup('<path class="spread" d="M{} 7H{}"/>').format(place(low), place(high))
    return Markup(
        '<svg class="bar" viewBox="0 0 120 14" aria-hidden="true">{}{}<circle cx="{}" cy="7" r="3.5"/></svg>'
    ).format(real, spread, place(value))


def benchmark(path: Path) -> list[dict[str, str]]:
    """The measurements by Snakemake of each start of a stage; none without the file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def time_of_training(experiment: Path, benchmarks: Path) -> dict[str, str]:
    """The measurements by Snakemake of a training; empty if it went on from a checkpoint, as they are those of its last
    start alone. experiment: its folder of results. benchmarks: of all that Snakemake measured."""
    starts = benchmark(benchmarks / experiment.name / "train.tsv")
    return starts[-1] if starts and not has_resumed(experiment / "journal" / "train") else {}


def source_of(path: Path) -> str | None:
    """A PNG as the source of an image, inside the page; None where there is none."""
    return _encoded(path.read_bytes()) if path.is_file() else None


def strips(path: Path, count: int) -> list[str]:
    """A picture of `count` rows of equal height as one source each."""
    with Image.open(path) as picture:
        height = picture.height // count
        sources = []
        for row in range(count):
            text = io.BytesIO()
            picture.crop((0, row * height, picture.width, (row + 1) * height)).save(text, format="PNG")
            sources.append(_encoded(text.getvalue()))
    return sources


def _encoded(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def curve(steps: Sequence[int], values: Sequence[float]) -> dict[str, list[float]]:
    """The points of a curve that are drawn; a NaN leaves a gap."""
    places = range(len(steps))
    if len(steps) > MOST_POINTS:
        stretch = -(-2 * len(steps) // MOST_POINTS)
        parts = [places[start : start + stretch] for start in range(0, len(steps), stretch)]
        finite = [[place for place in part if math.isfinite(values[place])] or part[:1] for part in parts]
        chosen = {f(part, key=lambda place: values[place]) for part in finite for f in (min, max)}
        places = sorted({0, *chosen, len(steps) - 1})  # type: ignore[assignment]
    shown = [values[place] for place in places]
    return {
        "x": [steps[place] for place in places],
        "y": [float(f"{value:.6g}") if math.isfinite(value) else None for value in shown],  # type: ignore[misc]
    }
