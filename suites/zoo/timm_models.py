"""timm's models, tiny and random."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from suites.zoo.draws import mean_square, pictures
from suites.zoo.shelf import Shelf

SHELF = Shelf("timm", __name__)


def timm(name: str, **settings: Any) -> nn.Module:
    """``timm.create_model`` without weights."""
    from timm import create_model

    made: nn.Module = create_model(name, pretrained=False, num_classes=4, **settings)
    return made


def add(short: str, name: str, size: int, rest: dict[str, Any] | None = None, **settings: Any) -> None:
    SHELF.add(short, partial(timm, name, **settings), pictures(size), mean_square, **(rest or {}))


MEETS_FLOAT = {"refused": {"bf16": "attn .*eagerly,? too"}}
"""A table in float32 meets weights in bfloat16."""
NORMED = {"refused": {"bf16": "batch_norm.* eagerly too"}}


add("vit", "vit_tiny_patch16_224", 16, img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, drop_path_rate=0.1)
add("deit3", "deit3_small_patch16_224", 16, img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2)
add("eva02", "eva02_tiny_patch14_224", 16, MEETS_FLOAT, img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2)
add(
    "swin",
    "swin_tiny_patch4_window7_224",
    32,
    MEETS_FLOAT,
    img_size=32,
    window_size=4,
    embed_dim=8,
    depths=(2, 2),
    num_heads=(2, 2),
)
add("convnext", "convnext_tiny", 64, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), drop_path_rate=0.1)
add("convnextv2", "convnextv2_atto", 64, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
add("resnet", "resnet18", 32, NORMED, channels=(8, 8, 16, 16))
add("mobilenetv3", "mobilenetv3_small_050", 32, NORMED)
add("beit", "beit_base_patch16_224", 16, MEETS_FLOAT, img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2)
add("mobilevit", "mobilevit_xxs", 64, NORMED)
