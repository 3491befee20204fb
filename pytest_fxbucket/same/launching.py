"""What a launch brings, told by the bytes that its members send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.same.exact import Ranks, gathered, reduced, scattered, spans
from pytest_fxbucket.same.followed import FOLLOWED, Followed
from pytest_fxbucket.same.ops import Operator
from pytest_fxbucket.same.table import Const

if TYPE_CHECKING:
    from pytest_fxbucket.graph.contents import Runs


class Launching:
    """The launches of one graph, in its order."""

    def __init__(self, followed: Followed) -> None:
        self.sent: list[tuple[Ranks, int]] = []
        """What each launch sends, and among whom."""
        self._followed, self._table = followed, followed.context.table
        self._ranks_of: dict[int, int] = {}
        """Over how many ranks in all a source was gathered."""

    def members(self, node: fx.Node) -> Ranks:
        """The ranks of the launch ``node``; none if its group is not known."""
        return self._followed.context.members.get(str(collectives.argument(node, "group_name") or ""), ())

    def launch(self, node: fx.Node, operator: Operator) -> bool:
        """Follow the launch ``node``; False if it is of a kind that is told as a whole."""
        members, given, size = self.members(node), collectives.sent_by(node), collectives.argument(node, "group_size")
        listed = isinstance(given, (list, tuple))
        nodes = [one for one in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(one, fx.Node)]
        odd = isinstance(size, int) and size != len(members)
        if operator.launches not in FOLLOWED or not members or not nodes or odd or operator.effects.chained:
            return False
        out = node.kwargs.get("out")
        buffers: list[Any] = [out] if isinstance(out, fx.Node) else nodes if operator.effects.writes else []
        results = []
        for index, one in enumerate(nodes):
            tensor: torch.Tensor = self._followed.known(one)
            runs = self._followed.memory.read(tensor)
            shape, brought = self._over(node, operator.launches or "", members, tensor, runs)
            if index < len(buffers):
                results.append(self._filled(node, buffers[index], brought))
            else:
                new = torch.empty(shape, dtype=tensor.dtype, device="meta")
                results.append(self._followed.memory.allocate(new, brought))
        self._followed.values[node] = results if listed else results[0]
        self._followed.brought.add(node)
        return True

    def note(self, members: Ranks, number: int) -> None:
        """A launch that is told as a whole."""
        self.sent.append((members, number))

    def _over(self, node: fx.Node, kind: str, members: Ranks, tensor: torch.Tensor, runs: Runs) -> tuple[list[int], Runs]:
        """Shape and content of what a launch brings."""
        op = str(collectives.argument(node, "reduce_op") or "")
        how = Const("launch", f"{kind} {op}"), Const("tensor", f"{tensor.dtype} {tuple(tensor.shape)}")
        self.sent.append((members, self._table.number(("sent", *how, *spans(runs)))))
        shape, count = list(tensor.shape), len(members)
        if kind == "all_reduce":
            return shape, reduced(self._table, runs, op, tensor.dtype, members)
        if kind == "all_gather":
            whole = [shape[0] * count, *shape[1:]] if shape else [count]
            return whole, gathered(self._table, runs, tensor.nbytes, members, self._ranks_of)
        if shape[0] % count:
            raise ValueError(f"{shape[0]} rows cannot be scattered to {count} ranks")
        own = [shape[0] // count, *shape[1:]]
        return own, scattered(self._table, runs, tensor.nbytes // count, op, tensor.dtype, members)

    def _filled(self, node: fx.Node, buffer: fx.Node, runs: Runs) -> torch.Tensor:
        """``buffer``, which the launch ``node`` fills."""
        followed = self._followed
        tensor: torch.Tensor = followed.known(buffer)
        followed.memory.write(tensor, runs)
        if buffer not in followed.brought:
            followed.changed(buffer, followed.of_tensor(tensor, node), node)
            followed.memory.write(tensor, runs)
        return tensor
