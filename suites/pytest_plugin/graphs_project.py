"""Files of a user's project whose tests look at small graphs, made by hand.

Runs within this process must find torch, and what registers operators with it, imported: they forget what they import, and
neither can be imported twice. So this module does in the beginning what they do.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

import fixtures.models.traced
from pytest_fxbucket.checks.registry import CHECKS
from pytest_fxbucket.golden.mismatch import mismatch_lines
from pytest_fxbucket.pytest_plugin.expectations.texts import text_of

GRAPHS = '''
import torch
import torch.distributed._functional_collectives
from torch import fx

c10d = torch.ops._c10d_functional
aten = torch.ops.aten

def make(late=False, size=8):
    """Two linears, whose weights are gathered, the second one before the first is waited for; or after it."""
    graph = fx.Graph()
    x, *weights = (graph.placeholder(name) for name in ("x", "a_weight", "b_weight"))
    for node in (x, *weights):
        node.meta["val"] = torch.empty(size, device="meta")
    def call(target, module, *args):
        node = graph.call_function(target, args)
        node.meta["nn_module_stack"] = {module: (module, torch.nn.Linear)}
        shape = 2 * size if target is c10d.all_gather_into_tensor.default else args[0].meta["val"].shape
        node.meta["val"] = torch.empty(shape, device="meta")
        return node
    launch = lambda name, weight: call(c10d.all_gather_into_tensor.default, name, weight, 2, "0")
    first = launch("layers.0", weights[0])
    second = None if late else launch("layers.1", weights[1])
    one = call(aten.neg.default, "layers.0", call(c10d.wait_tensor.default, "layers.0", first))
    second = second or launch("layers.1", weights[1])
    two = call(aten.neg.default, "layers.1", call(c10d.wait_tensor.default, "layers.1", second))
    graph.output((one, two))
    return fx.GraphModule(torch.nn.Module(), graph)
'''
"""Module ``graphs``: ``make(late=False, size=8)`` gives a GraphModule."""

_made: dict[str, Any] = {}
exec(GRAPHS, _made)
LATE = mismatch_lines(text_of(_made["make"]()), text_of(_made["make"](late=True)), "")
"""What is said where a golden of `make()` meets `make(late=True)`."""
assert CHECKS
assert fixtures.models.traced


def make_project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with the module `graphs` and a folder `tests`."""
    pytester.makepyfile(graphs=GRAPHS)
    pytester.mkdir("tests")
    pytester.makeini("[pytest]\npythonpath = .\n")
    return pytester


def write(text: str, **change: str) -> None:
    """Write tests/test_x.py, with words replaced."""
    for before, after in change.items():
        text = text.replace(before, after)
    Path("tests/test_x.py").write_text(textwrap.dedent(text))


def run(user: pytest.Pytester, *args: str) -> pytest.RunResult:
    """Run pytest in this process."""
    return user.runpytest_inprocess("-p", "no:cacheprovider", *args)
