"""Names every traced node by its module's FQN, direction and pipeline stage; finds the modules that entries name, as units.

Forward nodes are named by hooks while the modules run. Backward nodes are named after the autograd node that makes them: its
sequence number says during which module's forward it was recorded. The names land in ``node.meta`` under the keys that torch's
own passes read: ``nn_module_stack`` forward, ``fwd_nn_module_stack`` and ``autograd_backward`` backward.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from pytest_fxbucket.capture.backward import autograd_nodes
from pytest_fxbucket.compat import tracing
from pytest_fxbucket.compat.modules import each_tensor
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import Entry
from pytest_fxbucket.plan.selectors import resolve

STAGE = "fxbucket_stage"
"""Key of a node's stage; nodes of a trace without cuts have none."""
Call = tuple[int, int]
"""Place of the first node of a module's call, and of the first one behind it."""


class StageMarks:
    """Follows the calls of modules while a step is traced: a stage ends behind the one call of each module in ``cuts``."""

    def __init__(self, cuts: Iterable[str] = ()) -> None:
        """``cuts`` are first FQNs of modules."""
        self.cuts = frozenset(cuts)
        self.stage = 0
        """The stage that is being traced."""
        self.calls: dict[str, list[Call]] = {}
        """Calls of each module that was followed, by its FQN, in order."""
        self._begun: list[int] = []

    def begin(self) -> None:
        """A forward begins: go back to the first stage."""
        self.stage = 0

    def enter(self, place: int) -> None:
        """A module's call begins, with ``place`` nodes before it."""
        self._begun.append(place)

    def leave(self, fqn: str, place: int) -> None:
        """The call of ``fqn``, the last that began, ends."""
        self.calls.setdefault(fqn, []).append((self._begun.pop(), place))
        self.stage += fqn in self.cuts

    def put_on(self, node: fx.Node) -> None:
        """Mark ``node`` as of the stage that is traced."""
        if self.cuts:
            node.meta[STAGE] = self.stage


def first_names(model: nn.Module) -> dict[str, str]:
    """Map every FQN of a module of ``model`` to the module's first FQN, which names its calls."""
    first = {id(module): fqn for fqn, module in model.named_modules()}
    return {fqn: first[id(module)] for fqn, module in model.named_modules(remove_duplicate=False)}


@contextmanager
def calls_watched(model: nn.Module, enter: Callable[[str], None], leave: Callable[[str], None]) -> Iterator[None]:
    """While inside, ``enter`` and ``leave`` get the FQN of each module whose forward begins, and ends or raises."""
    with ExitStack() as inside:
        for fqn, module in model.named_modules():
            inside.callback(module.register_forward_pre_hook(lambda *_, fqn=fqn: enter(fqn)).remove)
            # A forward that raises is left, too: it is how the module that failed is known.
            inside.callback(module.register_forward_hook(lambda *_, fqn=fqn: leave(fqn), always_call=True).remove)
        yield


class NodeNamer:
    """Follows a trace and names nodes as they appear."""

    def __init__(self, model: nn.Module, graph: fx.Graph | None = None, marks: StageMarks | None = None) -> None:
        """``graph`` is the traced graph; None: the one that make_fx traces when nodes are named. ``marks`` are put on nodes."""
        self._graph, self._marks = graph, marks or StageMarks()
        self._classes = {fqn: type(module) for fqn, module in model.named_modules()}
        self._stacks: dict[str, dict[str, tuple[str, type]]] = {}
        # FQNs of the modules whose forwards run, outermost first. The first item is there always, for what no module does.
        self._stack: list[str] = [""]
        # Two lists side by side. Whenever the running module changes, they note the next autograd sequence number and the
        # module: autograd nodes from that number on, up to the next noted one, were recorded in this module's forward.
        self._numbers: list[int] = []
        self._owners: list[tuple[str, int]] = []
        # The node that was named last; None before the first.
        self._last: fx.Node | None = None
        # FQN of the module whose backward runs, empty for the loss; None in forward.
        self._backward: str | None = None
        self._called = False
        # The last exception that was seen to leave a module, and the innermost module that it left.
        self._raised: tuple[BaseException | None, str] = (None, "")

    @property
    def where(self) -> str:
        """What was being traced when the exception that is being handled was raised."""
        if self._backward is not None:
            return f"the backward of {self._backward or 'the loss'}"
        fqn = self.failed
        if fqn is None:
            return "the loss" if self._called else "the model"
        return f"module {fqn}" if fqn else "the root module"

    @property
    def failed(self) -> str | None:
        """FQN of the module whose forward raised the exception that is being handled; None if none did."""
        error, fqn = self._raised
        return None if error is None or error is not sys.exc_info()[1] else fqn

    @property
    def running(self) -> str:
        """FQN of the module that runs."""
        return self._stack[-1]

    @property
    def is_in_module(self) -> bool:
        """Whether a module's forward runs, be it computed again in backward."""
        return len(self._stack) > 1

    @property
    def _traced(self) -> fx.Graph:
        return self._graph or tracing.current_graph()

    @property
    def stage(self) -> int:
        """The pipeline stage that runs; 0 without marks."""
        return self._marks.stage

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Name what ``model`` and its children do in their forward."""
        with calls_watched(model, self._call, self._return):
            yield

    @contextmanager
    def inside(self, fqn: str) -> Iterator[None]:
        """Name what happens in the block after the module ``fqn``."""
        self._enter(fqn)
        try:
            yield
        finally:
            self._leave()

    def start_backward(self, loss: torch.Tensor) -> None:
        """Say that nodes from here on belong to the backward of ``loss``."""
        self.flush()
        self._note()
        self._backward = ""
        for grad_fn in autograd_nodes([loss]):
            owner, stage = self._owner(grad_fn)
            # The hook runs right before the node's own backward, so nodes that are traced from there on belong to its owner.
            grad_fn.register_prehook(lambda *_, owner=owner, stage=stage: self._enter_backward(owner, stage))

    def end_backward(self) -> None:
        """Say that nodes from here on belong to what modules do, as before :meth:`start_backward`."""
        self.flush()
        self._backward = None
        self._marks.begin()

    def flush(self) -> None:
        """Name the nodes that were added since the last call."""
        graph = self._traced
        node = self._last.next if self._last is not None else next(iter(graph.nodes), None)
        while node is not None and node.op != "root":
            self._name(node)
            self._last = node
            node = node.next

    def _call(self, fqn: str) -> None:
        self._enter(fqn)
        if self._marks.cuts and self._backward is None:
            self._marks.enter(len(self._traced.nodes))

    def _return(self, fqn: str) -> None:
        self._leave()
        if self._marks.cuts and self._backward is None:  # a checkpoint calls modules again in backward
            self._marks.leave(fqn, len(self._traced.nodes))
            self._note()

    def _enter(self, fqn: str) -> None:
        # Nodes up to here belong to the module that ran so far, so they are named before the stack changes.
        self.flush()
        self._stack.append(fqn)
        self._note()

    def _leave(self) -> None:
        # An exception passes through every outer module, too. Only the first that it leaves is the one that raised it.
        error = sys.exc_info()[1]
        if error is not self._raised[0]:
            self._raised = error, self._stack[-1]
        self.flush()
        # Two items: the model itself returns. What raises behind it is the loss.
        self._called = self._called or len(self._stack) == 2
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        self._numbers.append(tracing.next_autograd_number())
        self._owners.append((self._stack[-1], self.stage))

    def _owner(self, grad_fn: Any) -> tuple[str, int]:
        """FQN of the module in whose forward ``grad_fn`` was made, and its stage."""
        place = bisect_right(self._numbers, tracing.autograd_number(grad_fn)) - 1
        return self._owners[place] if place >= 0 else ("", 0)

    def _enter_backward(self, owner: str, stage: int) -> None:
        self.flush()
        self._backward = owner
        self._marks.stage = stage

    def _name(self, node: fx.Node) -> None:
        self._marks.put_on(node)
        if self._backward is None:
            node.meta["nn_module_stack"] = self._module_stack(self._stack[-1])
            return
        # A module that runs in backward computes again what its forward did not keep.
        owner = self._stack[-1] if len(self._stack) > 1 else self._backward
        node.meta["fwd_nn_module_stack"] = self._module_stack(owner)
        node.meta["autograd_backward"] = True

    def _module_stack(self, fqn: str) -> dict[str, tuple[str, type]]:
        """The FQNs and classes from the root to ``fqn``; one dict that all nodes of the module share."""
        if fqn not in self._stacks:
            parts = fqn.split(".") if fqn else []
            paths = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
            self._stacks[fqn] = {path: (path, self._classes[path]) for path in paths if path in self._classes}
        return self._stacks[fqn]


# Modules that entries of the plan name: units, as FSDP2 calls what shares one gather. Each gets its inputs in param_dtype.


def names_of(model: nn.Module) -> dict[str, str]:
    """Map every FQN of every parameter of ``model``, in registration order, to its canonical one: a tied parameter's first."""
    first: dict[int, str] = {}
    return {fqn: first.setdefault(id(p), fqn) for fqn, p in model.named_parameters(remove_duplicate=False)}


def single_selectors(entries: Iterable[Entry]) -> list[Entry]:
    """An entry for each selector of ``entries``."""
    return [Entry(selector, (selector,)) for entry in entries for selector in entry.selectors]


def units_of(model: nn.Module, entries: Sequence[Entry]) -> list[str]:
    """FQN of each module that ``entries`` name, or of those in it where it is a container, which is never called itself."""
    modules = dict(model.named_modules())
    parameters = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    named = modules_named_by(entries, parameters, list(modules))
    return list(dict.fromkeys(inner for fqn in named for inner in called_within(fqn, modules[fqn])))


def modules_named_by(entries: Sequence[Entry], parameters: Sequence[str], modules: Sequence[str]) -> list[str]:
    """FQN of each of ``modules`` that a selector of ``entries`` names; ``parameters`` have all names of tied ones.

    A selector that names nothing is left to the plan's own resolution, which says so.
    """
    found: dict[str, None] = {}
    for entry in dict.fromkeys(single_selectors(entries)):
        try:
            resolved = resolve([entry], parameters, modules, unplanned="allow")
        except PlanError:
            continue
        found.update(dict.fromkeys(one.name for one in resolved.entries if one.name in modules))
    return list(found)


def called_within(fqn: str, module: nn.Module) -> Iterator[str]:
    """``fqn``, which ``module`` has; of a container, which has no forward, those of the modules in it, as FSDP2 has them."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module).forward is not nn.Module.forward:
        yield fqn
        return
    for name, child in module.named_children():
        yield from called_within(f"{fqn}.{name}" if fqn else name, child)


@contextmanager
def inputs_cast(model: nn.Module, units: Sequence[str], dtype: torch.dtype | None, namer: NodeNamer) -> Iterator[None]:
    """While inside, floating inputs of ``units`` of ``model`` are cast to ``dtype``, as FSDP2's cast_forward_inputs does."""

    def hook(fqn: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        cast = partial(_cast, dtype=dtype)
        with namer.inside(fqn):
            return each_tensor(cast, args), each_tensor(cast, kwargs)

    with ExitStack() as inside:
        for fqn in units if dtype is not None else ():
            module = model.get_submodule(fqn)
            # First among the module's hooks, as FSDP2's is: hooks of the user see inputs that are cast.
            handle = module.register_forward_pre_hook(partial(hook, fqn), prepend=True, with_kwargs=True)
            inside.callback(handle.remove)
        yield


@contextmanager
def outputs_cast(model: nn.Module, units: Sequence[str], dtype: torch.dtype | None, namer: NodeNamer) -> Iterator[None]:
    """While inside, floating outputs of ``units`` of ``model`` are cast to ``dtype``, as FSDP2's output_dtype says."""

    def hook(fqn: str, module: nn.Module, args: Any, output: Any) -> Any:
        with namer.inside(fqn):
            return each_tensor(partial(_cast, dtype=dtype), output)

    with ExitStack() as inside:
        for fqn in units if dtype is not None else ():
            inside.callback(model.get_submodule(fqn).register_forward_hook(partial(hook, fqn)).remove)
        yield


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype else tensor
