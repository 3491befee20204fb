"""Does a model give of parts what it gives of wholes: of parts of sequences over cp, of some of its experts over ep?

Steps over parts are compared bit for bit with eager ones over the same parts. Whether those are steps of whole sequences, and
of all experts, is asked here: of the whole model on each rank, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.fake_tensors import TorchDispatchMode
from pytest_fxbucket.eager.context_parallel import WholeSequence
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.process.state import ProcessState
from pytest_fxbucket.user_frame import at_user_frame

_SAME = 1e-4
"""How far values of parts may lie from those of wholes, relative to the largest: float32 sums in another order."""


class Parting(NamedTuple):
    """Does a model give of parts what it gives of wholes?"""

    wrong: str = ""
    """What it gives otherwise, a clause."""
    unasked: str = ""
    """Why that cannot be told, a clause."""


class PartError(FxbucketError):
    """A model that takes whole sequences raises of a part."""


def parting_of_sequences(call: Callable[[Any], Any], whole: Any, part: Any, group: dist.ProcessGroup) -> Parting:
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
            return Parting(unasked=f"in float32 the model raises {type(error).__name__}: {_brief(error)}")
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
    if unasked := _hidden(seen, has_drawn):
        return Parting(unasked=unasked)
    cut = [
        (number, own, all_of_it)
        for number, (own, all_of_it) in enumerate(zip(parts, wholes, strict=False))
        # Divided with a remainder the size is a fraction, which no size equals.
        if own.dim() > 1 and own.shape == (all_of_it.shape[0], all_of_it.shape[1] / group.size(), *all_of_it.shape[2:])
    ]
    if not cut:  # such as a loss alone: the loss of a part is no part of the whole's loss
        return Parting(unasked="no output of the model has the sequence in dimension 1")
    if not all(bool(all_of_it.isfinite().all()) for _, _, all_of_it in cut):  # NaN is near nothing, right or wrong
        return Parting(unasked="of whole sequences the model gives numbers that are not finite")
    for number, own, all_of_it in cut:
        off = (own - all_of_it.chunk(group.size(), 1)[group.rank()]).abs().amax([at for at in range(own.dim()) if at != 1])
        # Negated, so that a difference of NaN counts as wrong.
        if bool((wrong := ~(off <= _SAME * all_of_it.abs().max())).any()):
            by = _by(float(off.max() / all_of_it.abs().max()))
            which = f" of output {number}" if len(parts) > 1 else ""
            place = int(wrong.nonzero()[0])
            return Parting(
                f"of a part of the sequence the model gives other values than of the whole, {by}, first at place {place} of a "
                f"part{which}; if it counts positions by itself, let the batch give them: cp cuts them as it cuts tokens"
            )
    return Parting()


def parting_of_experts(call: Callable[[], Any], experts: Mapping[str, nn.Module], ranks: int) -> Parting:
    """Compare what ``experts``, by FQN, give of the tokens that ``call`` gives them with what ``ranks`` make of these.

    Each rank has some of a module's experts, and for them the tokens of all ranks. ``call`` calls the model, which has all.
    """
    found: list[Parting] = []
    called: set[str] = set()
    busy: list[str] = []  # a module is called with its parts, too

    def compare(fqn: str, module: nn.Module, given: tuple[Tensor, ...], named: Mapping[str, Tensor], made: Tensor) -> None:
        if not busy and not found:
            called.add(fqn)
            busy.append(fqn)
            (tokens,) = (*given, *named.values())
            found.extend(_parting_of_one(fqn, module, tokens, made, ranks))
            busy.pop()

    with torch.no_grad(), _Coarsest() as seen, ExitStack() as inside:
        for fqn, module in experts.items():
            inside.callback(module.register_forward_hook(partial(compare, fqn), with_kwargs=True).remove)
        before = ProcessState.take()
        try:
            call()
        except Exception as error:
            return Parting(unasked=f"in float32 the model raises {type(error).__name__}: {_brief(error)}")
        has_drawn = before.has_drawn()
    if unasked := _hidden(seen, has_drawn):
        return Parting(unasked=unasked)
    if idle := next((fqn for fqn in experts if fqn not in called), ""):
        found.append(Parting(unasked=f"in eval() the model does not call {idle}"))
    return found[0] if found else Parting()


def _parting_of_one(fqn: str, module: nn.Module, tokens: Tensor, made: Tensor, ranks: int) -> Iterator[Parting]:
    """What speaks against the experts of ``module``, which gives ``made`` of ``tokens`` if it has all of them."""
    if not bool(made.isfinite().all()):  # NaN is near nothing, right or wrong
        yield Parting(unasked=f"of all its experts {fqn} gives numbers that are not finite")
        return
    blocks, own = tokens.chunk(ranks), made.shape[0] // ranks
    for rank, whole in enumerate(made.chunk(ranks)):
        parameters = {name: one.chunk(ranks)[rank] for name, one in module.named_parameters()}
        # A rank's tokens for these experts come first here; those for others stand for what other ranks send.
        sent = torch.cat([blocks[(rank + other) % ranks] for other in range(ranks)], 1)
        try:
            part = functional_call(module, parameters, (sent,))[:, : tokens.shape[1]]
        except Exception as error:
            raised = f"raises {type(error).__name__}{at_user_frame(error)}: {_brief(error)}"
            yield Parting(f"of some of its experts {fqn} {raised}{_ALONE}")
            return
        off = (part - whole).abs().flatten(1).amax(1)
        # Negated, so that a difference of NaN counts as wrong.
        if bool((wrong := ~(off <= _SAME * made.abs().max())).any()):
            expert = rank * own + int(wrong.nonzero()[0])
            other = f"other values than of all, {_by(float(off.max() / made.abs().max()))}, first of expert {expert}"
            yield Parting(f"of some of its experts {fqn} gives {other}{_ALONE}")
            return


_ALONE = (
    "; with ep it is called on each rank with that rank's experts and the tokens of all ranks for them, so what it computes "
    "must not go by an expert's place, by other experts or by other tokens"
)


def _hidden(seen: _Coarsest, has_drawn: bool) -> str:
    """Why a difference would not show, or would of itself, a clause; empty if neither."""
    if seen.is_half:  # rounding may be as large as the difference that a wrong position makes
        return "the model computes in 16 bits by itself, whose rounding would hide it"
    if has_drawn:  # ranks that are asked of one model have drawn alike: all of them say this
        return "in eval() the model draws random numbers, and of a part it draws others"
    return ""


def _by(share: float) -> str:
    return f"by {share:.1%} of the largest" if isfinite(share) else "not finite ones"


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _tensors(output: Any) -> list[Tensor]:
    return [one for one in pytree.tensors_in(output) if one.is_floating_point()]


class _Coarsest(TorchDispatchMode):
    """Notes whether anything is computed in 16 bits while inside."""

    is_half = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.is_half |= any(one.itemsize == 2 for one in _tensors(result))
        return result
