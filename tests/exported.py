"""Exported folders, loaded in a process that cannot import the package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LOAD = """
import json, sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "image_diffusion":
            raise ImportError("image_diffusion is not here")

sys.meta_path.insert(0, Blocked())
try:
    import image_diffusion
except ImportError:
    pass
else:
    raise SystemExit("not blocked")
import numpy as np, torch
from diffusers import DiffusionPipeline

KINDS = dict.fromkeys(("image", "image_embeds", "text_embed"), torch.tensor)
KINDS["images"] = lambda each: np.array(each, np.uint8)
for folder, call, out in json.load(open(sys.argv[1])):
    pipeline = DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)
    pipeline.to("cpu")
    assert pipeline.device.type == "cpu"
    given = {name: KINDS[name](each) if name in KINDS else each for name, each in call.items()}
    made = pipeline(**given)
    np.save(out, np.asarray(made.images if hasattr(made, "images") else made))
assert not [name for name in sys.modules if name.split(".")[0] == "image_diffusion"]
"""


def load(calls: list[Any], root: Path) -> None:
    """Call pipelines in one process. calls: [folder, arguments, .npy to write]. root: folder for its files."""
    (root / "calls.json").write_text(json.dumps(calls))
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": str(root / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(root / "calls.json")], capture_output=True, text=True, check=False,
        env=environment, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "might require the following packages" not in done.stderr
