"""diffusers' models, tiny and random."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from suites.zoo.draws import mean_square
from suites.zoo.shelf import Draw, Shelf

SHELF = Shelf("diffusers", __name__)


def diffusers(name: str, **settings: Any) -> nn.Module:
    """A class of diffusers."""
    import diffusers

    made: nn.Module = getattr(diffusers, name)(**settings)
    return made.train()


def add(short: str, name: str, draw: Draw, may_be_idle: Sequence[str] = (), **settings: Any) -> None:
    tables = {"model": {"may_be_idle": list(may_be_idle)}} if may_be_idle else {}
    SHELF.add(short, partial(diffusers, name, **settings), draw, mean_square, tables=tables)


def times(generator: Generator) -> Tensor:
    return torch.randint(0, 1000, (2,), generator=generator)


def noisy(generator: Generator) -> dict[str, Any]:
    return {"sample": torch.randn(2, 3, 16, 16, generator=generator), "timestep": times(generator)}


def prompted(generator: Generator) -> dict[str, Any]:
    return {
        "sample": torch.randn(2, 4, 8, 8, generator=generator),
        "timestep": times(generator),
        "encoder_hidden_states": torch.randn(2, 5, 12, generator=generator),
    }


def classed(generator: Generator) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=generator),
        "timestep": times(generator),
        "class_labels": torch.randint(0, 4, (2,), generator=generator),
    }


add(
    "unet_2d",
    "UNet2DModel",
    noisy,
    sample_size=16,
    block_out_channels=(8, 16),
    layers_per_block=1,
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
)
add(
    "unet_2d_condition",
    "UNet2DConditionModel",
    prompted,
    sample_size=8,
    block_out_channels=(8, 16),
    layers_per_block=1,
    norm_num_groups=4,
    cross_attention_dim=12,
    attention_head_dim=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
)
add(
    "dit",
    "DiTTransformer2DModel",
    classed,
    sample_size=8,
    num_layers=2,
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    patch_size=2,
    num_embeds_ada_norm=4,
    norm_num_groups=4,
)
add(
    "autoencoder",
    "AutoencoderKL",
    lambda g: {"sample": torch.randn(2, 3, 16, 16, generator=g)},
    block_out_channels=(8, 16),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4,
    norm_num_groups=4,
)


def joint(generator: Generator) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 12, generator=generator),
        "pooled_projections": torch.randn(2, 10, generator=generator),
        "timestep": times(generator),
    }


add(
    "sd3",
    "SD3Transformer2DModel",
    joint,
    sample_size=8,
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=2,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=12,
    caption_projection_dim=16,
    pooled_projection_dim=10,
    pos_embed_max_size=8,
    may_be_idle=["transformer_blocks.1.attn.add_q_proj"],  # the last block drops what it asks text for
)


def latents(generator: Generator) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator)
    return {
        "hidden_states": draw(2, 16, 16),
        "encoder_hidden_states": draw(2, 5, 12),
        "pooled_projections": draw(2, 10),
        "timestep": torch.rand(2, generator=generator),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


add(
    "flux",
    "FluxTransformer2DModel",
    latents,
    patch_size=1,
    in_channels=16,
    num_layers=1,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=12,
    pooled_projection_dim=10,
    axes_dims_rope=(4, 4, 8),
)
