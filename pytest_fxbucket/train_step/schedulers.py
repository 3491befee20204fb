"""Learning rate schedulers that a step calls: they are not traced, but called after each run of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.errors import CaptureError

Call = Callable[[], None]


@dataclass
class Schedulers:
    """The schedulers that a step called while it was traced, in order."""

    calls: list[Call] = field(default_factory=list)
    stepped: list[LRScheduler] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While inside, ``step()`` of a scheduler only notes the call.

        It raises :class:`CaptureError` for an argument that is a tensor. So does ``get_last_lr()``, which would be of this call
        in all later ones.
        """
        with ExitStack() as inside:
            for kind in _kinds(LRScheduler):
                # To patch the base alone would miss kinds with a ``step`` of their own; others inherit what is patched.
                if "step" in vars(kind):
                    inside.enter_context(patch.object(kind, "step", self._noting(vars(kind)["step"])))
                if "get_last_lr" in vars(kind):
                    inside.enter_context(patch.object(kind, "get_last_lr", _refuse_last_rates))
            yield

    def refuse_rates(self, optimizer: Optimizer, path: str) -> None:
        """Raise :class:`CaptureError` if a scheduler of ``optimizer``, whose rate the step gives at ``path``, was called."""
        if any(getattr(one, "optimizer", None) is optimizer for one in self.stepped):
            raise CaptureError(
                f"the step gives a learning rate at {path} and calls its scheduler, which a captured step does when all is "
                "done; read it between steps"
            )

    def refuse_behind(self, optimizer: Optimizer) -> None:
        """Raise :class:`CaptureError` if a scheduler of ``optimizer``, which is about to step, was called already."""
        if early := next((one for one in self.stepped if getattr(one, "optimizer", None) is optimizer), None):
            raise CaptureError(
                f"the scheduler {type(early).__name__} is called before its optimizer steps, and a captured step calls it when "
                "all is done; call it behind the last step() of its optimizer"
            )

    def _noting(self, function: Callable[..., None]) -> Callable[..., None]:
        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
            if pytree.tensors_in((args, kwargs)):
                raise CaptureError(
                    f"the scheduler {type(scheduler).__name__} is given a tensor, whose value is known only when the step "
                    "runs; return the tensor, and call the scheduler between steps"
                )
            self.stepped.append(scheduler)
            self.calls.append(lambda: function(scheduler, *args, **kwargs))

        return step


def _refuse_last_rates(scheduler: LRScheduler) -> None:
    raise CaptureError(
        f"the step calls get_last_lr() of {type(scheduler).__name__}, a number that a captured step would keep; read it "
        "between steps"
    )


def _kinds(kind: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)
