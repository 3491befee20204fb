"""The small size of a configuration: few layers, experts and tokens, and all widths divided by one number.

Since one number divides all, what must be equal, a sum or a multiple of each other in the model still is: of a vision tower and
the text that reads it, too. It is a power of two, the product of what divides heads and what divides a head's own size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Values = Mapping[str, Any]
"""What ``config.to_dict()`` gives; configurations of parts, as ``vision_config``, are in it."""

_HEADS = re.compile(r"(^|_)(num_heads|n_heads?|attention_heads|key_value_heads|kv_heads|key_heads|value_heads)$")
_PER_HEAD = re.compile(r"(head_dim|^d_kv|rotary_dim|mrope_section|query_pre_attn_scalar)$")
_WIDTH = re.compile(
    r"(hidden_size|hidden_sizes|hidden_dim|intermediate_size|embedding_size|d_model|d_ff|ffn_dim|n_embd|n_inner|lru_width"
    r"|codevector_dim|projection_dim|projector_dim|proj_dim|proj_size|embed_dim|conv_dim|_rank|dim_ff|mlp_dim|ffn_hidden_size"
    r"|^dim|neck_hidden_sizes|tdnn_dim|mlp_hidden_dim|projection_size)$"
)
_MODEL_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_sizes")
_INNER = re.compile(r"(intermediate_size|d_ff|ffn_dim|n_inner|ffn_hidden_size|mlp_dim)$")
"""Inner widths, which nothing else in the model has to equal."""
_DEPTH = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(encoder|decoder)_layers|depths?|num_conv_layers)$")
_EXPERTS = re.compile(r"^(num_local_experts|num_experts|n_routed_experts|moe_num_experts)$")
_ROUTED_TO = re.compile(r"^(num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts)$")
_WINDOW = re.compile(r"(sliding_window|attention_window_size|window_size|local_attention|chunk_size)$")
_STATE = re.compile(r"(state_size|d_state)$")
_ROTARY_PART = ("partial_rotary_factor", "rotary_pct")
_LEAST_HEAD, _LEAST_WIDTH = 8, 16
_MULTIPLE = 8
"""Widths are multiples of it: grouped products take rows of a multiple of 16 bytes."""
LAYERS, IMAGE_PATCHES, WINDOW, FRAMES = 2, 4, 8, 32


def small_sizes(values: Values) -> Iterator[dict[str, Any]]:
    """Changes of ``values`` that make it small, the smallest first: a model may refuse what its configuration allows.

    The next change leaves widths as they are, the one after that all but the number of layers, and the last everything.
    """
    # One factor for all parts, so that a vision tower still fits the text that reads it: the largest that every part allows.
    parts = list(_parts(values))
    factor = next(f for f in (64, 32, 16, 8, 4, 2, 1) if all(_split(part, f) for part in parts))
    tokens = few_tokens(values)
    tried: list[dict[str, Any]] = []
    for width, rest in ((factor, True), (1, True), (1, False)):
        changes = _changed(values, width, tokens, rest)
        if changes not in tried:
            tried.append(changes)
    yield from (*tried, *([] if {} in tried else [{}]))


def merged(values: Values, changes: Values) -> dict[str, Any]:
    """``values`` with ``changes`` in it, table by table."""
    inner = {key: merged(values.get(key) or {}, one) if isinstance(one, Mapping) else one for key, one in changes.items()}
    return {**values, **inner}


def _parts(values: Values) -> Iterator[Values]:
    """The configuration itself and the configurations of its parts."""
    yield values
    for value in values.values():
        if isinstance(value, Mapping) and "model_type" in value:
            yield from _parts(value)


def _changed(values: Values, factor: int, tokens: Mapping[int, int], rest: bool) -> dict[str, Any]:
    """Changes of ``values``; a table that is no configuration of a part is split as the configuration that it is in."""
    split = _split(values, factor) or _Split(1, 1)
    changes = _layers(values)
    if rest:
        changes |= {key: one for key, value in _numbers(values) if (one := _fewer(key, value)) != value} | _images(values)
    for key, value in values.items():
        if isinstance(value, Mapping):
            is_part = "model_type" in value
            inner = _changed(value, factor, tokens, rest) if is_part else _narrow_table(value, split)
            if inner:
                changes[key] = inner
        elif rest and _is_token(key) and (token := _token(value, tokens)) != value:
            changes[key] = token
        elif (narrow := split.narrow(key, value)) != value:
            changes[key] = narrow
    if rest and (values.get("vocab_size") or 0) > FEW:
        changes["vocab_size"] = FEW
    return changes


def _numbers(values: Values) -> Iterator[tuple[str, int]]:
    return ((key, value) for key, value in values.items() if isinstance(value, int) and not isinstance(value, bool))


def _is_token(key: str) -> bool:
    return key.endswith(("token_id", "token_index"))


def _token(value: Any, tokens: Mapping[int, int]) -> Any:
    return [_token(one, tokens) for one in value] if isinstance(value, list) else tokens.get(value, value)


# Widths.


@dataclass(frozen=True)
class _Split:
    """What divides the number of heads, and what the size of each."""

    heads: int
    of_each: int

    def narrow(self, key: str, value: Any) -> Any:
        """``value`` divided, if ``key`` is of a width, of heads or of the size of one; anything else as it is."""
        divisor = self.heads * self.of_each
        if _HEADS.search(key):
            divisor = self.heads
        elif _PER_HEAD.search(key):
            divisor = self.of_each
        elif not _WIDTH.search(key):
            return value
        return _divided(value, divisor, _MULTIPLE if _INNER.search(key) and divisor > 1 else 1)


def _divided(value: Any, divisor: int, multiple: int) -> Any:
    """``value``, or each item of a list, divided and rounded up to a multiple."""
    if isinstance(value, list):
        return [_divided(one, divisor, multiple) for one in value]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return -(-value // (divisor * multiple)) * multiple if is_number and value > 1 else value


def _narrow_table(table: Values, split: _Split) -> dict[str, Any]:
    """Changes in a table such as ``rope_parameters``; what is listed by half a head's elements is cut."""
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            if inner := _narrow_table(value, split):
                changes[key] = inner
            continue
        is_by_element = key in ("long_factor", "short_factor")
        narrow = value[: len(value) // split.of_each] if is_by_element else split.narrow(key, value)
        if narrow != value:
            changes[key] = narrow
    return changes


def _split(values: Values, factor: int) -> _Split | None:
    """``factor`` as a product that the heads and widths of ``values`` can be divided by; None: it cannot.

    Most of it divides the size of a head, so that there are still heads of one kind that share those of another.
    """
    heads = [one for key, value in values.items() if _HEADS.search(key) for one in _listed(value) if one > 1]
    widths = [one for key in _MODEL_WIDTHS for one in _listed(values.get(key))]
    sizes = [one for key, value in values.items() if key.endswith(("head_dim", "d_kv")) for one in _listed(value)]
    if not sizes and heads and widths:  # no key has it: the size of a head is the width over the number of heads
        first = next(value for key, value in values.items() if _HEADS.search(key))
        sizes = [width // _listed(first)[0] for key in _MODEL_WIDTHS for width in _listed(values.get(key))[:1]]
    sections = [one for table in values.values() if isinstance(table, Mapping) for one in _listed(table.get("mrope_section"))]
    if factor > 1 and any(width % (factor * _MULTIPLE) or width // factor < _LEAST_WIDTH for width in widths):
        return None
    # wav2vec 2.0 embeds positions by a convolution in so many groups, which must divide the width.
    groups = values.get("num_conv_pos_embedding_groups") or 1
    if any(width // factor % groups for width in widths):
        return None
    # Of the factor as much as possible goes into the size of a head, the rest into the number of heads, which stays at least 2.
    for of_each in (one for one in (64, 32, 16, 8, 4, 2, 1) if factor % one == 0):
        by = factor // of_each
        fits = all(_head_fits(size, of_each, values) for size in sizes) and not any(one % of_each for one in sections)
        if fits and all(head % by == 0 and head // by >= 2 for head in heads):
            return _Split(by, of_each)
    return None


def _head_fits(size: int, divisor: int, values: Values) -> bool:
    """Whether a head of ``size`` elements may be divided by ``divisor``: rotary embeddings need an even number of them."""
    if divisor == 1:
        return True
    small, tables = size // divisor, [values, *(one for one in values.values() if isinstance(one, Mapping))]
    parts = [table[key] for table in tables for key in _ROTARY_PART if table.get(key)]
    rotates = all(int(small * part) % 2 == 0 and int(small * part) >= 2 for part in parts)
    return size % divisor == 0 and small % 4 == 0 and small >= _LEAST_HEAD and rotates


def _listed(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [one for one in found if isinstance(one, int) and not isinstance(one, bool)]


# Token ids: few of them, the special ones among them; and a range without special ones.


FEW = 256
"""The small vocabulary."""


def special(values: Mapping[str, Any]) -> Iterator[int]:
    """Ids of special tokens, such as padding, begin and image, also of the configurations of parts."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from special(value)
        elif _is_token(key):
            found = value if isinstance(value, list) else [value]
            yield from (one for one in found if isinstance(one, int) and one >= 0)


def few_tokens(values: Mapping[str, Any]) -> dict[int, int]:
    """A new id for each special one outside the small vocabulary: the last ids in it that have no meaning yet."""
    known = set(special(values))
    free = (number for number in reversed(range(FEW)) if number not in known)
    return {one: next(free) for one in sorted(known, reverse=True) if one >= FEW}


def plain_range(values: Mapping[str, Any], vocab: int) -> tuple[int, int]:
    """The longest range [low, high) of ids below ``vocab`` that has no special one in it."""
    # -1 and ``vocab`` stand for special ids just outside, so that each range lies between two of them.
    ends = [-1, *sorted({one for one in special(values) if one < vocab}), vocab]
    _, low, high = max((high - low, low + 1, high) for low, high in pairwise(ends))
    return low, high


# All else.


def _layers(values: Values) -> dict[str, Any]:
    """Changes to few layers, at least one of each kind, with the lists that have an item for each layer."""
    # Layers are of one kind if they have equal items in all of these lists. The first of each kind is kept, and then more
    # layers up to LAYERS, each with its own items.
    depth = values.get("num_hidden_layers", values.get("num_layers"))
    depth = depth if isinstance(depth, int) else None  # LXMERT has one for each of its parts
    each = {key: value for key, value in values.items() if isinstance(value, list) and depth and len(value) == depth > 3}
    each = {key: value for key, value in each.items() if not _DEPTH.match(key) and not isinstance(value[0], list | dict)}
    kinds = list(zip(*each.values(), strict=True)) if each else []
    kept = sorted(kinds.index(kind) for kind in dict.fromkeys(kinds))
    kept += [number for number in range(depth or 0) if number not in kept][: max(0, LAYERS - len(kept))]
    changes: dict[str, Any] = {key: [value[number] for number in kept] for key, value in each.items()}
    for key, value in values.items():
        if _DEPTH.match(key) and isinstance(value, list):
            few: Any = [min(one, LAYERS) for one in value]
        elif _DEPTH.match(key) and isinstance(value, int) and not _is_of_lists(key, values):
            # Only the depth that those lists are of needs a layer of each kind; another part of the model has its own.
            few = min(value, max(len(kept), LAYERS) if each and value == depth else LAYERS)
        elif key.endswith(("_period", "_every_n_layers")) and isinstance(value, int):
            # With a period of 2 and an offset below it, both kinds of layers are among the few.
            few = min(value, LAYERS)
        elif key.endswith("_layer_offset") or key == "first_k_dense_replace":
            few = min(value, 1)
        elif key == "attention_types":  # GPT-Neo's: kinds and how often
            few = [[value[0][0], 1]]
        else:
            continue
        if few != value:
            changes[key] = few
    if "out_features" in values and (last := _listed(changes.get("num_hidden_layers"))):  # of a backbone: its last stage
        changes |= {"out_features": [f"stage{last[0]}"], "out_indices": last}
    return changes


def _is_of_lists(key: str, values: Values) -> bool:
    """Whether a number of layers is the length of ``depths`` and others."""
    return isinstance(values.get("depths"), list) and not isinstance(values[key], list)


def _fewer(key: str, value: int) -> int:
    """``value``, smaller where ``key`` is of something whose number depends on nothing else."""
    # At most 8 experts in 2 groups: one group is chosen, and from its 4 experts the 2 of a token.
    if _EXPERTS.match(key):
        return min(value, 8)
    if _ROUTED_TO.match(key) or key == "n_group":
        return min(value, 2)
    if key == "topk_group":
        return min(value, 1)
    if key == "max_source_positions":
        return min(value, FRAMES)
    if _WINDOW.search(key) and not key.startswith("window_size"):
        return min(value, WINDOW)
    return min(value, 16) if _STATE.search(key) else value


def _images(values: Values) -> dict[str, Any]:
    """Changes to images of few patches; not in models with ``depths``, whose stages halve the image again and again."""
    image, patch = values.get("image_size"), values.get("patch_size")
    few = IMAGE_PATCHES * patch if isinstance(patch, int) else 0
    small = few and isinstance(image, int) and image > few and "depths" not in values
    changes = {"image_size": few} if small else {}
    return changes | ({"mm_tokens_per_image": IMAGE_PATCHES} if values.get("mm_tokens_per_image", 0) > IMAGE_PATCHES else {})
