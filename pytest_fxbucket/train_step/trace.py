"""Traces one call of a user's step function into a functional graph whose inputs and outputs have names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pytest_fxbucket.capture.draws import draws_on_tape
from pytest_fxbucket.capture.model import fake_twin
from pytest_fxbucket.capture.optimizers.recorder import Recorder
from pytest_fxbucket.capture.optimizers.state import make_state
from pytest_fxbucket.capture.override.anchors import Anchors
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.fake_tensors import KernelFakeMode, takes_fake_tensors
from pytest_fxbucket.compat.tracing import untraceable
from pytest_fxbucket.errors import CaptureError, FxbucketError
from pytest_fxbucket.step.roles import Value
from pytest_fxbucket.train_step.graph import Made, Reply, finish
from pytest_fxbucket.train_step.live import refuse_first_step
from pytest_fxbucket.train_step.recorder import Gradients, StepFunctions, StepNamer, StepRecorder, watching_zero_grad
from pytest_fxbucket.train_step.stand_ins import Inputs, in_optimizers, refuse_other_kinds, unchanged_modules
from pytest_fxbucket.user_frame import user_frame

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from pytest_fxbucket.capture.override.overrides import Overrides
    from pytest_fxbucket.train_step.guards import Arguments
    from pytest_fxbucket.train_step.live import Live


@dataclass(frozen=True)
class Traced:
    """One call as a graph."""

    made: Made
    gradients: Mapping[str, bool]
    """By FQN whether a parameter had a gradient before the step, where the graph is right only for that."""
    cleared: tuple[str, ...]
    """Parameters that have no gradient after the step."""


def trace_call(
    function: Callable[..., Any], arguments: Arguments, live: Live, removed: Mapping[str, torch.Tensor], overrides: Overrides
) -> Traced:
    """Trace ``function`` with ``arguments``; ``live`` is left as it was.

    ``removed`` is state that transformations took out of the optimizers, which their own code still needs; ``overrides`` are
    modules that are not traced. Raises :class:`CaptureError` in one sentence, with the user's frame, for what a graph cannot
    say.
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
        self.stepping: Optimizer | None = None
        self.anchors = Anchors(overrides, self.mode, unused="refused")
        self.anchors.states = {fqn: fake_twin(self.mode, first) for fqn, first in overrides.first_state.items()}
        for fqn, fake in self.anchors.states.items():
            self.inputs.add("state", fqn, fake)

    def run(self) -> Traced:
        try:
            with self._inside():
                reply = self._call()
                left = self._unseen(self.gradients.left)
                made = [(Value("grad", fqn, tuple(g.shape), g.dtype), g) for fqn, g in left.items() if g is not None]
                results = [
                    (value, self._now(value, fake))
                    for value, fake in self.inputs.all
                    if value.role != "hyper" and (value.role != "grad" or value.fqn not in left)
                ]
                counting = self._unseen(self.gradients.counting)
            cleared = tuple(fqn for fqn, gradient in left.items() if gradient is None)
            return Traced(finish(self.recorder, self.inputs.all, reply, [*results, *made], self.anchors), counting, cleared)
        finally:
            for parameter in self.parameters.values():
                parameter.grad = None

    @contextmanager
    def _inside(self) -> Iterator[None]:
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        model = self.live.model
        try:
            with ExitStack() as inside:
                inside.enter_context(torch.autograd.set_multithreading_enabled(False))
                inside.enter_context(takes_fake_tensors())
                inside.enter_context(watching_zero_grad(model, self.live.optimizers, self._drop))
                inside.enter_context(self.namer.watching(model))
                inside.enter_context(unchanged_modules(model, self.inputs.twins))
                inside.enter_context(self.anchors.in_place())
                inside.enter_context(in_optimizers(self.live, self.inputs.twins, self.inputs.rates))
                self.inputs.add_removed(self.removed)
                inside.enter_context(self.mode)
                inside.enter_context(self.recorder)
                inside.enter_context(draws_on_tape())
                inside.enter_context(self.functions)
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _call(self) -> Reply:
        arguments = [self.inputs.twins[id(x)] if isinstance(x, torch.Tensor) else x for x in self.arguments.leaves]
        args, kwargs = pytree.tree_unflatten(arguments, self.arguments.spec)
        with self._blamed():
            result = self.function(*args, **kwargs)
        return Reply.of(self.functions.twinned(result), self.functions.losses)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.recorder.paused:
            return
        if not any(optimizer is own for own in self.live.optimizers):
            raise CaptureError(
                f"it steps an optimizer, {type(optimizer).__name__}, that capture_step was not given; pass it in optimizers"
            )
        self.stepping = optimizer
        if len(args) > 1 or kwargs:
            raise CaptureError("it runs a closure; compute loss and gradients before, and call step() without one")
        self._unseen(lambda: self._make_state(optimizer))
        self.functions.in_optimizer = True

    def _after_step(self, *_: Any) -> None:
        if not self.recorder.paused:
            self.stepping, self.functions.in_optimizer = None, False

    def _make_state(self, optimizer: Optimizer) -> None:
        """Make the state of parameters that are about to be updated for the first time; it is new inputs of the graph."""
        own = [(fqn, self.parameters[fqn]) for fqn, owner in self.live.owners.items() if owner is optimizer]
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

    def _unseen(self, look: Callable[[], Any]) -> Any:
        """Give what ``look`` gives, and record nothing of it."""
        self.recorder.paused = True
        try:
            return look()
        finally:
            self.recorder.paused = False

    def _drop(self, parameters: Iterable[torch.Tensor]) -> None:
        self._unseen(lambda: self.gradients.drop(parameters))

    def _read_gradient(self, fqn: str, gradient: torch.Tensor) -> None:
        if type(gradient) is not type(self.parameters[fqn]):
            return
        self.namer.is_gradient(self.recorder.node(gradient), self.owners[id(self.parameters[fqn])])

    def _now(self, value: Value, fake: torch.Tensor) -> torch.Tensor:
        """What stands in the place of an input after the step: an optimizer may put another tensor into its state."""
        if value.role != "state" or value.fqn in self.anchors.states:
            return fake
        fqn, _, key = value.fqn.rpartition(".")
        found: torch.Tensor = self.live.owners[fqn].state[self.parameters[fqn]][key]
        return found

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            frame = user_frame(error)
            where = f" at {frame}" if frame else ""
            if isinstance(error, FxbucketError):
                text = str(error)
            else:
                text = untraceable(error) or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise CaptureError(f"tracing {self._doing()} failed{where}: {text}") from error

    def _doing(self) -> str:
        if self.stepping is not None:
            return f"the step of the optimizer {type(self.stepping).__name__}"
        module = self.namer.failed
        return f"module {module}" if module else getattr(self.function, "__qualname__", "the step")


@contextmanager
def _plain_rates(optimizer: Optimizer) -> Iterator[None]:
    """While inside, learning rates are plain numbers, any: a state's first tensors do not depend on them."""
    groups = [group for group in optimizer.param_groups if "lr" in group]
    live = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 1.0
    try:
        yield
    finally:
        for group, rate in zip(groups, live, strict=True):
            group["lr"] = rate
