"""Decoders of transformers, tiny and random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from suites.zoo.draws import VOCAB, labelled
from suites.zoo.shelf import Shelf

SHELF = Shelf("transformers", __name__)

SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
)
COMMON: dict[str, Any] = dict(**SMALL, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, use_cache=False)


def headed(model: str, config: str, **settings: Any) -> nn.Module:
    """The class ``model`` with a ``config`` of ``settings``."""
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return made


def causal(family: str, **settings: Any) -> nn.Module:
    """``<family>ForCausalLM`` of ``<family>Config``."""
    return headed(HEADS.get(family, f"{family}ForCausalLM"), f"{family}Config", **settings)


@contextmanager
def as_traced() -> Iterator[None]:
    """Attention masks are built though none is needed, and grouped heads repeated, as transformers does with fake tensors."""
    from transformers import masking_utils

    plain = masking_utils.is_tracing
    masking_utils.is_tracing = lambda *_: True
    try:
        yield
    finally:
        masking_utils.is_tracing = plain


MASKS = "transformers builds causal masks and repeats grouped heads when it is traced"


def add(name: str, family: str, *, plain: bool = False, rest: dict[str, Any] | None = None, **settings: Any) -> None:
    """A decoder with the common settings, or ``plain`` with its own alone."""
    given = settings if plain else {**COMMON, **settings}
    SHELF.add(name, partial(causal, family, **given), labelled, rounds=MASKS, as_traced=as_traced, **(rest or {}))


HEADS = {"GPT2": "GPT2LMHeadModel"}
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SHORT = dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
STATES = dict(plain=True, vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, use_cache=False)
FEW = dict(num_experts_per_tok=2, first_k_dense_replace=1, moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1)

add("llama", "Llama")
add("gpt2", "GPT2", plain=True, **SHORT)
add("gpt_neox", "GPTNeoX")
add(
    "gpt_neo",
    "GPTNeo",
    plain=True,
    vocab_size=VOCAB,
    max_position_embeddings=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    attention_types=[[["global", "local"], 1]],
    window_size=8,
    bos_token_id=1,
    eos_token_id=2,
)
add("gptj", "GPTJ", plain=True, rotary_dim=4, **SHORT)
add("codegen", "CodeGen", plain=True, rotary_dim=4, **SHORT)
add("opt", "OPT", ffn_dim=64, word_embed_proj_dim=32)
add("bloom", "Bloom", plain=True, vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
add("falcon", "Falcon", new_decoder_architecture=True, num_kv_heads=2)
add("mistral", "Mistral", sliding_window=8)
add("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2)
add("qwen2", "Qwen2")
add("qwen3", "Qwen3", head_dim=8)
add("qwen2_moe", "Qwen2Moe", shared_expert_intermediate_size=32, **MOE)
add("qwen3_moe", "Qwen3Moe", head_dim=8, **MOE)
add(
    "qwen3_next",
    "Qwen3Next",
    head_dim=8,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    shared_expert_intermediate_size=32,
    layer_types=["linear_attention", "full_attention"],
    **MOE,
)
add("gemma2", "Gemma2", head_dim=8, sliding_window=8)
add("phi", "Phi")
add("phi3", "Phi3")
add("olmo2", "Olmo2")
add("stablelm", "StableLm")
add("starcoder2", "Starcoder2")
add("cohere", "Cohere")
add("cohere2", "Cohere2", sliding_window=8)
add("granite", "Granite")
add("nemotron", "Nemotron")
add("glm4", "Glm4", head_dim=8)
add("smollm3", "SmolLM3")
add(
    "deepseek_v3",
    "DeepseekV3",
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_group=2,
    topk_group=1,
    **FEW,
)
add("glm4_moe", "Glm4Moe", head_dim=8, n_group=1, topk_group=1, **FEW)
add("gpt_oss", "GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
add("granitemoe", "GraniteMoe", num_local_experts=4, num_experts_per_tok=2)
add("mamba", "Mamba", state_size=8, **STATES)
add("mamba2", "Mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4, **STATES)
add(
    "jamba",
    "Jamba",
    num_experts=4,
    num_experts_per_tok=2,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    mamba_d_state=8,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_dt_rank=4,
    use_mamba_kernels=False,
)
add("rwkv", "Rwkv", context_length=64, **STATES)
add(
    "recurrent_gemma",
    "RecurrentGemma",
    head_dim=8,
    lru_width=32,
    attention_window_size=8,
    block_types=["recurrent", "attention"],
)
