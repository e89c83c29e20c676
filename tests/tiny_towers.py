"""Tiny vision towers of the package transformers with random weights: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SIDE, PATCH = 32, 8


def write_tower(kind: str, folder: Path, seed: int = 0, side: int = SIDE) -> Any:
    """Write a small model of random weights in transformers' layout, with a processor for images of this size."""
    transformers = pytest.importorskip("transformers")
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = text | {"image_size": SIDE, "patch_size": PATCH}
    torch.manual_seed(seed)
    if kind in ("CLIP", "Siglip"):
        config = getattr(transformers, f"{kind}Config")(text_config=text | {"vocab_size": 9}, vision_config=sizes)
    else:
        config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(folder)
    names = {"Siglip": "SiglipImageProcessor", "DINOv3ViT": "DINOv3ViTImageProcessor"}
    size = {"height": side, "width": side}
    given = {"size": size} if kind in names else {"crop_size": size}
    processor = getattr(transformers, names.get(kind, "CLIPImageProcessor"))
    processor(image_mean=[0.5] * 3, image_std=[0.25] * 3, **given).save_pretrained(folder)
    return model
