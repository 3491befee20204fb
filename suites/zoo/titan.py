"""torchtitan's models as its trainer builds them: without memory first, then filled by their own initialisation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from suites.zoo.draws import VOCAB, mean_square, tokens
from suites.zoo.shelf import Shelf

SHELF = Shelf("torchtitan", __name__)


def titan(package: str, arguments: str, model: str, moe: dict[str, Any] | None = None, **settings: Any) -> nn.Module:
    """``model`` of ``torchtitan.models.<package>`` with ``arguments``, which may hold those of its experts."""
    from importlib import import_module

    from pytest_fxbucket.cli.torchtitan.registry import stand_in_for_triton_kernels

    stand_in_for_triton_kernels()
    if moe is not None:
        settings["moe_args"] = import_module("torchtitan.models.moe").MoEArgs(**moe)
    where = import_module(f"torchtitan.models.{package}")
    given = getattr(where, arguments)(**settings)
    given.moe_impl = "standard"  # as its trainer sets it
    with torch.device("meta"):
        made = getattr(where, model)(given)
    made.to_empty(device="cpu")
    with torch.no_grad():
        made.init_weights(buffer_device=None)
        for parameter in made.parameters():
            if not parameter.any():  # as flux begins: nothing behind it would get a gradient
                nn.init.normal_(parameter, std=0.02)
    made.train()
    built: nn.Module = made
    return built


def next_tokens(generator: Generator) -> dict[str, Tensor]:
    return {"tokens": tokens(generator, 2, 16)}


def next_token_loss(output: Tensor, batch: Any) -> Tensor:
    """Cross entropy of each next token, in float32, as torchtitan's."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1).float(), batch["tokens"][:, 1:].flatten())


COMMON: dict[str, Any] = dict(dim=32, n_layers=2, n_heads=4, vocab_size=VOCAB, max_seq_len=32)
COUNTED = {"": r"moe\.router .*histogram_cpu.* eagerly neither"}
"""The router counts integers by a histogram, which eager torch has for GPUs alone."""
LOOP: dict[str, Any] = dict(num_experts=4, top_k=2, use_grouped_mm=False)


def add(package: str, arguments: str, model: str, refused: dict[str, str] | None = None, **settings: Any) -> None:
    """A model of tokens."""
    build = partial(titan, package, arguments, model, **COMMON, **settings)
    SHELF.add(package, build, next_tokens, next_token_loss, refused=refused or {})


add("llama3", "TransformerModelArgs", "Transformer", n_kv_heads=2, multiple_of=16)
add("qwen3", "Qwen3ModelArgs", "Qwen3Model", n_kv_heads=2, head_dim=8, hidden_dim=64)
add(
    "llama4",
    "TransformerModelArgs",
    "Transformer",
    COUNTED,
    moe=LOOP,
    n_kv_heads=2,
    multiple_of=16,
    interleave_moe_layer_step=1,
)
add(
    "deepseek_v3",
    "DeepSeekV3ModelArgs",
    "DeepSeekV3Model",
    COUNTED,
    moe=LOOP,
    inter_dim=64,
    moe_inter_dim=32,
    q_lora_rank=0,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    original_seq_len=32,
)


def noised(generator: Generator) -> dict[str, Tensor]:
    """Latents, text and times."""
    draw = partial(torch.randn, generator=generator)
    return {
        "img": draw(2, 8, 16),
        "img_ids": torch.zeros(2, 8, 3),
        "txt": draw(2, 6, 24),
        "txt_ids": torch.zeros(2, 6, 3),
        "timesteps": torch.rand(2, generator=generator),
        "y": draw(2, 20),
    }


SHELF.add(
    "flux",
    partial(
        titan,
        "flux",
        "FluxModelArgs",
        "FluxModel",
        in_channels=16,
        out_channels=16,
        vec_in_dim=20,
        context_in_dim=24,
        hidden_size=32,
        num_heads=2,
        depth=2,
        depth_single_blocks=2,
        axes_dim=(4, 6, 6),
    ),
    noised,
    mean_square,
)
