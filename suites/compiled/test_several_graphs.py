"""Graph breaks, symbolic sizes, ties: the graphs that ``torch.compile`` makes of one model, and what of a plan is in which."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.collectives import read_launch
from pytest_fxbucket.graph.modules import module_stack
from pytest_fxbucket.passes import bucketing_backend
from suites.compiled.small_nets import PLAN, net, step, words

pytestmark = pytest.mark.usefixtures("two_fake_ranks")


def entries_of(backend: Any) -> list[list[str]]:
    return [[bucket.entry for bucket in report.buckets] for report in backend.reports]


def test_a_graph_break_between_modules_leaves_each_graph_what_it_has_of_the_entries() -> None:
    backend = bucketing_backend(["layers.*", ["embed", "head"]])
    step(torch.compile(net(breaks="between", depth=2, reshard=False), backend=backend))
    forward, backward = ["layers.0", "layers.1"], ["layers.1", "layers.0"]
    assert sorted(entries_of(backend)) == [*[["embed+head"]] * 4, forward, backward]


def test_a_graph_break_within_a_module_hides_its_name_and_is_said() -> None:
    with pytest.raises(PlanError, match=r'"embed" matches nothing.*3 functions.*fullgraph=True'):
        step(torch.compile(net(breaks="within", depth=2), backend=bucketing_backend(PLAN)))


def test_collectives_that_name_no_module_are_said_where_an_entry_has_none() -> None:
    """As SimpleFSDP's all-reduces of replicated parameters."""

    def named(node: fx.Node) -> Any:
        return [] if read_launch(node) else module_stack(node)

    with pytest.raises(PlanError, match=r'"embed" .*; \d+ collectives named no module: bucket by size, or'):
        step(torch.compile(net(), backend=bucketing_backend(PLAN, module_stack_fn=named)))


def test_the_gradients_of_a_tied_weight_share_a_launch() -> None:
    backend = bucketing_backend(["embed+head", "layers.*"])
    step(torch.compile(net(tied=True, reshard=False), backend=backend, fullgraph=True))
    forward, backward = backend.reports
    assert (forward.launches_before, forward.launches_after) == (4, 2)  # AOT autograd gathers the tied weight once
    assert (backward.launches_before, backward.launches_after) == (5, 2)  # and reduces its gradients apart


def test_batches_of_other_sizes_compile_one_graph_where_the_batch_is_marked_dynamic() -> None:
    backend = bucketing_backend(PLAN)
    forward = torch.compile(net(), backend=backend, fullgraph=True)
    for batch in (3, 7, 2):
        given = words(batch=batch)
        torch._dynamo.mark_dynamic(given, 0)  # raises where something specialises it
        forward(given).sum().backward()
    assert [report.launches_after for report in backend.reports] == [3, 5]
