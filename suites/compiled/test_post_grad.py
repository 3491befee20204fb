"""``bucketing_post_grad_pass`` as inductor's post-grad pass: the order it keeps, the cache, and entries that match nothing."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import get_code

import pytest_fxbucket
from fixtures.compiled import train
from pytest_fxbucket.compat.compilers import moving_nothing
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.passes import bucketing_backend, bucketing_post_grad_pass
from suites.compiled.rank_jobs_of_compiled import WITHOUT_CODE
from suites.compiled.small_nets import PLAN, net, step, words

CLUSTERS = Path(pytest_fxbucket.__file__).parent / "cost" / "clusters"
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor writes code for CPUs where there is g++, which is not here"
)
pytestmark = pytest.mark.usefixtures("two_fake_ranks", "a_cache_of_its_own")


@pytest.fixture
def a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch(WITHOUT_CODE):
        yield


ENDS = partial(net, depth=0, reshard=False)
"""A net of an embedding and a head alone, where it does not matter what is compiled: inductor takes a second for a layer."""


def compiled(model: nn.Module, bucketing: Any, **how: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, options=bucketing.options, **how)


_CALLS = re.compile(r"^\s*(?:buf\d+ = )?(?:torch\.ops\._c10d_functional|extern_kernels)\.(\w+)", re.M)
_SHORT = {"all_gather_into_tensor": "L", "wait_tensor": "w", "mm": "m", "addmm": "m"}


def code_of_forward(depth: int) -> str:
    """What inductor writes for a net that is compiled as the docs' example is.

    A bucket of a layer is as large as what the layers compute, so its memory would do for that.
    """
    with torch.compiler.config.patch(force_disable_caches=True), torch._inductor.config.patch(disable_cpp_codegen=False):
        forward = train.compiled(net(depth=depth), "post_grad")
        return get_code(lambda: forward(words(batch=1)))[0]


def schedule(code: str) -> str:
    """Launches (L), waits (w) and products (m), in order."""
    return "".join(_SHORT[name] for name in _CALLS.findall(code))


_PASSES = {
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ]
}


@needs_compiler
@pytest.mark.parametrize(
    ("settings", "depth", "order"),
    [({}, 1, "LLwLwmwm"), ({"reorder_for_compute_comm_overlap": True, **_PASSES}, 2, "LLwLwmLwmwm")],
    ids=["as it is", "to reorder launches"],
)
def test_inductor_keeps_the_prefetch_and_what_is_sent_until_it_has_arrived(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], depth: int, order: str
) -> None:
    monkeypatch.setattr(train, "PLAN", ["embed", "layers.*", "head"])
    with torch._inductor.config.patch(settings):
        code = code_of_forward(depth)
    assert schedule(code) == order
    launches = list(re.finditer(r"all_gather_into_tensor\.default\((\w+),", code))
    waits = list(re.finditer(r"wait_tensor\.default\(", code))
    for launch, wait in zip(launches, waits, strict=True):  # of the same gather: they arrive in order
        assert f"del {launch[1]}  # reuse" not in code[launch.end() : wait.start()]
    assert "# reuse" in code[launches[1].end() :]  # there is memory to give away


def graph_of(*modules: str) -> fx.Graph:
    graph = fx.Graph()
    for module in modules:
        node = graph.call_function(torch.neg, (1,))
        node.meta["nn_module_stack"] = {module: (f"L['self'].{module}", nn.Module)}
    return graph


@pytest.mark.parametrize("setting", moving_nothing())  # what there is in this torch
def test_where_inductor_moves_launches_once_more_the_pass_says_what_keeps_them(setting: str) -> None:
    others = dict.fromkeys(moving_nothing(), False)
    bucketing, says = bucketing_post_grad_pass(PLAN), "moves launches and waits once more behind the pass"
    settings = torch._inductor.config.patch({**others, setting: True, **_PASSES})
    with settings, pytest.warns(UserWarning, match=says) as warned:
        bucketing(graph_of("embed"))
    (said,) = [str(one.message) for one in warned]
    assert said.endswith(f", or set torch._inductor.config.{setting} = False")


def test_where_no_pass_is_listed_that_moves_launches_nothing_is_said() -> None:
    settings = torch._inductor.config.patch({**moving_nothing(), "reorder_for_compute_comm_overlap": True})
    with settings, warnings.catch_warnings():
        warnings.simplefilter("error")
        bucketing_post_grad_pass(PLAN)(graph_of("embed"))


def test_the_first_entry_that_matches_nothing_stops_a_whole_graph() -> None:
    with pytest.raises(Exception, match=r'bucketing_post_grad_pass: entry "layers.9" matches nothing'):
        step(compiled(ENDS(), bucketing_post_grad_pass(["layers.9"]), fullgraph=True, dynamic=True))


def test_where_graphs_may_still_come_the_entry_is_a_warning_and_then_an_error_when_asked() -> None:
    bucketing = bucketing_post_grad_pass(["embed", "layers.9"])
    with pytest.warns(UserWarning, match=r'"layers.9" matches nothing.*call check\(\) after the first step'):
        step(compiled(ENDS(), bucketing, dynamic=True))
    with pytest.raises(PlanError, match=r'"layers.9" matches nothing'):
        bucketing.check()


def test_a_backward_that_is_compiled_when_it_runs_ends_with_the_error() -> None:
    forward = compiled(ENDS(), bucketing_post_grad_pass(["embed", "layers.9"]))
    with pytest.raises(PlanError, match=r'"layers.9" matches nothing'):
        step(forward)


def reports(*args: Any, **options: Any) -> int:
    """How many graphs of a step came to the pass, and not from inductor's cache."""
    bucketing = bucketing_post_grad_pass(*args, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="bucketing_post_grad_pass")  # all match
        step(compiled(ENDS(), bucketing))
    return len(bucketing.reports)


def test_a_cached_graph_is_never_that_of_another_plan() -> None:
    plan = ["embed", "head"]
    assert reports(plan) == 2
    assert reports(plan) == 0  # from the cache
    assert reports(plan, prefetch=2) == 2


def test_the_cache_is_told_of_names_of_modules_and_of_what_it_cannot_know() -> None:
    def key(*modules: str, **options: Any) -> str | None:
        made = bucketing_post_grad_pass(["a"], **options)
        found: str | None = made._graphs.key(graph_of(*modules))
        return found

    assert key("a", "b") == key("a", "b") != key("a", "c")
    assert key("a", "b") != key("a", "b", layout="execution")
    assert key("a", "b") != key("b", "a")  # which of them launches is not in the key otherwise
    assert key("a", packer="suites.passes.test_packers:joined") is None
    assert key("a", module_stack_fn=lambda node: []) is None
    assert key("a", gather_group="own") is None  # nobody would make the group that a cached graph gathers on
    assert bucketing_post_grad_pass(["a"]).uuid() is None  # nothing is compiled just now


def test_the_cache_is_told_of_the_figures_of_a_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures = (CLUSTERS / "h100-sxm.toml").read_text(encoding="utf-8")
    keys = []
    for bandwidth in (450, 5, 450):
        (tmp_path / "ours.toml").write_text(figures.replace("bandwidth = 450,", f"bandwidth = {bandwidth},"), encoding="utf-8")
        made = bucketing_post_grad_pass(["a"], schedule="auto", cluster="ours.toml")
        keys.append(made._graphs.key(graph_of("a")))
    assert keys[0] == keys[2] != keys[1]


def test_a_wrong_plan_is_an_error_with_a_warm_cache_too() -> None:
    for _ in range(2):
        torch._dynamo.reset()
        forward = torch.compile(ENDS(), backend=bucketing_backend(["embed", "layers.9"], compiler="inductor"))
        with pytest.raises(PlanError, match=r'"layers.9" matches nothing'):
            step(forward)


def test_a_right_plan_of_a_model_within_another_is_no_error_with_a_warm_cache() -> None:
    for graphs in (2, 0):
        torch._dynamo.reset()
        backend = bucketing_backend(["embed", "head"], compiler="inductor")
        step(torch.compile(nn.Sequential(ENDS()), backend=backend))
        assert [report.launches_after for report in backend.reports] == [2] * graphs
