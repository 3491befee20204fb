"""Encoders and encoder-decoders of transformers, tiny and random: text, sound, and what sees."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from suites.zoo.draws import VOCAB, classified, labelled, labelled_pictures, tokens
from suites.zoo.hf_causal import MASKS, SMALL, as_traced, headed
from suites.zoo.shelf import Draw, Shelf

SHELF = Shelf("transformers", __name__)


def add(name: str, model: str, config: str, draw: Draw, *, rest: dict[str, Any] | None = None, **settings: Any) -> None:
    SHELF.add(name, partial(headed, model, config, **settings), draw, rounds=MASKS, as_traced=as_traced, **(rest or {}))


add("bert", "BertForMaskedLM", "BertConfig", labelled, **SMALL)
add("roberta", "RobertaForMaskedLM", "RobertaConfig", labelled, **SMALL)
add("electra", "ElectraForSequenceClassification", "ElectraConfig", classified, embedding_size=16, **SMALL)
add(
    "distilbert",
    "DistilBertForSequenceClassification",
    "DistilBertConfig",
    classified,
    vocab_size=VOCAB,
    dim=32,
    hidden_dim=64,
    n_layers=2,
    n_heads=4,
    max_position_embeddings=64,
)
add(
    "deberta_v2",
    "DebertaV2ForMaskedLM",
    "DebertaV2Config",
    labelled,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    position_buckets=8,
    **SMALL,
)
add("albert", "AlbertForMaskedLM", "AlbertConfig", labelled, embedding_size=16, **SMALL)
add("mpnet", "MPNetForMaskedLM", "MPNetConfig", labelled, **SMALL)
add(
    "modernbert",
    "ModernBertForMaskedLM",
    "ModernBertConfig",
    labelled,
    cls_token_id=1,
    sep_token_id=2,
    bos_token_id=1,
    eos_token_id=2,
    global_attn_every_n_layers=2,
    local_attention=8,
    **SMALL,
)


def translated(generator: Generator) -> dict[str, Tensor]:
    """input_ids (2, 12) and labels (2, 8)."""
    return {"input_ids": tokens(generator, 2, 12), "labels": tokens(generator, 2, 8)}


add(
    "t5",
    "T5ForConditionalGeneration",
    "T5Config",
    translated,
    vocab_size=VOCAB,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
BART = dict(
    vocab_size=VOCAB,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
)
add("bart", "BartForConditionalGeneration", "BartConfig", translated, **BART)
add("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", translated, **BART)


def heard(generator: Generator) -> dict[str, Tensor]:
    """input_features (2, 16, 40) and labels (2, 8)."""
    return {"input_features": torch.randn(2, 16, 40, generator=generator), "labels": tokens(generator, 2, 8)}


add(
    "whisper",
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    heard,
    num_mel_bins=16,
    max_source_positions=20,
    max_target_positions=16,
    **{key: value for key, value in BART.items() if key != "max_position_embeddings"},
)


def waves(generator: Generator) -> dict[str, Tensor]:
    """input_values (2, 400) and a class each."""
    return {"input_values": torch.randn(2, 400, generator=generator), "labels": torch.randint(0, 2, (2,), generator=generator)}


add(
    "wav2vec2",
    "Wav2Vec2ForSequenceClassification",
    "Wav2Vec2Config",
    waves,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    conv_dim=[16, 16],
    conv_stride=[4, 2],
    conv_kernel=[8, 4],
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2,
    mask_time_prob=0.0,
    classifier_proj_size=16,
    rest={"refused": {"": r"wav2vec2\.encoder .*value of a tensor"}},
)


VIT: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4, num_labels=2
)


small = labelled_pictures(16)
NORMED = {"refused": {"bf16": "batch_norm.* eagerly too"}}
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
    rest=NORMED,
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
    rest=NORMED,
)


def seen_and_read(generator: Generator) -> dict[str, Any]:
    """Pictures with a text each, and that the loss is wanted."""
    return {
        "input_ids": tokens(generator, 2, 12),
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "return_loss": True,
    }


TEXT = {**SMALL, "bos_token_id": 1, "eos_token_id": 2}
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
