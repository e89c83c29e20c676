"""Workflow from a table of numbers to images of a class and numbers, with grids, metrics and an export."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
from projects import Project, warm_python
from pyarrow import parquet

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_numbers_of_table_condition_samples_and_synthesized_data_set(fresh: Project) -> None:
    paths = sorted(path.relative_to(fresh / "images").as_posix() for path in (fresh / "images").rglob("*.png"))
    table = fresh / "numbers.csv"
    rows = [f"{path},{number % 17},{'' if number % 5 == 0 else number / 10}" for number, path in enumerate(paths)]
    table.write_text("\n".join(["path,angle,dose", *rows[:-1]]))  # the last image has no row

    def number(data: dict[str, Any]) -> None:
        data["data"]["max_bad_fraction"] = 0.1
        data["pairs"] = {"type": "numbers", "table": "numbers.csv", "columns": ["angle", "dose"]}
        data["system"]["condition"] = [{"type": "label"}, {"type": "numbers"}]
        data["train"] |= {"grid_every_steps": 4, "steps": 4}
        data["preview"] = {"num_samples": 2, "sampler": {"type": "ddim", "num_steps": 2}}
        data["export"] = {"format": "pipeline"}

    fresh.edit(number)
    fresh.run()
    manifest = json.loads((fresh / "results/datasets/dots-16/numbers/manifest.json").read_text())
    assert (manifest["num_samples"], manifest["quarantined"]) == (63, 1)
    assert paths[-1] in (fresh / "results/datasets/dots-16/numbers/quarantine.csv").read_text()
    made = json.loads((fresh / "results/micro/samples/samples.json").read_text())
    assert made["conditions"]["split"] == "validation" and set(made["conditions"]["values"]) == {"angle", "dose"}
    assert json.loads((fresh / "results/micro/metrics.json").read_text())["metrics"]
    assert list((fresh / "results/micro/train/previews").rglob("step-0000004.png"))
    assert fresh.planned() == set()

    fresh.edit(lambda data: data["sample"].update(conditions={"label": ["light"], "angle": [0, 8], "dose": [None, 3]}))
    assert "train" not in fresh.planned() and "sample" in fresh.planned()
    fresh.run()
    made = json.loads((fresh / "results/micro/samples/samples.json").read_text())
    assert made["conditions"]["values"]["angle"][:4] == [0, 0, 8, 8]
    assert made["conditions"]["values"]["dose"][:4] == [None, 3, None, 3]

    asked = "sample.conditions={angle: [2, 4, 6], dose: [0.5, 1]}"
    command = [warm_python(), "-m", "image_diffusion", "sample", "micro", "--num", "12", "--set", asked]
    done = subprocess.run(command, cwd=fresh.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = json.loads((fresh / "drawn/micro/samples.json").read_text())
    assert drawn["conditions"]["values"] == {"angle": [2, 2, 4, 4, 6, 6] * 2, "dose": [0.5, 1] * 6}

    (fresh / "wanted.csv").write_text("label,angle,dose,count\nlight,3,1.5,2\ndark,16,,3\n")
    wanted = {"table": "wanted.csv", "format": "parquet", "classifier_seeds": 2, "classifier_steps": 2}
    fresh.edit(lambda data: data.update(synthesize=wanted))
    fresh.run("results/micro/synthetic")
    rows = parquet.read_table(fresh / "results/micro/synthetic/data").to_pylist()
    assert [(row["angle"], row["dose"]) for row in rows] == [(3, 1.5)] * 2 + [(16, None)] * 3
    assert len({row["label"] for row in rows[:2]}) == len({row["label"] for row in rows[2:]}) == 1
    assert "utility.gain" in json.loads((fresh / "results/micro/synthetic/scorecard.json").read_text())["scores"]

    os.utime(table, (0, 0))
    assert {"embed", "train"}.isdisjoint(fresh.planned())
    table.write_text(table.read_text().replace(f"{paths[3]},3,", f"{paths[3]},4,"))
    os.utime(table, (0, 0))  # as `mv` of an older file
    assert {"embed", "train"} <= fresh.planned() and "crop" not in fresh.planned()
