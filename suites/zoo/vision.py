"""torchvision's models and timm's, tiny and random."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from suites.zoo.draws import mean_square, pictures
from suites.zoo.shelf import Shelf

SHELF = Shelf("torchvision", __name__)


def torchvision(name: str, **settings: Any) -> nn.Module:
    """``torchvision.models.<name>`` without weights."""
    import torchvision

    made: nn.Module = getattr(torchvision.models, name)(weights=None, **settings)
    return made


NORMED = {"bf16": "batch_norm.* eagerly too"}
"""Statistics of batch norms stay in float32: with weights in bfloat16 torch's eager CPU kernel refuses them too."""


def add(name: str, size: int, **settings: Any) -> None:
    """A model with batch norms."""
    SHELF.add(name, partial(torchvision, name, **settings), pictures(size), mean_square, refused=NORMED)


add("resnet18", 32, num_classes=4)
add("mobilenet_v3_small", 32, num_classes=4)
SHELF.add("densenet", lambda: _densenet(), pictures(32), mean_square, refused=NORMED)
add("efficientnet_b0", 64, num_classes=4)
add("shufflenet_v2_x0_5", 64, num_classes=4)
SHELF.add(
    "swin_v2_t",
    partial(torchvision, "swin_v2_t", num_classes=4),
    pictures(64),
    mean_square,
    refused={"bf16": "features.1.0.attn .* torch refuses eagerly, too"},
)
SHELF.add("vit", lambda: _vit(), pictures(16), mean_square)
SHELF.add("convnext", lambda: _convnext(), pictures(32), mean_square)


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    made: nn.Module = VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=4
    )
    nn.init.normal_(made.heads.head.weight)
    return made


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    made: nn.Module = DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=4)
    return made


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    made: nn.Module = ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)], stochastic_depth_prob=0.1, num_classes=4)
    return made
