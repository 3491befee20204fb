"""``torch.compile(model, backend=bucketing_backend(...))``: each graph bucketed, and nothing silently not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.passes import bucketing_backend
from pytest_fxbucket.passes.report import PassReport
from suites.compiled.small_nets import PLAN, net, step

pytestmark = pytest.mark.usefixtures("two_fake_ranks")
EACH = {"embed": 1, "layers.0": 3, "head": 1}
"""Parameters of each entry."""


def members(report: PassReport, kind: str) -> dict[str, int]:
    return {bucket.entry: len(bucket.members) for bucket in report.buckets if bucket.kind == kind}


def trained(model: nn.Module, *args: Any, fullgraph: bool = True, **options: Any) -> tuple[PassReport, ...]:
    """Reports of one step with ``bucketing_backend(*args, **options)``."""
    backend = bucketing_backend(*args, **options)
    step(torch.compile(model, backend=backend, fullgraph=fullgraph))
    return backend.reports


def test_forward_and_backward_are_bucketed_apart_by_the_names_of_the_plan() -> None:
    forward, backward = trained(net(reshard=False, param_dtype=torch.bfloat16), PLAN)
    assert (forward.launches_before, forward.launches_after) == (5, 3)
    assert members(forward, "all_gather") == EACH
    assert (backward.launches_before, backward.launches_after) == (5, 3)
    assert members(backward, "reduce_scatter") == EACH
    assert forward.left_alone == backward.left_alone == ()
    sent = {bucket.dtype for report in (forward, backward) for bucket in report.buckets}
    assert sent == {"bfloat16"}, "shards are cast before the gather, and packed as they are sent"


def test_what_backward_gathers_again_is_a_bucket_of_backward() -> None:
    forward, backward = trained(net(reshard=True), PLAN)
    assert members(forward, "all_gather") == EACH
    gathered = members(backward, "all_gather")
    assert gathered.keys() == {"layers.0", "head"}  # nothing in backward reads the embedding
    assert {bucket.direction for bucket in backward.buckets} == {"backward"}
    assert members(backward, "reduce_scatter") == EACH


def test_a_compiler_of_the_user_s_gets_the_bucketed_graphs_of_neighbours_that_fill_a_bucket() -> None:
    launches = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        launches.append(sum(launch_kind(node) is not None for node in gm.graph.nodes))
        return make_boxed_func(gm.forward) if len(launches) == 1 else gm.forward

    trained(net(reshard=False), by="size", cap_mb=1, compiler=compiler)
    assert launches == [1, 1]


def test_an_entry_that_no_graph_has_is_an_error_at_the_end_of_the_first_backward() -> None:
    model = net(depth=2)
    backend = bucketing_backend(["embed", "layers.[0-2]", "head"])
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):  # and again: nobody trains on by trying once more
        with pytest.raises(PlanError) as error:
            step(compiled)
        said = 'bucketing_backend: entry "layers.2" matches nothing; "layers" has children 0..1'
        assert str(error.value).startswith(said)
    assert all(parameter.grad is not None for parameter in model.parameters())  # the end of it, not before


def test_a_model_without_collectives_is_an_error_that_says_so() -> None:
    with pytest.raises(PlanError, match="no graph compiled so far launches a collective"):
        trained(nn.Embedding(16, 16), ["embed"])


def test_what_has_no_gradients_is_checked_when_asked() -> None:
    backend = bucketing_backend(["layers.0", "layers.5"])
    with torch.no_grad():
        torch.compile(net(), backend=backend)(torch.zeros(2, 3, dtype=torch.int64))
    assert backend.reports[0].launches_after < 5
    with pytest.raises(PlanError, match=r'"layers.5" matches nothing'):
        backend.check()


def test_errors_of_the_pass_come_out_of_torch_compile_with_their_sentence() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
        trained(net(), ["layers", "layers.0"])
    assert 'PlanError: bucketing_backend: entries "layers" and "layers.0" both hold' in str(error.value)
    assert isinstance(error.value.__cause__ or error.value.inner_exception, PlanError)


@pytest.mark.parametrize(
    ("args", "options", "said"),
    [
        ((PLAN,), {"prefech": 1}, 'takes no option "prefech"; did you mean "prefetch"?'),
        ((PLAN,), {"prefetch": -1}, "[overlap] prefetch must be"),
        ((PLAN,), {"cap_mb": "25"}, "[bucket] cap_mb must be a number of MB"),
        ((PLAN,), {"cluster": 3}, "[cluster] must be a table, not 3"),
        ((PLAN,), {"compiler": "inducter"}, 'compiler must be "eager", "inductor" or a callable, not "inducter"'),
        ((), {}, "[bucket] plan has no entry"),
        ((["layers.*"],), {"cap_mb": [1, 2]}, "a cap for each entry cannot be told where an entry is a star"),
    ],
)
def test_options_that_cannot_be_had_are_refused_at_once(args: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        bucketing_backend(*args, **options)
    assert str(error.value).removeprefix("bucketing_backend").lstrip(": ").startswith(said)


def test_a_launch_in_no_entry_is_left_allowed_or_an_error_as_the_plan_says() -> None:
    forward, _ = trained(net(), ["layers.0"])
    assert [(bucket.entry, len(bucket.members)) for bucket in forward.buckets] == [("layers.0", 3)]
    assert len(forward.left_alone) == 2
    torch._dynamo.reset()
    forward, _ = trained(net(), ["layers.0"], unplanned="root")
    assert members(forward, "all_gather") == {"layers.0": 3, "root": 2}
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="2 collectives are in no entry"):
        trained(net(), ["layers.0"], unplanned="error")


def test_caps_belong_to_the_entries_of_the_plan_though_a_graph_has_some_of_them() -> None:
    reports = trained(net(breaks="between", reshard=False), PLAN, fullgraph=False, cap_mb=[1, 0.0001, 1])
    entries = [sorted(bucket.entry for bucket in report.buckets) for report in reports]
    assert entries.count(["layers.0"] * 3) == 2


def test_places_by_hand_are_taken_where_they_are_and_missed_where_they_never_were() -> None:
    plan = ["embed", "layers.*", "head"]
    forward, _ = trained(net(depth=2), plan, launch_at={"forward": {"head": "embed"}, "backward": {"layers.0": "head"}})
    assert [bucket.entry for bucket in forward.buckets].index("head") < 3
    torch._dynamo.reset()
    with pytest.raises(PlanError, match=r'launch_at.backward: entry "embed" has no bucket in any graph of backward'):
        trained(net(), PLAN, launch_at={"backward": {"embed": "head"}})
