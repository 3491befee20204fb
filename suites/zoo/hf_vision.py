"""Models of transformers that see, and that see and read; tiny and random."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from suites.zoo.draws import VOCAB, labelled, labelled_pictures, tokens
from suites.zoo.hf_causal import MASKS, as_traced
from suites.zoo.hf_encoders import headed
from suites.zoo.shelf import Draw, Loss, Shelf

SHELF = Shelf("transformers", __name__)

VIT: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4, num_labels=2
)


def add(
    name: str,
    model: str,
    config: str,
    draw: Draw,
    loss: Loss | None = None,
    *,
    rest: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    SHELF.add(name, partial(headed, model, config, **settings), draw, loss, rounds=MASKS, as_traced=as_traced, **(rest or {}))


small = labelled_pictures(16)
add("vit", "ViTForImageClassification", "ViTConfig", small, **VIT)
add("deit", "DeiTForImageClassification", "DeiTConfig", small, **VIT)
add("beit", "BeitForImageClassification", "BeitConfig", small, **VIT)
add("dinov2", "Dinov2ForImageClassification", "Dinov2Config", small, drop_path_rate=0.1, **VIT)
add(
    "swin",
    "SwinForImageClassification",
    "SwinConfig",
    labelled_pictures(32),
    image_size=32,
    patch_size=2,
    embed_dim=8,
    depths=[2, 2],
    num_heads=[2, 4],
    window_size=4,
    num_labels=2,
)
add(
    "convnext",
    "ConvNextForImageClassification",
    "ConvNextConfig",
    labelled_pictures(32),
    hidden_sizes=[8, 16, 24, 32],
    depths=[1, 1, 2, 1],
    num_labels=2,
    image_size=32,
    drop_path_rate=0.1,
)
add(
    "resnet",
    "ResNetForImageClassification",
    "ResNetConfig",
    labelled_pictures(32),
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 2],
    num_labels=2,
    rest={"refused": {"bf16": "batch_norm.* eagerly too"}},
)


def segmented(generator: Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 3, (2, 32, 32), generator=generator),
    }


add(
    "segformer",
    "SegformerForSemanticSegmentation",
    "SegformerConfig",
    segmented,
    num_encoder_blocks=2,
    depths=[1, 1],
    sr_ratios=[2, 1],
    hidden_sizes=[16, 32],
    patch_sizes=[7, 3],
    strides=[4, 2],
    num_attention_heads=[1, 2],
    mlp_ratios=[2, 2],
    decoder_hidden_size=32,
    num_labels=3,
    rest={"refused": {"bf16": "batch_norm.* eagerly too"}},
)


def seen_and_read(generator: Generator) -> dict[str, Any]:
    """Pictures with a text each, and that the loss is wanted."""
    return {
        "input_ids": tokens(generator, 2, 12),
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "return_loss": True,
    }


TEXT = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
SIGHT = {key: value for key, value in VIT.items() if key != "num_labels"}
add("clip", "CLIPModel", "CLIPConfig", seen_and_read, text_config=TEXT, vision_config=SIGHT, projection_dim=16)
add(
    "siglip",
    "SiglipModel",
    "SiglipConfig",
    seen_and_read,
    text_config={**TEXT, "max_position_embeddings": 12},
    vision_config=SIGHT,
)
add(
    "gemma3",
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    labelled,
    **{**TEXT, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "use_cache": False},
)
