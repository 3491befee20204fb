"""Models of transformers, as they come: tied, masked, with outputs of classes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_fxbucket.pipeline import split_stages
from suites.pipeline.running import apart, eagerly, in_turn

transformers = pytest.importorskip("transformers")
VOCAB = 64


def tokens(length: int) -> Tensor:
    return torch.randint(1, VOCAB, (2, length))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="eager",  # sdpa builds a mask only where it is traced
    )
    return transformers.LlamaForCausalLM(config)


def translated() -> dict[str, Any]:
    mask = torch.arange(12).expand(2, 12) < torch.tensor([[12], [9]])
    return {"labels": tokens(8), "input_ids": tokens(12), "attention_mask": mask.long()}


def continued() -> dict[str, Any]:
    ids = tokens(10)
    return {"input_ids": ids, "labels": ids.clone(), "output_hidden_states": True}


@pytest.mark.parametrize(
    ("build", "batch", "cuts", "ties"),
    [
        (t5, translated, ["encoder.block.1", "encoder", "decoder.block.1"], {"shared.weight": (0, 2, 3)}),
        (llama, continued, ["model.layers.0", "model.layers.1.mlp"], {"model.embed_tokens.weight": (0, 2)}),
    ],
    ids=["t5 in 4", "llama in 3"],
)
def test_stages_of_transformers(
    build: Callable[[], nn.Module], batch: Callable[[], Any], cuts: list[str], ties: dict[str, tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    model, inputs = build().train(), batch()
    stages = split_stages(model, cuts, inputs)
    eager = eagerly(model, inputs)
    assert in_turn(stages, model, inputs) == eager
    assert apart(stages, model, inputs) == eager
    assert {tie.fqn: tie.stages for tie in stages.ties} == ties
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())


def test_a_model_that_hooks_itself_in_its_first_call_is_left_without_hooks() -> None:
    model, inputs = llama(), continued()
    split_stages(model, ["model.layers.0"], inputs)
    assert not any(module._forward_hooks for module in model.modules())
    assert len(model(**inputs).hidden_states) == 4
