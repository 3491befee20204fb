"""The text of a graph without roles: parameters and gradients as the tracer names them, groups by size, alike on every rank."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx, nn

from fixtures.models import traced
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import PlanError, UsageError
from pytest_fxbucket.graph_view.roles_by_tracer import group_names
from pytest_fxbucket.pytest_plugin.expectations.texts import text_of

c10d = torch.ops._c10d_functional


class Sharded(nn.Module):
    """A linear whose weight is gathered by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        assert group is not None
        full = functional.all_gather_tensor_autograd(self.inner.weight, 0, group)
        return (x @ full.t()).sum()


def joint() -> fx.GraphModule:
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    assert _dynamo_graph_capture_for_export
    with ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, Sharded(), (torch.randn(3, 4),)).graph_module


def test_parameters_and_gradients_have_the_names_that_the_tracer_gives_them() -> None:
    with fake_world(0, 2):
        text = text_of(joint())
    assert "  launch  all_gather inner\n" in text
    assert "  launch  reduce_scatter inner\n" in text
    assert "inner.weight 8" in text
    assert text.index("forward\n") < text.index("backward\n") < text.index("reduce_scatter")


def test_the_text_is_the_same_on_every_rank_whatever_the_graph_calls_its_nodes() -> None:
    texts = set()
    for rank in (0, 3):
        with fake_world(rank, 4):
            graph = traced.bare()[0].graph
            texts.add(text_of(graph))
            for number, node in enumerate(graph.nodes):
                if node.op != "placeholder":
                    node._rename(f"other_{rank}_{number}")
            texts.add(text_of(graph))
    (text,) = texts
    assert "layers.{i}.parameter" in text
    assert "4 ranks 1 apart" in text


def test_entries_group_parameters_and_what_they_miss_keeps_its_own_name() -> None:
    with fake_world(0, 4):
        graph = traced.bare()[0]
        text = text_of(graph, None, [["layers.0", "layers.1"]])
    assert "  launch  all_gather layers.0+layers.1\n" in text
    assert "  launch  all_gather layers.2.parameter\n" in text
    with pytest.raises(PlanError, match=r'entry "layer.0" matches nothing; did you mean "layers.0"'):
        text_of(graph, None, ["layer.0"])


def test_groups_alike_are_told_apart_by_the_order_of_their_launches() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for name in ("tp", "dp", "tp", "dp:gather"):
        graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, name))
    graph.call_function(c10d.all_reduce.default, (x, "sum", "other"))
    assert group_names(graph) == {
        "tp": "2 ranks",
        "dp": "2 ranks #2",
        "dp:gather": "2 ranks #2 (own)",
        "other": "unknown ranks",
    }


@pytest.mark.parametrize(("given", "text"), [("a", "a\n"), ("a\n", "a\n"), ("a\r\nb\r\n", "a\nb\n"), ("", "\n")])
def test_a_text_is_itself_with_a_line_feed_at_the_end(given: str, text: str) -> None:
    assert text_of(given) == text


def test_graphs_of_one_step_that_look_alike_from_outside_are_all_in_its_text(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        alike="""
            import torch
            from torch import fx
            from pytest_fxbucket.capture import TracedStep

            def one(operator):
                graph = fx.Graph()
                x = graph.placeholder("x")
                node = graph.call_function(operator, (x,))
                x.meta["val"], node.meta["val"] = torch.empty(8, device="meta"), torch.empty(8, device="meta")
                graph.output((node,))
                return fx.GraphModule(torch.nn.Module(), graph)

            def build():
                graphs = {"forward": one(torch.ops.aten.neg.default), "backward": one(torch.ops.aten.exp.default)}
                return TracedStep(graphs, {phase: (torch.ones(8),) for phase in graphs})
        """,
        test_it="""
            import pytest
            from pytest_fxbucket.pytest_plugin.expectations.texts import text_of

            @pytest.mark.fxbucket_plan("plan.toml")
            def test_it(fxbucket_graph, fxbucket_run):
                text = text_of(fxbucket_graph, fxbucket_run)
                assert [line for line in text.splitlines() if line.startswith("graph ")] == ["graph forward", "graph backward"]
        """,
    )
    plan = '[graph]\nfactory = "alike:build"\n[parallel]\ndp_shard = 2\n[bucket]\nenabled = false\nby = "size"\n'
    (pytester.path / "plan.toml").write_text(plan)
    pytester.runpytest_inprocess("test_it.py").assert_outcomes(passed=1)


def test_a_text_that_cannot_be_written_is_named() -> None:
    with pytest.raises(UsageError, match=r"character 1 of the text, .* cannot be written in UTF-8"):
        text_of("a\udc80")
