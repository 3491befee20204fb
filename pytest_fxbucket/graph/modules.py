"""The modules and the direction of a node, read off what different tracers write into ``node.meta``.

A tracer writes a node's modules, outermost first, as plain FQNs (``layers.0``) or as dynamo's source expressions
(``L['self']._modules['layers']['0']``, ``L['model'].layers.0``). Either may also contain names of what wraps the model: the
variable that holds it, ``torch.compile``, activation checkpointing, a module of the user's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.words import show

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.step.roles import Direction

ModuleStackFn = Callable[[Any], Sequence[tuple[str, type]]]
"""From a node to its modules as (FQN, class), outermost first."""
Path = tuple[str, ...]
"""Names on the way to a module, one for each module."""

MERGED = "fxbucket_entry"
"""Key in ``node.meta`` of the plan entry that a node made by our pass is for."""
ANNOTATIONS = ("module_fqn", "module_path")
"""Keys under which ``torch.fx.traceback.annotate`` is given a module's FQN: the names that torch's own examples use."""
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names that torch's wrappers give the module that they wrap."""
NO_MODULES = WRAPPERS | {"_modules", "__dict__", "_parameters", "_buffers"}
"""Names in a tracer's spelling of a module that are no modules to the model's author."""

OTHER_DIRECTION: dict[str, Direction] = {"forward": "backward", "backward": "forward"}

_VARIABLE = re.compile(r"^[LG]\['([^']*)'\]")
_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|([^.\[\]]+)")


def module_stack(node: fx.Node) -> list[tuple[str, Any]]:
    """Modules of ``node`` as its tracer wrote them, outermost first; empty if it wrote none.

    They are read from ``nn_module_stack`` in forward, ``fwd_nn_module_stack`` in backward, else from an annotation of one of
    the keys :data:`ANNOTATIONS`. Empty for a node that our pass made: it is for all modules of its entry, and its stack is of
    one member.
    """
    if MERGED in node.meta:
        return []
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return list(stack.values()) if stack else annotated(node)


def module_of(node: fx.Node) -> str:
    """FQN of the innermost module that ``node`` ran in; empty at the root, and if its tracer wrote none."""
    stack = module_stack(node)
    return ".".join(module_path(stack[-1][0])) if stack else ""


def annotated(node: fx.Node) -> list[tuple[str, Any]]:
    """The module that ``node`` is annotated with (its class is not known) as a stack; nothing without an annotation."""
    notes = node.meta.get("custom")
    if isinstance(notes, dict):
        for key in ANNOTATIONS:
            if isinstance(notes.get(key), str):
                return [(notes[key], None)]
    return []


@lru_cache(maxsize=1 << 16)
def module_path(name: str) -> Path:
    """The parts of ``layers.0``, from a module's name as tracers spell it; without the variable and torch's wrappers."""
    steps = _steps(name)
    return tuple(steps) if NO_MODULES.isdisjoint(steps) else tuple(part for part in steps if part not in NO_MODULES)


def within(name: str, inner: str) -> str:
    """``name``, a module's name as tracers spell it, as an FQN below the module ``inner``; unchanged if it is not below it."""
    steps, outer = [part for part in _steps(name) if part in WRAPPERS or part not in NO_MODULES], inner.split(".")
    return ".".join(steps[len(outer) :]) if steps[: len(outer)] == outer else name


def variable(name: str) -> str:
    """``model`` of dynamo's ``L['model'].layers.0``: the variable that holds the model; empty if ``name`` has none."""
    found = _VARIABLE.match(name) if name.startswith(("L[", "G[")) else None
    return found[1] if found else ""


def wraps(name: str) -> int:
    """How many of torch's wrappers ``name`` leads through."""
    return sum(part in WRAPPERS for part in _steps(name)) if "_" in name else 0


def _steps(name: str) -> list[str]:
    """The names between dots and brackets of ``name``, without the variable."""
    if name.startswith(("L[", "G[")):
        name = _VARIABLE.sub("", name)
    if "[" in name:
        return ["".join(found) for found in _STEP.findall(name)]
    return [part for part in name.split(".") if part]


def wrong_stack(stack: object) -> str:
    """What is wrong with ``stack``, the result of a :data:`ModuleStackFn`, as the end of a sentence; empty if nothing is."""
    if not isinstance(stack, (list, tuple)):
        return f"module_stack_fn gave {show(stack)}, expected a list of (module FQN, class), outermost first"
    for item in stack:
        if not isinstance(item, (list, tuple)) or not item or not isinstance(item[0], str):
            return f"module_stack_fn gave a list with {show(item)} in it, expected (module FQN, class)"
    return ""


def merged_parts(node: fx.Node) -> tuple[Path, ...]:
    """The modules of a merged launch of our pass, or of a node around it: the parts of its entry; empty for other nodes."""
    entry = node.meta.get(MERGED)
    return tuple(module_path(part) for part in entry.split("+")) if isinstance(entry, str) else ()


def shared_path(paths: Iterable[Path]) -> Path:
    """The longest path that all of ``paths`` begin with."""
    found = list(paths)
    if not found:
        return ()
    # The least and the greatest differ first of all: what they have in common, all between them have.
    first, last = min(found), max(found)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def direction_of(node: fx.Node) -> Direction:
    """Forward or backward by the marks that tracers leave; forward where there is none."""
    # Marks of autograd and of torch's partitioner. AOTAutograd also gives a backward node the stack of its forward node.
    meta = node.meta
    if meta.get("autograd_backward") or meta.get("partitioner_tag") == "is_backward":
        return "backward"
    return "backward" if "fwd_nn_module_stack" in meta and not meta.get("nn_module_stack") else "forward"
