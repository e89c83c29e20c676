"""The stage `export` writes a folder with a model card, atomically."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import dump, to_yaml
from image_diffusion.core.files.atomic import write_json, write_text
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.types import DataSpec
from image_diffusion.experiments.experiment import ExportConfig, ExportStage
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.stages.export import check_metrics_of
from image_diffusion.systems.diffusion.dit import DiTSystem
from warm import warm_python

MEASURED = {
    "metrics": {"inpipe_fd": {"value": 1.5, "interval": [1.0, 2.0], "n": 300, "note": ""}},
    "protocol": {"detectors": [{"name": "inpipe"}]},
}
RUN = """
import resource, sys
from image_diffusion.core.process import command
from image_diffusion.stages import export
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
command.run(export.main)
"""


def run_export(folder: Path, width: int, grid: int, limit: int) -> subprocess.CompletedProcess[str]:
    """Export a DiT on pixels with a file size limit of `limit` bytes. grid: size of its image in bytes."""
    torch.manual_seed(0)
    system, spec = DiTSystem(network=DiTConfig(depth=1, width=width, num_heads=2, patch=4)), DataSpec(
        channels=3, resolution=8, num_classes=2
    )  # fmt: skip
    described = {
        "system": dump(system),
        "spec": dump(spec),
        "codec": {"config": dump(Rgb()), "identity": Rgb().identity, "scale": None},
        "classes": ["dark", "light"],
        "step": 10,
        "examples_seen": 640,
        "ema": None,
    }
    save_weights(folder / "train", system.build_network(spec).state_dict(), described)
    write_text(folder / "export.yaml", to_yaml(dump(ExportStage(export=ExportConfig(format="pipeline")))))
    write_json(folder / "metrics.json", MEASURED)
    (folder / "grid.png").write_bytes(bytes(grid))
    given = [
        "--config", folder / "export.yaml", "--weights", folder / "train/weights.safetensors", "--metrics",
        folder / "metrics.json", "--grid", folder / "grid.png", "--output", folder / "diffusers",
    ]  # fmt: skip
    write_text(program := folder.with_name(f"{folder.name}.py"), RUN)
    command = [warm_python(), program, str(limit), *given]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_export_includes_a_model_card_with_metrics_and_intervals(tmp_path: Path) -> None:
    done = run_export(tmp_path, width=16, grid=10, limit=10**9)
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "diffusers/README.md").read_text()
    for part in ("| inpipe_fd | 1.5 | 1 to 2 | 300 |", "trust_remote_code=True", "class_labels=[0]", "pydantic"):
        assert part in card, part
    listed = (tmp_path / "diffusers/SHA256SUMS").read_text()
    for name in ("pipeline.py", "model/exported.py", "model/config.json", "README.md", "grid.png"):
        assert f"  {name}\n" in listed, name


def test_metrics_of_other_weights_are_rejected() -> None:
    check_metrics_of("one", MEASURED, Path("metrics.json"))  # metrics of samples without known weights
    measured = {**MEASURED, "protocol": {"weights": {"sha256": "one"}}}
    check_metrics_of("one", measured, Path("metrics.json"))
    with pytest.raises(ValueError, match=r"metrics.json is of other weights than --weights. Run evaluate with these"):
        check_metrics_of("another", measured, Path("metrics.json"))


@pytest.mark.parametrize(("width", "grid"), [(256, 10), (16, 600_000)], ids=["weights", "picture"])
def test_full_disk_leaves_no_partial_export(tmp_path: Path, width: int, grid: int) -> None:
    done = run_export(tmp_path, width, grid, limit=500_000)
    line = (
        rf"error: The file exceeds the limit of its size \(ulimit -f\): {tmp_path / 'diffusers'} could not be "
        rf"written\. [\d.,]+ GB of [\d.,]+ GB are free on the disk of \S+\. Free some space .*\n"
    )
    assert done.returncode == 1 and re.fullmatch(line, done.stderr), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"train", "export.yaml", "metrics.json", "grid.png"}
