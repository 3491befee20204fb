"""Attention over parts of the sequence in eager steps; it shares no code with the captured attention.

Keys and values are gathered by torch.distributed. If they go round a ring, it is torch's own ring attention, which is given
torch's kernel for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.context_parallel import ring_attention, ring_attention_backward
from pytest_fxbucket.compat.fake_tensors import TorchDispatchMode
from pytest_fxbucket.compat.modules import TorchFunctionMode
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.process.state import ProcessState
from pytest_fxbucket.user_frame import at_user_frame

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_SAME = 1e-4
"""How far values of parts may lie from those of wholes, relative to the largest: float32 sums in another order."""


class WholeSequence(TorchFunctionMode):
    """While inside, ``scaled_dot_product_attention`` sees the keys and values of all ranks of ``group``."""

    def __init__(self, group: dist.ProcessGroup, form: str = "all_gather") -> None:
        super().__init__()
        self._group, self._form = group, form

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attend = self._attention if func is F.scaled_dot_product_attention else func
        return attend(*args, **(kwargs or {}))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        if self._form == "ring":
            _refuse_in_blocks(query, key, value, dropout_p, bool(more.get("enable_gqa")))
            return _Ring.apply(  # type: ignore[no-any-return]  # a tensor
                query, key, value, self._group, is_causal, more.get("scale")
            )
        keys, values = (_FromAll.apply(one, self._group) for one in (key, value))
        seen = None
        if is_causal:
            # ``is_causal`` would set this rank's queries against the first keys of all: its rows of the whole mask are cut out.
            every = torch.ones(keys.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril()
            seen = every.chunk(self._group.size())[self._group.rank()]
        return F.scaled_dot_product_attention(query, keys, values, seen, dropout_p, **more)


def _refuse_in_blocks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, enable_gqa: bool) -> None:
    """Raise ValueError for what torch's attention refuses, or its ring does not take: the kernel itself checks neither."""
    heads, shared = query.shape[1], key.shape[1]
    if shared not in (1, heads) and not enable_gqa:
        raise ValueError(
            f"scaled_dot_product_attention is given {heads} heads of queries and {shared} of keys, which takes enable_gqa=True"
        )
    if dropout_p or key.shape != value.shape or query.shape[0] != key.shape[0] or heads % shared:
        raise ValueError(
            "ring attention takes keys and values of one shape, of the queries' batch and of heads that divide theirs, and no "
            f"dropout_p, but is given {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)} and {dropout_p}"
        )


class _Ring(torch.autograd.Function):
    """Torch's ring attention with a backward: torch itself offers it to its dispatcher, not to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> Any:
            shared = _shared_by(query, key)
            return _flash(query, _shared(key, shared), _shared(value, shared), 0.0, is_causal, scale=scale)

        out, logsumexp = ring_attention(kernel, query, key, value, group, is_causal)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.group, ctx.is_causal, ctx.scale = group, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> Any:
            shared = _shared_by(query, key)
            of_query, *others = _flash_backward(
                query=query, key=_shared(key, shared), value=_shared(value, shared), dropout_p=0.0, scale=ctx.scale, **more
            )
            return of_query, *(one.unflatten(1, (-1, shared)).sum(2) for one in others)

        found = ring_attention_backward(kernel, gradient, ctx.saved_tensors, ctx.group, ctx.is_causal)
        return *found, None, None, None


def _shared_by(query: torch.Tensor, key: torch.Tensor) -> int:
    """How many heads of queries share one of keys and values."""
    return query.shape[1] // key.shape[1]


def _shared(few: torch.Tensor, times: int) -> torch.Tensor:
    return few.repeat_interleave(times, 1) if times > 1 else few


class _FromAll(torch.autograd.Function):
    """All ranks' parts of dimension 2, in order of ranks. Backward sums, over ranks, the gradients of this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [part.contiguous() for part in gradient.chunk(ctx.group.size(), 2)]
        summed = torch.empty_like(parts[0])
        dist.reduce_scatter(summed, parts, group=ctx.group)
        return summed, None


class SequenceParting(NamedTuple):
    """Does a model give of a part of each sequence what it gives of the whole?"""

    wrong: str = ""
    """What it gives otherwise, a clause."""
    unasked: str = ""
    """Why that cannot be told, a clause."""


class PartError(FxbucketError):
    """A model that takes whole sequences raises of a part."""


def parting_of(call: Callable[[Any], Any], whole: Any, part: Any, group: dist.ProcessGroup) -> SequenceParting:
    """Compare what ``call``, which calls a model, gives of ``part``, this rank's part of each sequence, with that of ``whole``.

    An unasked answer makes nothing green by itself: the step, which calls the model with parts alone, is still compared bit for
    bit. It leaves open whether that step is one of whole sequences, and the summary says so. Raises :class:`PartError`.
    """
    with torch.no_grad(), _Coarsest() as seen:
        before = ProcessState.take()
        try:
            wholes = _tensors(call(whole))
        except Exception as error:
            # There is nothing to compare parts with. Ranks along cp have the same wholes, so all of them are here, or none.
            return SequenceParting(unasked=f"in float32 the model raises {type(error).__name__}: {_brief(error)}")
        has_drawn = before.has_drawn()
        try:
            with WholeSequence(group):
                parts = _tensors(call(part))
        except Exception as error:
            # Wholes ran in float32, eval() and no_grad(), too, so the part is the cause. Other ranks may wait for this one's
            # keys and never come to the exchange of clauses, so the job is ended instead.
            raise PartError(
                f"the model, in float32 and eval(), takes whole sequences but raises {type(error).__name__} of a part"
                f"{at_user_frame(error)}: {_brief(error)}; let it take sequences of any length, or leave cp out"
            ) from error
    if seen.is_half:  # rounding may be as large as the difference that a wrong position makes
        return SequenceParting(unasked="the model computes in 16 bits by itself, whose rounding would hide it")
    if has_drawn:  # ranks along cp have drawn alike: all of them say this
        return SequenceParting(unasked="in eval() the model draws random numbers, and of a part it draws others")
    cut = [
        (number, own, all_of_it)
        for number, (own, all_of_it) in enumerate(zip(parts, wholes, strict=False))
        # Divided with a remainder the size is a fraction, which no size equals.
        if own.dim() > 1 and own.shape == (all_of_it.shape[0], all_of_it.shape[1] / group.size(), *all_of_it.shape[2:])
    ]
    if not cut:  # such as a loss alone: the loss of a part is no part of the whole's loss
        return SequenceParting(unasked="no output of the model has the sequence in dimension 1")
    if not all(bool(all_of_it.isfinite().all()) for _, _, all_of_it in cut):  # NaN is near nothing, right or wrong
        return SequenceParting(unasked="of whole sequences the model gives numbers that are not finite")
    for number, own, all_of_it in cut:
        off = (own - all_of_it.chunk(group.size(), 1)[group.rank()]).abs().amax([at for at in range(own.dim()) if at != 1])
        # Negated, so that a difference of NaN counts as wrong.
        if bool((wrong := ~(off <= _SAME * all_of_it.abs().max())).any()):
            share = float(off.max() / all_of_it.abs().max())
            by = f"by {share:.1%} of the largest" if isfinite(share) else "not finite ones"
            which = f" of output {number}" if len(parts) > 1 else ""
            place = int(wrong.nonzero()[0])
            return SequenceParting(
                f"of a part of the sequence the model gives other values than of the whole, {by}, first at place {place} of a "
                f"part{which}; if it counts positions by itself, let the batch give them: cp cuts them as it cuts tokens"
            )
    return SequenceParting()


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _tensors(output: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(output) if isinstance(one, torch.Tensor) and one.is_floating_point()]


class _Coarsest(TorchDispatchMode):
    """Notes whether anything is computed in 16 bits while inside."""

    is_half = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.is_half |= any(one.itemsize == 2 for one in _tensors(result))
        return result
