"""Traces one call of a user's step function into a functional graph whose inputs and outputs have names.

The outputs of the graph are the results of the function, then the new values of the tensors that it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pytest_fxbucket.capture.caches import without_fake_caches
from pytest_fxbucket.capture.draws import draws_on_tape
from pytest_fxbucket.capture.functionalize import make_functional, without_passing_through
from pytest_fxbucket.capture.model import fake_twin
from pytest_fxbucket.capture.optimizers.recorder import Recorder
from pytest_fxbucket.capture.optimizers.state import make_state
from pytest_fxbucket.capture.optimizers.update import refuse_looking_at_all
from pytest_fxbucket.capture.override.anchors import Anchors
from pytest_fxbucket.capture.override.expand import expand
from pytest_fxbucket.capture.override.overrides import Overrides
from pytest_fxbucket.capture.python_state import changes, generators
from pytest_fxbucket.capture.refusals import refuse_drawn, why
from pytest_fxbucket.capture.reshard import gather_again_in_backward
from pytest_fxbucket.compat import pytree, tracing
from pytest_fxbucket.compat.dtensors import local_of, spec_of
from pytest_fxbucket.compat.fake_tensors import KernelFakeMode, storage_key, takes_fake_tensors
from pytest_fxbucket.compat.live_numbers import node_of
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.roles import Role, Value
from pytest_fxbucket.train_step.guards import PLAIN, Arguments
from pytest_fxbucket.train_step.live import Live, refuse_first_step
from pytest_fxbucket.train_step.recorder import Gradients, StepFunctions, StepNamer, StepRecorder, watching_zero_grad
from pytest_fxbucket.train_step.scaling import OF_OPTIMIZERS, traced_scaler
from pytest_fxbucket.train_step.schedulers import Call, Schedulers
from pytest_fxbucket.train_step.sharded import WholeParameters
from pytest_fxbucket.train_step.stand_ins import (
    Inputs,
    in_optimizers,
    refuse_other_kinds,
    stepped_by_parts,
    unchanged_modules,
)
from pytest_fxbucket.user_frame import at_user_frame

_ORDER: tuple[Role, ...] = ("param", "buffer", "grad", "state", "hyper", "batch")


@dataclass(frozen=True)
class Leaf:
    """One leaf of the function's result."""

    kind: str
    """"output" of the graph, "input" of the graph that the function returns unchanged, or "plain" Python value."""
    value: Any
    """FQN of the output, the :class:`Value` of the input, or the value itself."""
    spec: Any = None
    """The DTensor spec of an output or input that is a DTensor, else None."""


@dataclass(frozen=True)
class TracedCall:
    """One call as a functional graph."""

    graph_module: fx.GraphModule
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    spec: Any
    """The pytree spec of the function's result."""
    leaves: tuple[Leaf, ...]
    gradients: Mapping[str, bool]
    """By FQN whether the parameter had a gradient before the step; only parameters for which the graph depends on that."""
    cleared: tuple[str, ...]
    """Parameters that have no gradient after the step."""
    specs: Mapping[str, Any]
    """The DTensor spec of each gradient that is a DTensor, by FQN; None for others."""
    schedulers: tuple[Call, ...]
    """Calls of learning rate schedulers, to be made after the graph has run."""


def trace_call(
    function: Callable[..., Any], arguments: Arguments, live: Live, removed: Mapping[str, torch.Tensor], overrides: Overrides
) -> TracedCall:
    """Trace ``function`` with ``arguments``; ``live`` is left as it was.

    ``removed`` is optimizer state that transformations took out, and that the code of the optimizers still reads. ``overrides``
    are modules that are not traced. Raises :class:`CaptureError` for a step that no graph can express, in one sentence that
    names the user's frame.
    """
    refuse_other_kinds(live)
    return _Tracing(function, arguments, live, removed, overrides).run()


class _Tracing:
    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        live: Live,
        removed: Mapping[str, torch.Tensor],
        overrides: Overrides,
    ) -> None:
        self.function, self.arguments, self.live, self.removed = function, arguments, live, removed
        self.mode = KernelFakeMode()
        self.recorder = StepRecorder(self.mode)
        self.inputs = Inputs(arguments, live, self.mode, self.recorder)
        self.parameters = self.inputs.parameters
        self.owners = {id(fake): fqn.rpartition(".")[0] for fqn, fake in self.parameters.items()}
        self.namer = StepNamer(live.model, self.recorder.graph, self.owners)
        self.recorder.on_node = self.namer.flush
        self.gradients = Gradients(self.parameters, self._read_gradient)
        self.functions = StepFunctions(self.recorder, self.inputs.twins, self.gradients)
        self.wholes = WholeParameters(
            live.sharding,
            self.parameters,
            self.inputs.stored,
            self.namer,
            lambda: self.recorder.paused or self.functions.in_optimizer,
            self._is_gradient,
        )
        self.schedulers = Schedulers()
        self.stepping: Optimizer | None = None
        self.steps_within = 0  # steps of base classes within the one of ``stepping``
        self.step = ExitStack()
        self.state_is_made: Callable[[Optimizer], None] = lambda _: None
        """To be called when optimizer state was made: what it has outside of tensors must not change from then on."""
        self.skipped: torch.Tensor | None = None
        """Set while a gradient scaler steps an optimizer: a tensor that is not 0 if this step is to have no effect."""
        self.anchors = Anchors(overrides, self.mode)
        self.anchors.states = {fqn: fake_twin(self.mode, first) for fqn, first in overrides.first_state.items()}
        for fqn, fake in self.anchors.states.items():
            self.inputs.add("state", fqn, fake)

    def run(self) -> TracedCall:
        try:
            with self._inside():
                paths, spec = self._call()
                self.wholes.refuse_kept()
                # While nothing is recorded, a look at .grad does not count as one by the step.
                with self.recorder.unseen():
                    left, counting = self.gradients.left(), self.gradients.counting()
                # A gradient that was replaced or dropped is in ``left``; what its old tensor holds is nothing to anybody now.
                results = [
                    (value, self._now(value, fake))
                    for value, fake in self.inputs.all
                    if value.role != "hyper" and (value.role != "grad" or value.fqn not in left)
                ]
                specs = {fqn: spec_of(gradient) for fqn, gradient in left.items() if gradient is not None}
                made = {fqn: local_of(gradient) for fqn, gradient in left.items() if gradient is not None}
                results += [(Value("grad", fqn, tuple(g.shape), g.dtype), g) for fqn, g in made.items()]
            inputs = sorted(self.inputs.all, key=lambda pair: _ORDER.index(pair[0].role))
            leaves, given = self._reply(paths)
            given += [(value, self.recorder.node(fake)) for value, fake in results]
            program = self._functional([(value, self.recorder.node(fake)) for value, fake in inputs], given)
            cleared = tuple(fqn for fqn, gradient in left.items() if gradient is None)
            return TracedCall(*program, spec, leaves, counting, cleared, specs, tuple(self.schedulers.calls))
        finally:
            for parameter in self.parameters.values():
                parameter.grad = None

    @contextmanager
    def _inside(self) -> Iterator[None]:
        # The order matters. Modules and optimizers hold the fake twins before a mode is entered. Of several modes the one that
        # was entered last sees a call first: StepFunctions turns real tensors into twins, then WholeParameters exchanges the
        # twins of sharded parameters for gathered ones; and the tape of random draws stands before the recorder.
        model = self.live.model
        with ExitStack() as inside:
            inside.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            inside.callback(register_optimizer_step_post_hook(self._after_step).remove)
            # Modes are of one thread, and autograd would take others for backward on GPUs.
            inside.enter_context(torch.autograd.set_multithreading_enabled(False))
            inside.enter_context(takes_fake_tensors())
            inside.enter_context(tracing.without_onednn())
            inside.enter_context(watching_zero_grad(model, self.live.optimizers, self.recorder, self.gradients))
            inside.enter_context(self.namer.watching(model))
            inside.enter_context(without_fake_caches(model))
            inside.enter_context(unchanged_modules(model, self.inputs.twins))
            inside.enter_context(self.anchors.in_place())
            self.state_is_made = inside.enter_context(in_optimizers(self.live, self.inputs))
            self.inputs.add_removed(self.removed)
            inside.enter_context(self.mode)
            inside.enter_context(self.recorder)
            inside.enter_context(draws_on_tape())
            inside.enter_context(self.wholes.in_place())
            inside.enter_context(self.schedulers.watched())
            inside.enter_context(traced_scaler(self.live.scaler, self.inputs.twins, self._step_unless))
            inside.enter_context(self.functions)
            yield

    def _call(self) -> tuple[list[tuple[str, Any]], Any]:
        """Call the function; the leaves of its result with their paths, and the result's pytree spec."""
        arguments = [self.inputs.twins[id(x)] if isinstance(x, torch.Tensor) else x for x in self.arguments.leaves]
        args, kwargs = pytree.tree_unflatten(arguments, self.arguments.spec)
        before = generators()
        with self._blamed():
            result = self.function(*args, **kwargs)
            refuse_drawn(changes(before, generators()))
        leaves, spec = pytree.tree_flatten_with_path(self.functions.twinned(result))
        found = []
        for key, leaf in leaves:
            path = f"result{pytree.keystr(key)}"
            # A functional collective gives an AsyncCollectiveTensor, which records its wait only at its first use.
            leaf = leaf.trigger_wait() if hasattr(leaf, "trigger_wait") else leaf
            if not isinstance(leaf, (torch.Tensor, torch.SymFloat, *PLAIN)):
                raise CaptureError(
                    f"the step gives a value of type {type(leaf).__name__} at {path}; it can give tensors, plain values, and "
                    "tuples, lists and dicts of them"
                )
            for name, rate in self.inputs.rates.items():
                if leaf is rate:
                    self.schedulers.refuse_rates(self.live.optimizers[int(name.split(".")[1])], path)
            found.append((path, leaf))
        return found, spec

    def _reply(self, paths: Sequence[tuple[str, Any]]) -> tuple[tuple[Leaf, ...], list[tuple[Value, fx.Node]]]:
        """The leaves of the result, and the graph outputs among them; a scalar whose backward was run has the role "loss"."""
        inputs = {id(fake): value for value, fake in self.inputs.all}
        # By memory: a step that gives ``loss.detach()`` gives another tensor than the one whose backward was run.
        # One of torch.func.grad's is none of the step's, and has no storage to be told by.
        losses = {storage_key(loss) for loss in self.functions.losses if not tracing.is_wrapped_by_functorch(loss)}
        leaves: list[Leaf] = []
        outputs: list[tuple[Value, fx.Node]] = []
        for path, given in paths:
            spec, leaf = spec_of(given), local_of(given)
            if id(leaf) in inputs:
                leaves.append(Leaf("input", inputs[id(leaf)], spec))
            elif isinstance(leaf, PLAIN):
                leaves.append(Leaf("plain", leaf))
            elif isinstance(leaf, torch.SymFloat):
                leaves.append(Leaf("output", path))
                outputs.append((Value("value", path, (), None), node_of(leaf)))
            else:
                leaves.append(Leaf("output", path, spec))
                role: Role = "loss" if leaf.dim() == 0 and storage_key(leaf) in losses else "value"
                outputs.append((Value(role, path, tuple(leaf.shape), leaf.dtype), self.recorder.node(leaf)))
        return tuple(leaves), outputs

    def _functional(
        self, inputs: Sequence[tuple[Value, fx.Node]], outputs: Sequence[tuple[Value, fx.Node]]
    ) -> tuple[fx.GraphModule, tuple[Value, ...], tuple[Value, ...]]:
        """The recorded graph made functional, without outputs that the step did not change and gradients that it did not read.

        Each anchor, an operator that stands for a call of an overridden module, becomes what the override puts there.
        """
        graph = self.recorder.graph
        # Inputs that were added in the middle of the trace, such as state, come in any order: all are put in front, by role.
        if first := next((node for node in graph.nodes if node.op != "placeholder"), None):
            for _, node in inputs:
                first.prepend(node)
        with torch.no_grad():  # fake values let go of autograd; their storages stay
            for node in graph.nodes:
                node.meta["val"] = pytree.tree_map(
                    lambda value: value.detach() if isinstance(value, torch.Tensor) else value, node.meta.get("val")
                )
        # All values are outputs while writes are replaced, so that every written input's last value is kept. Those that then
        # turn out to be the input itself are dropped, and dead code with them.
        graph.output([node for _, node in outputs])
        expand(graph, self.anchors, self.recorder.hold)
        make_functional(graph)
        again = self.live.sharding.gathered_again()
        if again:
            gather_again_in_backward(graph, [node for value, node in inputs if value.role != "param" or value.fqn not in again])
        without_passing_through(graph)
        (final,) = graph.output_node().args
        pairs = zip((value for value, _ in outputs), final, strict=True)  # type: ignore[arg-type]  # of nodes
        unchanged = set(inputs)
        kept = [pair for pair in pairs if pair not in unchanged]
        graph.output_node().args = ([node for _, node in kept],)
        graph.eliminate_dead_code()
        used = [(value, node) for value, node in inputs if value.role != "grad" or node.users]
        for _, node in unchanged.difference(used):
            graph.erase_node(node)
        root = torch.nn.Module()
        for name, constant in self.recorder.constants.items():
            root.register_buffer(name, constant)
        return fx.GraphModule(root, graph), tuple(value for value, _ in used), tuple(value for value, _ in kept)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # To make state ``make_state`` steps optimizers, too; those steps are not the user's.
        if self.recorder.paused:
            return
        if not any(optimizer is own for own in self.live.optimizers):
            raise CaptureError(
                f"it steps an optimizer, {type(optimizer).__name__}, that capture_step was not given; pass it in optimizers"
            )
        if self.stepping is optimizer:  # the step of a class that calls its base's, which torch tells as a step, too
            self.steps_within += 1
            return
        self.stepping = optimizer
        self.schedulers.refuse_behind(optimizer)
        if len(args) > 1 or kwargs:  # the first argument is the optimizer itself
            raise CaptureError("it runs a closure; compute loss and gradients before, and call step() without one")
        self.wholes.forget()  # a forward after this step must gather the updated parameters
        self.step.enter_context(stepped_by_parts(optimizer, self.inputs))
        with self.recorder.unseen():
            self._make_state(optimizer)
        self.state_is_made(optimizer)
        if self.skipped is not None:
            self.step.enter_context(self._undone_if(optimizer, self.skipped))
        if tracing.current_autograd_node() is not None:
            self.step.enter_context(self.functions)  # in a hook behind a gradient, where torch has function modes off
        self.functions.in_optimizer = True
        self.before_step = len(self.recorder.graph.nodes)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.steps_within:
            self.steps_within -= 1
        elif not self.recorder.paused:
            self._refuse_mixing(optimizer)
            self.step.close()
            self.stepping, self.functions.in_optimizer = None, False

    def _step_unless(self, optimizer: Optimizer, skipped: torch.Tensor) -> None:
        """Step ``optimizer``, without any effect if ``skipped`` is not 0."""
        self.skipped = skipped
        try:
            optimizer.step()
        finally:
            self.skipped = None

    @contextmanager
    def _undone_if(self, optimizer: Optimizer, skipped: torch.Tensor) -> Iterator[None]:
        """After the block, restore all parameters and state that ``optimizer`` wrote in it, if ``skipped`` is not 0."""
        # Eager asks for the value of found_inf and does not call step(). A graph cannot branch, so it always steps and then
        # selects the old values or the new ones.

        def written() -> dict[tuple[str, str], torch.Tensor]:
            own = {fqn: part for fqn, part in self.inputs.updated.items() if self.live.owners.get(fqn) is optimizer}
            found = {(fqn, ""): part for fqn, part in own.items()}
            for fqn, part in own.items():
                found |= {
                    (fqn, key): one for key, one in optimizer.state.get(part, {}).items() if isinstance(one, torch.Tensor)
                }
            return found

        with torch.no_grad():
            before = {name: tensor.clone() for name, tensor in written().items()}
            yield
            for name, tensor in written().items():
                tensor.copy_(torch.where(skipped != 0, before[name], tensor))

    def _refuse_mixing(self, optimizer: Optimizer) -> None:
        """Raise :class:`CaptureError` for an optimizer that mixes elements of a sharded parameter: it sees only one shard."""
        parted = {fqn for fqn, part in self.inputs.updated.items() if part is not self.parameters[fqn]}
        if any(self.live.owners[fqn] is optimizer for fqn in parted if fqn in self.live.owners):
            nodes = list(self.recorder.graph.nodes)[self.before_step :]
            refuse_looking_at_all(nodes, [optimizer])

    def _make_state(self, optimizer: Optimizer) -> None:
        """Make the state of parameters that are about to be updated for the first time, and add it to the graph's inputs."""
        own = [(fqn, self.inputs.updated[fqn]) for fqn, owner in self.live.owners.items() if owner is optimizer]
        wanted = {fqn: fake for fqn, fake in own if fake.grad is not None and not optimizer.state.get(fake)}
        if not wanted:
            return
        refuse_first_step(optimizer)
        elsewhere = Recorder(self.mode)  # numbers taken from tensors have no value there, and what is recorded is thrown away
        states = [value for state in optimizer.state.values() for value in state.values()]
        for tensor in [*(fake for _, fake in own), *(fake.grad for _, fake in own), *states]:
            if isinstance(tensor, torch.Tensor):
                elsewhere.input("known", tensor)
        with _plain_rates(optimizer), elsewhere.recording():
            make_state([optimizer], list(wanted.values()))
        for fqn, fake in wanted.items():
            for key, value in optimizer.state.get(fake, {}).items():
                if isinstance(value, torch.Tensor):
                    self.inputs.add("state", f"{fqn}.{key}", value)

    def _read_gradient(self, fqn: str, gradient: torch.Tensor) -> None:
        if type(gradient) is type(self.parameters[fqn]):
            self._is_gradient(fqn, gradient)

    def _is_gradient(self, fqn: str, gradient: torch.Tensor) -> None:
        self.namer.is_gradient(self.recorder.node(local_of(gradient)), self.owners[id(self.parameters[fqn])])

    def _now(self, value: Value, fake: torch.Tensor) -> torch.Tensor:
        """The tensor that holds an input after the step: an optimizer may have put another tensor in its state's place."""
        if value.role != "state" or value.fqn in self.anchors.states or value.fqn in self.live.scaling:
            return fake
        fqn, _, key = value.fqn.rpartition(".")
        optimizer = self.live.owners[fqn]
        found = optimizer.state[self.inputs.updated[fqn]].get(key)
        if not isinstance(found, torch.Tensor):
            raise CaptureError(
                f"the optimizer {type(optimizer).__name__} drops its state {key!r} of {fqn} in a step, which no graph can; "
                "keep it, or make it in no step"
            )
        return found

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            doing = f"module {self.namer.failed}" if self.namer.failed else getattr(self.function, "__qualname__", "the step")
            if self.stepping is not None:
                doing = f"the step of the optimizer {type(self.stepping).__name__}"
            text = why(error, steps=self.stepping is not None, gathers=bool(self.live.sharding.travelling))
            raise CaptureError(f"tracing {doing} failed{at_user_frame(error)}: {text}") from error


@contextmanager
def _plain_rates(optimizer: Optimizer) -> Iterator[None]:
    """While inside, learning rates are 1.0 and no gradient scaler is attached: the first state depends on neither."""
    groups = [group for group in optimizer.param_groups if "lr" in group]
    live = [group["lr"] for group in groups]
    scaling = {name: vars(optimizer).pop(name) for name in OF_OPTIMIZERS if name in vars(optimizer)}
    for group in groups:
        group["lr"] = 1.0
    try:
        yield
    finally:
        vars(optimizer).update(scaling)
        for group, rate in zip(groups, live, strict=True):
            group["lr"] = rate
