"""Roles of a graph's inputs and outputs, from the DTensor placements of its inputs, as a solver of placements gives them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

import torch
import torch.distributed as dist
from torch import fx

from pytest_fxbucket.capture.given_graphs import TracedStep
from pytest_fxbucket.compat.pytree import tree_leaves
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.step.graph_sequence import ORDER
from pytest_fxbucket.step.roles import Phase
from pytest_fxbucket.words import counted, nearest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

LOSS = "loss"
_Given = Literal["param", "buffer", "batch"]
_GIVEN: tuple[_Given, ...] = ("param", "buffer", "batch")


def placed_step(
    graphs: fx.GraphModule | Mapping[Phase, fx.GraphModule],
    mesh: DeviceMesh,
    *,
    parameters: Mapping[str, Any],
    buffers: Mapping[str, Any] | None = None,
    batch: Mapping[str, Any] | None = None,
    inputs: Mapping[Phase, Sequence[str]] | None = None,
    outputs: Mapping[Phase, Sequence[str | None]] | None = None,
    loss: Sequence[Placement] | None = None,
) -> TracedStep:
    """What a ``[graph]`` factory returns, for graphs of local tensors whose placements on ``mesh`` are known.

    ``graphs``: the joint graph, or those of :class:`~pytest_fxbucket.capture.TracedStep` by name. ``parameters`` and
    ``buffers`` by FQN and the ``batch`` by names of your own are each a ``DTensor``, a ``DTensorSpec``, or a tuple (whole
    tensor, placements by mesh dimension). Each rank is given its part of the whole tensor, or the local tensor of a DTensor;
    where either has no values, as on device meta, the whole is drawn from a generator that is seeded by the name.

    ``inputs`` and ``outputs`` name, for each graph, what it takes and gives, in order: a parameter, a buffer, or one of the
    batch; ``"loss"``; what graphs hand to each other by any name; None for an output that is nothing. An output with the name
    of a parameter is its gradient; of ``unshard`` it is the parameter, gathered, and of a graph before ``reduce`` the gradient
    before it is reduced. Left out: a joint graph takes parameters, buffers and batch in this order and gives the loss and the
    gradients; ``unshard`` takes and gives parameters, ``forward`` takes parameters, buffers and batch and gives the loss and
    what it saves, ``backward`` takes that and gives gradients, and ``reduce`` takes and gives them.

    ``loss`` are the placements of the loss: on ranks along dimensions where it is ``Replicate()`` it must be the same, as
    parameters and their gradients are where they are so placed. Raises :class:`CaptureError` for what contradicts itself.
    """
    given = {"joint": graphs} if isinstance(graphs, fx.GraphModule) else dict(graphs)
    given = {phase: _flat(module) for phase, module in given.items()}
    sides = zip(_GIVEN, (parameters, buffers or {}, batch or {}), strict=True)
    placed = {name: _placed(name, role, one, mesh) for role, named in sides for name, one in named.items()}
    naming = _Naming(given, placed, inputs or {}, outputs or {})
    named = {phase: naming.of(phase) for phase in sorted(given, key=ORDER.index)}
    copies = {one.name: _copies(mesh, one.placements) for one in placed.values() if one.role == "param"}
    if loss is not None:
        copies[""] = _copies(mesh, _checked("the loss", loss, mesh))
    return TracedStep(
        graphs=given,
        inputs=naming.tensors,
        roles={phase: {side: [role for role, _ in both] for side, both in sides.items()} for phase, sides in named.items()},
        fqns={phase: {side: [name for _, name in both] for side, both in sides.items()} for phase, sides in named.items()},
        shapes={one.name: tuple(one.whole.shape) for one in placed.values() if one.role == "param"},
        copies=copies,
        dims={name: dist.get_process_group_ranks(mesh.get_group(number)) for number, name in enumerate(_dims(mesh))},
    )


def _flat(module: fx.GraphModule) -> fx.GraphModule:
    """``module``; if it returns lists within a list, as AOT autograd's joint graphs do, a copy that returns one flat list."""
    if not any(isinstance(one, (list, tuple)) for one in returned(module.graph.output_node())):
        return module
    graph = copy.deepcopy(module.graph)
    output = graph.output_node()
    output.args = (tree_leaves(output.args[0], is_leaf=lambda one: one is None),)
    return fx.GraphModule(module, graph)


@dataclass(frozen=True)
class _Placed:
    """One tensor of a step, and where its parts are."""

    name: str
    role: _Given
    whole: Any
    """The whole tensor, or something that has its shape."""
    placements: tuple[Placement, ...]
    mesh: DeviceMesh

    def local(self, dtype: torch.dtype, where: str) -> torch.Tensor:
        """This rank's part, in ``dtype`` where values are drawn."""
        own = self.whole.to_local() if hasattr(self.whole, "to_local") else None
        if isinstance(own, torch.Tensor) and _has_values(own):
            return own.detach()
        return _part(self._values(dtype, where), self.mesh, self.placements)

    def _values(self, dtype: torch.dtype, where: str) -> torch.Tensor:
        if isinstance(self.whole, torch.Tensor) and not hasattr(self.whole, "to_local") and _has_values(self.whole):
            return self.whole.detach()
        if not (dtype.is_floating_point or dtype.is_complex):
            raise CaptureError(
                f"placed_step: {where} takes {self.name!r} in {str(dtype).removeprefix('torch.')}, of which no values can be "
                "drawn; give (whole tensor, placements), or a DTensor with values"
            )
        # Parameters of one shape must not have equal values, which would hide that one is taken for the other.
        generator = torch.Generator().manual_seed(crc32(self.name.encode()))
        drawn = torch.randn(tuple(self.whole.shape), generator=generator, dtype=dtype if dtype.is_complex else torch.float32)
        return drawn.to(dtype) / 4


def _has_values(tensor: torch.Tensor) -> bool:
    from pytest_fxbucket.compat.fake_tensors import FakeTensor

    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def _placed(name: str, role: _Given, given: Any, mesh: DeviceMesh) -> _Placed:
    if isinstance(given, tuple) and len(given) == 2 and hasattr(given[0], "shape"):
        return _Placed(name, role, given[0], _checked(repr(name), given[1], mesh), mesh)
    if not all(hasattr(given, known) for known in ("placements", "device_mesh", "shape")):
        raise CaptureError(
            f"placed_step: {name!r} is a value of type {type(given).__name__}, expected a DTensor, a DTensorSpec or a tuple "
            "(whole tensor, placements)"
        )
    if given.device_mesh != mesh:
        raise CaptureError(f"placed_step: {name!r} is placed on {given.device_mesh}, and the step on {mesh}")
    return _Placed(name, role, given, _checked(repr(name), given.placements, mesh), mesh)


def _checked(what: str, placements: Sequence[Placement], mesh: DeviceMesh) -> tuple[Placement, ...]:
    dims = _dims(mesh)
    if len(placements) != mesh.ndim:
        raise CaptureError(
            f"placed_step: {what} has {counted(len(placements), 'placement')}, and the mesh the dimensions {', '.join(dims)}; "
            "give one for each"
        )
    partial = next((dim for dim, one in zip(dims, placements, strict=True) if one.is_partial()), None)
    if partial is not None and what != "the loss":
        raise CaptureError(f"placed_step: {what} is Partial on {partial}, and what a graph is given must be Shard or Replicate")
    return tuple(placements)


def _dims(mesh: DeviceMesh) -> list[str]:
    return list(mesh.mesh_dim_names or map(str, range(mesh.ndim)))


def _part(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part of ``whole``: no rank sends anything."""
    from torch.distributed.tensor import DTensor, Replicate

    # From Replicate to any placement each rank cuts out its own part.
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, placements).to_local().detach().clone()


def _copies(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[list[int]]:
    """Sets of ranks that hold the same part of a tensor with these placements."""
    # Ranks at one place along all dimensions that are not replicated hold the same.
    ranks, along = mesh.mesh, [number for number, one in enumerate(placements) if one.is_replicate()]
    if not along:
        return []
    rest = [number for number in range(mesh.ndim) if number not in along]
    places = product(*(range(ranks.shape[number]) for number in rest))
    found = []
    for place in places:
        index: list[Any] = [slice(None)] * mesh.ndim
        for number, at in zip(rest, place, strict=True):
            index[number] = at
        found.append(sorted(ranks[tuple(index)].flatten().tolist()))
    return [one for one in found if len(one) > 1]


def _local(one: _Placed, phase: Phase, said: Any) -> torch.Tensor:
    """This rank's part of ``one``, which must be as large as the graph ``phase`` has it, ``said``."""
    dtype = said.dtype if isinstance(said, torch.Tensor) else torch.float32
    local = one.local(dtype, f"the {phase} graph")
    if isinstance(said, torch.Tensor) and tuple(said.shape) != tuple(local.shape):
        raise CaptureError(
            f"placed_step: {one.name!r} is {list(one.whole.shape)}, placed {_shown(one.placements)}, of which this rank has "
            f"{list(local.shape)}, but the {phase} graph takes {list(said.shape)}"
        )
    return local


_Named = list[tuple[str, str]]


class _Naming:
    """Finds the roles of inputs and outputs of graphs by their names."""

    def __init__(
        self,
        graphs: Mapping[Phase, fx.GraphModule],
        placed: Mapping[str, _Placed],
        inputs: Mapping[Phase, Sequence[str]],
        outputs: Mapping[Phase, Sequence[str | None]],
    ) -> None:
        self.graphs, self.placed, self.inputs, self.outputs = graphs, placed, inputs, outputs
        self.parameters = [name for name, one in placed.items() if one.role == "param"]
        for said in (inputs, outputs):
            if foreign := next((phase for phase in said if phase not in graphs), None):
                raise CaptureError(f"placed_step: {foreign!r} has names of what it takes or gives, but no graph")
        if foreign := next((phase for phase in graphs if phase not in ORDER), None):
            raise CaptureError(f"placed_step: there is no graph {foreign!r}{nearest(str(foreign), list(ORDER))}")
        self.handed: dict[str, str] = {}
        """Role of each value that the graphs so far hand on, by its name."""
        self.tensors: dict[Phase, list[torch.Tensor]] = {}
        """This rank's parts of those inputs of each graph that no graph before it hands on."""

    def of(self, phase: Phase) -> dict[str, _Named]:
        """(role, name) of all inputs and outputs of the graph ``phase``. To be asked in the order of graphs."""
        return {"inputs": list(self._inputs(phase)), "outputs": list(self._outputs(phase))}

    def _inputs(self, phase: Phase) -> Iterator[tuple[str, str]]:
        nodes = self.graphs[phase].graph.find_nodes(op="placeholder")
        names = self._counted(phase, "inputs", len(nodes), self.inputs.get(phase) or self._usual_inputs(phase))
        tensors = self.tensors.setdefault(phase, [])
        for node, name in zip(nodes, names, strict=True):
            if name in self.handed:
                yield self.handed[str(name)], str(name)
            elif (one := self.placed.get(str(name))) is not None:
                tensors.append(_local(one, phase, node.meta.get("val")))
                yield one.role, str(name)
            else:
                known = [*self.placed, *self.handed]
                raise CaptureError(
                    f"placed_step: the {phase} graph takes {name!r}, which is no parameter, no buffer, nothing of the batch "
                    f"and nothing that a graph before it gives{nearest(str(name), known)}"
                )

    def _outputs(self, phase: Phase) -> Iterator[tuple[str, str]]:
        nodes = returned(self.graphs[phase].graph.output_node())
        names = self._counted(phase, "outputs", len(nodes), self.outputs.get(phase) or self._usual_outputs(phase, nodes))
        made: dict[str, str] = {}
        for node, name in zip(nodes, names, strict=True):
            role = self._given(phase, name)
            if role == "grad":
                self._refuse_other_size(phase, str(name), node)
            if role in ("whole", "unreduced", "crossing"):
                made[str(name)] = role
            yield role, "" if name in (None, LOSS) else str(name)
        self.handed |= made

    def _given(self, phase: Phase, name: str | None) -> str:
        if name is None:
            return "value"
        if name == LOSS:
            return "loss"
        if name in self.parameters:
            return "whole" if phase == "unshard" else "unreduced" if self._is_reduced(phase, name) else "grad"
        if phase in ("joint", "reduce") or name in self.placed:
            raise CaptureError(
                f"placed_step: the {phase} graph gives {name!r}, which is neither a parameter, whose gradient it would be, nor "
                f'"loss"{nearest(name, self.parameters)}'
            )
        return "crossing"

    def _is_reduced(self, phase: Phase, name: str) -> bool:
        """Whether the reduce graph takes the gradient ``name`` that the graph ``phase`` gives."""
        return phase != "reduce" and "reduce" in self.graphs and name in (self.inputs.get("reduce") or self.parameters)

    def _refuse_other_size(self, phase: Phase, name: str, node: Any) -> None:
        said = getattr(node, "meta", {}).get("val")
        one = self.placed[name]
        if isinstance(said, torch.Tensor):
            like = _part(torch.empty(tuple(one.whole.shape), device="meta"), one.mesh, one.placements)
            if tuple(said.shape) != tuple(like.shape):
                raise CaptureError(
                    f"placed_step: {name!r} is placed {_shown(one.placements)}, of which this rank has {list(like.shape)}, but "
                    f"the {phase} graph gives a gradient of {list(said.shape)}; is it reduced, and parted as its parameter is?"
                )

    def _usual_inputs(self, phase: Phase) -> Sequence[str]:
        if phase in ("unshard", "reduce"):
            return self.parameters
        return list(self.placed) if phase in ("joint", "forward") else [n for n, r in self.handed.items() if r == "crossing"]

    def _usual_outputs(self, phase: Phase, nodes: Sequence[Any]) -> Sequence[str | None]:
        if phase == "joint":
            return [LOSS, *self.parameters]
        if phase != "forward":
            return self.parameters
        return [LOSS, *(_saved(nodes[1:]))]

    def _counted(self, phase: Phase, side: str, count: int, names: Sequence[str | None]) -> Sequence[str | None]:
        if len(names) != count:
            what = "takes" if side == "inputs" else "gives"
            raise CaptureError(
                f"placed_step: the {phase} graph {what} {count} values, but {len(names)} names are known for them; say them in "
                f"{side}[{phase!r}]"
            )
        return names


def _saved(nodes: Sequence[Any]) -> list[str | None]:
    """Names of what forward saves; a node that is saved more than once has a name for each time."""
    names: list[str | None] = []
    for node in nodes:
        names.append(None if node is None else f"{node}, {len(names)}" if str(node) in names else str(node))
    return names


def _shown(placements: Sequence[Placement]) -> str:
    return f"({', '.join(map(str, placements))})"
