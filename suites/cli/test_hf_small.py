"""``fxbucket init --hf``: the small size keeps what a model needs of its configuration, whatever its fields are called."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_fxbucket.cli.hugging_face.small import merged, plain_range, small_sizes

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128009],
    "pad_token_id": None,
}


def small(values: dict[str, Any]) -> dict[str, Any]:
    return merged(values, next(small_sizes(values)))


def test_heads_still_part_the_width_and_groups_still_share_keys() -> None:
    made = small(LLAMA)
    assert (made["num_hidden_layers"], made["hidden_size"], made["intermediate_size"]) == (2, 64, 224)
    assert (made["num_attention_heads"], made["num_key_value_heads"], made["head_dim"]) == (8, 2, 8)


def test_few_shared_heads_stay_several_and_are_not_merged_into_one() -> None:
    made = small({"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2})
    assert (made["hidden_size"], made["num_attention_heads"], made["num_key_value_heads"]) == (112, 14, 2)


def test_special_tokens_are_still_tokens_and_still_apart() -> None:
    made = small(LLAMA)
    ids = [made["bos_token_id"], *made["eos_token_id"]]
    assert made["vocab_size"] == 256
    assert len(set(ids)) == 3
    assert all(0 <= one < 256 for one in ids)
    assert made["pad_token_id"] is None
    assert plain_range(made, 256) == (0, min(ids))


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"layer_types": ["slide"] * 5 + ["full"] + ["slide"] * 5 + ["full"]}, {"layer_types": ["slide", "full"]}),
        (
            {"layer_types": ["a"] * 12, "mlp": ["dense"] * 3 + ["sparse"] * 9},
            {"layer_types": ["a", "a"], "mlp": ["dense", "sparse"]},
        ),
        ({"first_k_dense_replace": 3, "attn_layer_period": 8}, {"first_k_dense_replace": 1, "attn_layer_period": 2}),
        (
            {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
            {"n_routed_experts": 8, "topk_group": 1},
        ),
    ],
)
def test_there_is_a_layer_of_each_kind(values: dict[str, Any], kept: dict[str, Any]) -> None:
    made = small({"num_hidden_layers": 12, **values})
    assert made["num_hidden_layers"] == 2
    assert {key: made[key] for key in kept} == kept


def test_depths_of_several_parts_are_left_to_their_own_keys() -> None:
    """As LXMERT has them, whose number of layers is a table."""
    assert small({"num_hidden_layers": {"vision": 5, "language": 9}, "l_layers": 9})["num_hidden_layers"]


def test_all_parts_are_divided_by_one_number_so_what_must_be_equal_stays_so() -> None:
    """A vision tower with heads of 80 elements, which can be divided by 4 alone: its output is the text's width."""
    text = {**LLAMA, "model_type": "text", "rope_parameters": {"mrope_section": [16, 24, 24]}}
    vision = {"model_type": "vision", "depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 4096, "patch_size": 14}
    made = small({"model_type": "both", "text_config": text, "vision_config": vision})
    seen, read = made["vision_config"], made["text_config"]
    assert seen["hidden_size"] == read["hidden_size"] == 4096 // (1280 // seen["embed_dim"])
    assert seen["embed_dim"] % seen["num_heads"] == 0
    assert (seen["embed_dim"] // seen["num_heads"]) % 4 == 0
    assert 2 * sum(read["rope_parameters"]["mrope_section"]) == read["head_dim"]
    assert (seen["depth"], read["num_hidden_layers"]) == (2, 2)


def test_a_part_of_a_head_that_rotates_is_still_pairs() -> None:
    """Heads of 96 elements, a quarter of which rotate: by 8 they would be of 12, and 3 of those."""
    made = small({"hidden_size": 6144, "num_attention_heads": 64, "rotary_pct": 0.25})
    assert made["hidden_size"] // made["num_attention_heads"] == 24


def test_stages_keep_their_doubling() -> None:
    made = small(
        {
            "embed_dim": 96,
            "depths": [2, 2, 18, 2],
            "num_heads": [3, 6, 12, 24],
            "num_layers": 4,
            "image_size": 224,
            "patch_size": 4,
        }
    )
    assert made["depths"] == [2, 2, 2, 2]
    assert (made["num_layers"], made["image_size"], made["embed_dim"]) == (4, 224, 24)
    assert all(made["embed_dim"] * 2**stage % heads == 0 for stage, heads in enumerate(made["num_heads"]))


def test_a_model_that_refuses_narrow_layers_gets_wide_ones_and_fewer_at_last_only() -> None:
    first, second, third, last = small_sizes(LLAMA)
    assert first["hidden_size"] == 64
    assert "hidden_size" not in second
    assert (second["vocab_size"], third, last) == (256, {"num_hidden_layers": 2}, {})
