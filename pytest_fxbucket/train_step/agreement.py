"""Do the ranks of a captured step launch the same collectives, module by module? Else parameters of two modules would mix.

Each rank's graph has the launches of what that rank's step reads, in its order. DDP and FSDP2 have an order of their own.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from pytest_fxbucket.compat import c10d
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.files import digest
from pytest_fxbucket.graph.collectives import read_launch, tensors, tensors_sent
from pytest_fxbucket.graph.modules import module_of
from pytest_fxbucket.step.roles import StepGraph

_Line = tuple[list[int], str]
"""Ranks of a launch's group, and what it launches."""
_made: Counter[str] = Counter()


class Agreement:
    """Says in the store of the default group what each trace of a step launches, and reads what its neighbours said.

    Nothing is waited for: of two ranks that trace in the same call, the later one reads the earlier one's word. A rank that
    traces alone, as where its batch is smaller, is not compared.
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        self._of, self._model, self._name = name, model, ""

    def refuse_other(self, step: StepGraph, groups: Mapping[str, Sequence[int]], call: int) -> None:
        """Raise CaptureError if a neighbour launches otherwise in call number ``call`` than ``step`` does."""
        lines = list(_lines(step, groups))
        store = c10d.default_store() if lines else None
        if store is None:
            return
        self._name = self._name or _numbered(f"fxbucket step {self._of} {_digest(self._model)}")
        rank = dist.get_rank()
        store.set(f"{self._name} {call} {rank}", _packed(lines))
        # Each compares with the next and the last member of its groups, and so all are.
        ways = {tuple(ranks) for ranks, _ in lines}
        near = {ranks[(ranks.index(rank) + way) % len(ranks)] for ranks in ways if rank in ranks for way in (1, -1)} - {rank}
        for other in sorted(near):
            key = f"{self._name} {call} {other}"
            if store.check([key]):
                _compare(rank, lines, other, _unpacked(store.get(key)))


def _numbered(name: str) -> str:
    """``name`` with the number of steps of that name which launch, this one included: the same on all ranks."""
    _made[name] += 1
    return f"{name} {_made[name]}"


def _digest(model: nn.Module) -> str:
    """Of names, classes and shapes: ranks that made another number of steps must not compare two of other models."""
    modules = [(fqn, type(module).__qualname__) for fqn, module in model.named_modules()]
    shapes = [(fqn, tuple(parameter.shape)) for fqn, parameter in model.named_parameters()]
    return digest(repr((modules, shapes)).encode())[:16]


def _lines(step: StepGraph, groups: Mapping[str, Sequence[int]]) -> Iterator[_Line]:
    for module in step.graphs.values():
        for node in module.graph.nodes:
            if (launch := read_launch(node)) is not None and len(ranks := list(groups.get(launch.group, ()))) > 1:
                size = 0 if launch.kind == "all_to_all" else sum(_sizes(node))  # whose rows are each rank's own
                what = f"{launch.kind}{' ' * bool(launch.op)}{launch.op} of {module_of(node) or 'the step'}"
                yield ranks, f"{what} ({size} elements)" if size else what


def _packed(lines: Sequence[_Line]) -> str:
    # One rank's store holds the lines of all ranks, which are much alike: a tenth of their length is left.
    return b64encode(zlib.compress(json.dumps(lines).encode())).decode()


def _unpacked(text: bytes) -> list[_Line]:
    found: list[_Line] = json.loads(zlib.decompress(b64decode(text)))
    return found


def _sizes(node: Any) -> Iterator[int]:
    for sent in tensors_sent(node):
        yield from (one.numel() for one in tensors(sent.meta.get("val")))


def _compare(rank: int, own: Sequence[_Line], other: int, others: Sequence[_Line]) -> None:
    ours, theirs = [what for ranks, what in own if other in ranks], [what for ranks, what in others if rank in ranks]
    for number, (here, there) in enumerate(zip([*ours, "nothing"], [*theirs, "nothing"], strict=False), 1):
        if here != there:
            raise CaptureError(
                f"ranks launch different collectives: number {number} is {here} on rank {rank} and {there} on rank {other}; "
                "have all ranks use the same modules in the same order"
            )
