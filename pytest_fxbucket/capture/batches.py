"""The batch that a step is traced with; one graph serves every rank and step, so others may differ in values alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.capture.blame import blamed
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    from pytest_fxbucket.capture.mesh import Mesh


def first_batch(batch: Callable[[int, int], Any], name: str, mesh: Mesh, rank: int) -> Any:
    """What ``batch``, called ``name``, gives ``rank`` in step 0: a tuple or dict of inputs.

    Raises :class:`CaptureError` for anything else, and if the last batch's shapes, dtypes or constants are others.
    """
    here, last = mesh.data_rank(rank), mesh.data_ranks - 1
    with blamed(lambda: f"[model] batch {name}"):
        data, other = batch(here, 0), batch(last, 1)
    if not isinstance(data, (tuple, list, dict)):
        raise CaptureError(
            f"[model] batch {name} gave a value of type {type(data).__name__}, expected a tuple or a dict of inputs"
        )
    _refuse_other_batch(name, data, other, f"rank {here}, step 0", f"rank {last}, step 1")
    return data


def _refuse_other_batch(name: str, first: Any, other: Any, here: str, there: str) -> None:
    """One graph serves every rank and step, so only the values of tensors may change from batch to batch."""
    if (a := _described(first)) != (b := _described(other)):
        changed = next((x, y) for x, y in zip_longest(a, b) if x != y)
        was, became = (" ".join(map(str, leaf)) if leaf else "nothing" for leaf in changed)
        raise CaptureError(
            f"[model] batch {name} gave {was} for {here}, but {became} for {there}; "
            "only the values of its tensors may change, since one graph serves all"
        )


def _described(batch: Any) -> list[tuple[object, ...]]:
    """Path of each leaf of ``batch``, with shape and dtype of a tensor, or the value of a plain constant."""
    found: list[tuple[object, ...]] = []
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            found.append((pytree.keystr(path), tuple(leaf.shape), leaf.dtype))
        else:
            found.append((pytree.keystr(path), repr(leaf) if isinstance(leaf, (bool, int, float, str)) else type(leaf)))
    return found
