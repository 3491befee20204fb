"""A folder of finds: each printed as a test that needs nothing but pytest, torch and this package, and read back from it."""

from __future__ import annotations

import hashlib
import keyword
import re
import runpy
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from operator import floordiv, getitem, mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pytest_fxbucket.errors import FxbucketError, named
from pytest_fxbucket.files import write_whole
from pytest_fxbucket.fuzz.finds import KINDS, Find
from pytest_fxbucket.fuzz.judge import judged
from pytest_fxbucket.fuzz.program import role_of, roles_of
from pytest_fxbucket.fuzz.trial import Trial
from pytest_fxbucket.graph.modules import module_stack
from pytest_fxbucket.graph.ops import returned

if TYPE_CHECKING:
    from pytest_fxbucket.fuzz.tried_pass import TriedPass


@dataclass(frozen=True)
class StoredFind:
    """A find and the file that it lies in."""

    path: Path
    text: str
    find: Find


def files_in(folder: Path) -> list[Path]:
    """Tests of ``folder`` in the order of their names; none if there is no such folder.

    Raises FxbucketError for a folder that cannot be read, which would look empty.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.match("test_fuzz_*.py"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FxbucketError(f"{folder} cannot be read: {error.strerror or error}") from error


def replayed(path: Path, subject: TriedPass) -> StoredFind | None:
    """The find that the file ``path`` still shows; None if the pass is mended. Raises FxbucketError if it holds no trial."""
    trial, kind = trial_in(path)
    find = judged(trial, subject, kind)
    return None if find is None else StoredFind(path, path.read_text(encoding="utf-8"), find)


def to_keep(folder: Path, trial: Trial, find: Find, name: str) -> StoredFind:
    """The test of ``find`` against the pass ``name``, to be written to ``folder``."""
    text = text_of_test(trial, find, name)
    number = hashlib.sha256(text.encode()).hexdigest()[:8]
    return StoredFind(folder / f"test_fuzz_{re.sub(r'[^a-z]+', '_', find.kind)}_{number}.py", text, find)


def keep(found: StoredFind) -> None:
    """Write it. Raises FxbucketError if it cannot be written."""
    try:
        found.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(found.path, found.text)
    except OSError as error:
        raise FxbucketError(f"{found.path} cannot be written: {error.strerror or error}") from error


_HEAD = '''"""{kind}, found by fxbucket fuzz --pass {name}.

{says}
"""

from __future__ import annotations
{imports}
import torch

from pytest_fxbucket.fuzz import Program, Trial, problem

PASS = "{name}"
KIND = "{kind}"


def trial() -> Trial:
'''
_TAIL = """

def test_{test}() -> None:
    assert problem(trial(), PASS, KIND) == ""
"""


_FUNCTIONS = {one.__name__: one for one in (floordiv, getitem, mul)}
"""Python functions that graphs call besides operators of torch."""


def text_of_test(trial: Trial, find: Find, name: str) -> str:
    """The source of a test that fails while the pass ``name`` has the fault."""
    lines = list(_program(trial))
    functions = [one for one in _FUNCTIONS if any(f"({one}, " in line for line in lines)]
    imports = f"\nfrom operator import {', '.join(functions)}\n" if functions else ""
    # It goes into a docstring, which no quote may end and no backslash change.
    plain = " ".join(re.sub(r'["\\]', "'", find.says).split())
    says = textwrap.fill(plain, 119, break_long_words=False, break_on_hyphens=False)
    head = _HEAD.format(kind=find.kind, name=name, says=says, imports=imports)
    lines = [line if '"' in line else line.replace("'", '"') for line in lines]
    return head + "".join(f"    {line}\n" for line in lines) + _TAIL.format(test=find.kind.replace(" ", "_"))


def trial_in(path: Path) -> tuple[Trial, str]:
    """The trial that the file ``path`` holds, and the kind of what was found with it. Raises FxbucketError if it holds none."""
    try:
        found = runpy.run_path(str(path))
        trial, kind = found["trial"](), found["KIND"]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise FxbucketError(f"{path} holds no trial: {named(error)}") from error
    if not isinstance(trial, Trial) or kind not in KINDS:
        raise FxbucketError(f"{path} holds no trial: expected trial() -> Trial, and KIND, one of {', '.join(KINDS)}")
    return trial, kind


def _program(trial: Trial) -> Iterator[str]:
    program, graph = trial.program, trial.graph_module.graph
    groups = {name: lists for name, lists in program.groups.items() if any(_names_group(node, name) for node in graph.nodes)}
    yield f"made = Program({', '.join([str(program.world), *([repr(groups)] if groups else [])])})"
    names = _Names(graph)
    # What Program starts with; a line is printed only where the module or the direction changes.
    module: str | None = "a"
    backward = False
    for node in graph.nodes:
        if node.op == "placeholder":
            yield f"{names.of(node)} = {_input_text(node)}"
        elif node.op == "call_function":
            stack = module_stack(node)
            own, behind = (stack[-1][0] if stack else None), "autograd_backward" in node.meta
            if own != module:
                module = own
                yield f"made.module = {own!r}"
            if behind != backward:
                backward = behind
                yield f"made.backward = {behind}"
            yield f"{names.of(node)} = made.call({', '.join(_call(node, names))})"
        elif node.op != "output":
            raise FxbucketError(f"a program with a node {node.op} cannot be printed")
    roles = roles_of(graph.output_node())
    said = [f"roles={roles!r}"] if roles else []
    yield f"graph_module = made.returns({', '.join([*(names.of(node) for node in returned(graph.output_node())), *said])})"
    said = [repr(trial.plan)]
    said += [repr(dict(trial.options))] if trial.options or trial.wrong else []
    said += [repr(trial.wrong)] if trial.wrong else []
    yield f"return Trial(made, graph_module, {', '.join(said)})"


def _names_group(node: fx.Node, name: str) -> bool:
    return name in node.args or name in node.kwargs.values()


def _input_text(node: fx.Node) -> str:
    value = node.meta["val"]
    if any(not isinstance(size, int) for size in value.shape):
        # Numbers are enough: inputs of equal rows get one symbol again.
        sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
        return f"made.dynamic({', '.join([repr(node.name), *map(repr, sizes)])})"
    said = [] if value.dtype == torch.float32 else [f"dtype={value.dtype}"]
    said += [f"role={role_of(node)!r}"] if role_of(node) else []
    return f"made.given({', '.join([repr(node.name), *map(repr, value.shape), *said])})"


def _call(node: fx.Node, names: _Names) -> Iterator[str]:
    target: Any = node.target
    yield target.__name__ if target in _FUNCTIONS.values() else f"torch.ops.{target}"
    for argument in node.args:
        yield names.shown(argument)
    for name, argument in node.kwargs.items():
        yield f"{name}={names.shown(argument)}"


class _Names:
    """Python names of nodes, short where that can be."""

    def __init__(self, graph: fx.Graph) -> None:
        self.known: dict[fx.Node, str] = {}
        # What the printed test calls by these names already.
        taken = {"made", "torch", "graph_module", *_FUNCTIONS}
        for node in graph.nodes:
            short = re.sub(r"_(default|tensor|into_tensor|int|scalar)(?=_|$)", "", node.name.lower()).strip("_") or "value"
            short = f"{short}_" if keyword.iskeyword(short) else short
            stem, number = re.sub(r"_\d+$", "", short), 1
            name = stem
            while name in taken:
                number += 1
                name = f"{stem}_{number}"
            taken.add(name)
            self.known[node] = name

    def of(self, node: fx.Node) -> str:
        return self.known[node]

    def shown(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return self.of(value)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(self.shown, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        # The repr of a dtype begins with ``torch.``, that of a device does not.
        return f"torch.{value!r}" if isinstance(value, torch.device) else repr(value)
