"""Traces the update of a training step, clipping and optimizers, into a functional graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature

import torch
from torch import fx
from torch.optim import Optimizer

from pytest_fxbucket.capture.clip import Clip, clip_
from pytest_fxbucket.capture.functionalize import make_functional
from pytest_fxbucket.capture.optimizers.recorder import Recorder
from pytest_fxbucket.capture.optimizers.state import make_state, rates, state_tensors
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.compat.fx import uncompiled
from pytest_fxbucket.compat.tracing import untraceable
from pytest_fxbucket.errors import CaptureError, FxbucketError, text_of
from pytest_fxbucket.graph.ops import operator_name, overload
from pytest_fxbucket.process.collector import paused
from pytest_fxbucket.step.roles import Role, Value
from pytest_fxbucket.user_frame import at_user_frame

Build = Callable[[Mapping[str, torch.Tensor]], Sequence["Optimizer"]]
"""Makes the optimizers of parameters that are given by FQN."""


@dataclass(frozen=True)
class TracedUpdate:
    """The update as a graph without writes in place."""

    graph_module: fx.GraphModule
    inputs: tuple[Value, ...]
    """Parameters that have a gradient, their gradients, state, learning rates."""
    outputs: tuple[Value, ...]
    """New values of those parameters, then of all state, in the inputs' order."""


@paused()
def trace_update(
    build: Build, parameters: Sequence[Value], grads: Collection[str], clip: Clip | None = None, parted: bool = False
) -> TracedUpdate:
    """Trace one step of the optimizers that ``build`` makes; ``parted``: whether ``parameters`` are parts of whole ones.

    ``parameters`` are local shards in registration order, ``grads`` the FQNs of those that have a gradient; others have no
    state and are no inputs. Gradients come reduced and not clipped. State is named ``<parameter>.<key>``, the learning rate of
    a group ``optimizers.<i>.groups.<j>.lr``, a float64 tensor without dimensions. Optimizers run the way that is eager's
    default, not capturable: step counters and learning rates become Python numbers in the graph. Raises
    :class:`CaptureError` for an optimizer that decides by values, or keeps what changes outside of tensors, and for one that
    looks at a whole parameter where it is given a part.
    """
    mode = FakeTensorMode()
    with mode:
        fakes = {value.fqn: torch.empty(value.shape, dtype=value.dtype) for value in parameters}
        optimizers = list(build(fakes))
        held = {fqn: fake for fqn, fake in fakes.items() if fqn in grads}
        hypers = {name: torch.empty((), dtype=torch.float64) for name in rates(optimizers)}
        gradients = {fqn: torch.empty_like(fake) for fqn, fake in held.items()}
    _make_state(optimizers, held, Recorder(mode))
    recorder = Recorder(mode)
    states = state_tensors(optimizers, held)
    given: list[tuple[Role, str, torch.Tensor]] = [("param", fqn, fake) for fqn, fake in held.items()]
    given += [("grad", fqn, gradient) for fqn, gradient in gradients.items()]
    given += [("state", state.fqn, state.tensor) for state in states]
    given += [("hyper", name, hyper) for name, hyper in hypers.items()]
    for role, fqn, tensor in given:
        recorder.input(f"{role}_{fqn}", tensor)
    inputs = [Value(role, fqn, tuple(tensor.shape), tensor.dtype) for role, fqn, tensor in given]
    with recorder.recording():
        if clip is not None and gradients:
            clip_(gradients, clip)
        # A norm mixes elements, and clipping reduces it over ranks. Only what optimizers do is refused for mixing.
        clipping = set(recorder.graph.nodes)
        _step(optimizers, fakes, gradients, list(hypers.values()), recorder)
    graph = recorder.graph
    if parted:
        refuse_looking_at_all([node for node in graph.nodes if node not in clipping], optimizers)
    # Outputs are named by the nodes that parameters and state came in by: make_functional lets them read the last values.
    graph.output([recorder.node(tensor) for tensor in (*held.values(), *(state.tensor for state in states))])
    make_functional(graph)
    graph.eliminate_dead_code()
    outputs = [value for value in inputs if value.role in ("param", "state")]
    return TracedUpdate(uncompiled(torch.nn.Module(), graph), tuple(inputs), tuple(outputs))


def _make_state(optimizers: Sequence[Optimizer], parameters: Mapping[str, torch.Tensor], recorder: Recorder) -> None:
    """Make state as on real shards. It is recorded, and the record dropped, so that ``item()`` gives a number."""
    for fqn, parameter in parameters.items():
        recorder.input(fqn, parameter)
    for state in state_tensors(optimizers, parameters):
        recorder.input(state.fqn, state.tensor)
    with recorder.recording():
        for optimizer in optimizers:
            with _named(optimizer):
                make_state([optimizer], list(parameters.values()))


def _step(
    optimizers: Sequence[Optimizer],
    fakes: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    hypers: Sequence[torch.Tensor],
    recorder: Recorder,
) -> None:
    given = iter(hypers)
    for fqn, fake in fakes.items():
        fake.grad = gradients.get(fqn)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = next(given)
            if "lr" in group:
                # Fused operators take the learning rate as a tensor, others compute with a number, which stays live.
                group["lr"] = rate if group.get("fused") else recorder.number(rate)
        before = _described(optimizer)
        with _named(optimizer):
            optimizer.step()
        _refuse_hidden_state(optimizer, before)


def _described(optimizer: Optimizer) -> dict[tuple[int, str], object]:
    """The keys of each parameter's state, and the values that are no tensors: a graph can change neither."""
    return {
        (number, key): torch.Tensor if isinstance(value, torch.Tensor) else repr(value)
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }


def _refuse_hidden_state(optimizer: Optimizer, before: Mapping[tuple[int, str], object]) -> None:
    after = _described(optimizer)
    if missing := next((key for number, key in after if (number, key) not in before), None):
        raise CaptureError(
            f"the state {missing} of {_name(optimizer)} is missing before its second step; make all state in the first one"
        )
    if changed := next((key for (number, key), value in after.items() if before[number, key] != value), None):
        raise CaptureError(
            f"{_name(optimizer)} counts its state {changed} outside of tensors, where no graph can; keep it in a tensor"
        )


@contextmanager
def _named(optimizer: Optimizer) -> Iterator[None]:
    """Raise what cannot be traced as a sentence that names the optimizer, and the user's own frame if there is one."""
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, FxbucketError) else untraceable(error)
        tail = "SGD, Adam and AdamW can, and others whose steps do not depend on values"
        if text is None:
            # An error of the optimizer's own, perhaps since its step asks for arguments, which it does not get.
            needed = [one.name for one in signature(optimizer.step).parameters.values() if one.default is one.empty]
            text = f"{type(error).__name__}: {text_of(error)[:300]}"
            tail = "step() is called without closure or loss" if needed else ""
        said = f"the step of {_name(optimizer)} cannot be traced{at_user_frame(error)}: {text}"
        raise CaptureError(f"{said}; {tail}" if tail else said) from error


def _name(optimizer: Optimizer) -> str:
    return f"the optimizer {type(optimizer).__name__}"


_ALONE = frozenset(
    f"aten::{name}"
    for name in (
        *("clone", "copy", "copy_", "_to_copy", "detach", "detach_", "alias", "lift_fresh", "lift_fresh_copy", "fill", "fill_"),
        *("zero", "zero_", "zeros", "ones", "full", "empty", "scalar_tensor", "zeros_like", "ones_like", "full_like"),
        *("empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "view", "_unsafe_view", "view_as", "reshape"),
        *("squeeze", "unsqueeze", "view_as_real", "view_as_complex", "expand", "rand_like", "randn_like", "bernoulli"),
        *("bernoulli_", "normal_", "uniform_", "_local_scalar_dense", "_resize_output_", "_conj", "conj", "resolve_conj"),
        *("real", "imag"),
    )
)
"""Operators without torch's tag ``pointwise`` that keep elements to themselves all the same, beside foreach and fused ones."""
_MIXING = frozenset({"aten::_foreach_norm", "aten::_foreach_max"})


def _puts_by_mask(node: fx.Node, name: str) -> bool:
    """Whether ``node`` writes one value where a mask of the tensor's own shape says, as Rprop does: ``step[grew] = 1.2``."""
    if name not in ("aten::index_put", "aten::index_put_", "aten::_unsafe_index_put"):
        return False
    masks = node.args[1]
    if not isinstance(masks, (list, tuple)) or len(masks) != 1:
        return False
    said = (getattr(one, "meta", {}).get("val") for one in (node.args[0], masks[0], node.args[2]))
    values = [one for one in said if isinstance(one, torch.Tensor)]
    if len(values) < 3:
        return False
    target, mask, value = values
    return mask.dtype == torch.bool and mask.shape == target.shape and value.numel() == 1


def _mixes(node: fx.Node) -> bool:
    """Whether the result of ``node`` mixes elements of a tensor, or may: not known to be of each element for itself."""
    op, name = overload(node), operator_name(node)
    if op is None or torch.Tag.pointwise in op.tags or name in _ALONE or _puts_by_mask(node, name):
        return False
    return name in _MIXING or (name.startswith("aten::") and not name.startswith(("aten::_foreach_", "aten::_fused_")))


def refuse_looking_at_all(nodes: Iterable[fx.Node], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise :class:`CaptureError` if one of ``nodes``, the steps of ``optimizers``, mixes elements of a tensor."""
    for node in nodes:
        value = next((source.meta.get("val") for source in node.all_input_nodes), None)
        if _mixes(node) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            names = " or ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
            what = operator_name(node).replace("::", ".")
            raise CaptureError(
                f"the optimizer {names} looks at more than one element at a time ({what}), and is given a rank's part of each "
                'parameter, so it would make another step than on whole ones; use it where they are whole (mode = "replicate" '
                "of a plan, DDP), or take one that updates each element for itself, such as AdamW"
            )
