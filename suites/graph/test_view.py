"""Modules of a graph are found, counted and printed as those of the model itself."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from pytest_fxbucket.errors import GraphError, NoModuleError
from pytest_fxbucket.graph_view import GraphView
from suites.graph.view_models import captured


def graph_of(*modules: str, backward: bool = False) -> fx.Graph:
    """A chain with a node in each of ``modules``; a class for each name."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for fqn in modules:
        parts = fqn.split(".") if fqn else []
        paths = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
        x = graph.call_function(torch.ops.aten.neg.default, (x,))
        key = "fwd_nn_module_stack" if backward else "nn_module_stack"
        x.meta[key] = {path: (path, _class(path.rpartition(".")[2])) for path in paths}
    graph.output(x)
    return graph


def _class(name: str) -> type[nn.Module]:
    return nn.Sequential if name.isdigit() else nn.Linear if name else nn.Module


NET = graph_of(*(f"layers.{i}.{name}" for i in range(3) for name in ("norm", "attention")), "head")


def test_a_module_is_had_by_name_by_index_and_as_an_attribute() -> None:
    view = GraphView(NET)
    attention = view["layers.1.attention"]
    assert attention.fqn == "layers.1.attention"
    assert (
        attention
        == view.layers[1].attention
        == view["layers"][1]["attention"]
        == view.layers["1"].attention
        == view[""][0][1][1]
    )
    assert view.layers[-1] == view["layers.2"]
    assert view["L['self']._modules['layers']['1'].attention"] == attention
    assert [child.fqn for child in view] == ["layers", "head"]
    assert (len(view.layers), bool(view.head), view.head.class_name, attention.name) == (3, True, "Linear", "attention")
    assert {"layers", "head", "nodes"} <= set(dir(view))


def test_a_glob_gives_modules_in_order() -> None:
    view = GraphView(NET)
    found = {
        glob: [m.fqn for m in view.find(glob)]
        for glob in ("layers.*.attention", "layers.[1-2]", "**.norm", "h?ad", "*.7", "**")
    }
    assert found == {
        "layers.*.attention": [f"layers.{i}.attention" for i in range(3)],
        "layers.[1-2]": ["layers.1", "layers.2"],
        "**.norm": [f"layers.{i}.norm" for i in range(3)],
        "h?ad": ["head"],
        "*.7": [],
        "**": [m.fqn for m in view.find("**")],
    }
    assert len(found["**"]) == 1 + 1 + 3 * 3 + 1
    assert [m.name for m in view.layers.find("*")] == ["0", "1", "2"]
    twelve = GraphView(graph_of(*(f"layers.{i}" for i in range(12))))
    assert [m.name for m in twelve.find("layers.[9-11]")] == ["9", "10", "11"]


def test_numbered_modules_count_up_though_backward_counts_down() -> None:
    view = GraphView(graph_of(*(f"layers.{i}" for i in reversed(range(12))), backward=True))
    assert [child.name for child in view.layers] == [str(i) for i in range(12)]
    assert view.layers[0].fqn == "layers.0"


MISSING = {
    "layers.1.atention": "the graph has no module 'layers.1.atention'; did you mean \"layers.1.attention\"?",
    "zzz": "the graph has no module 'zzz'; its modules are layers, head",
    "layers.*": "the graph has no module called 'layers.*'; ask find() for what a glob names",
    7: "the graph has no module of index 7, but 2 modules; its modules are layers, head",
}


@pytest.mark.parametrize("asked", MISSING)
def test_a_missing_module_says_the_nearest(asked: str | int) -> None:
    view = GraphView(NET)
    with pytest.raises(NoModuleError) as caught:
        view[asked]
    assert str(caught.value) == MISSING[asked]
    assert isinstance(caught.value, IndexError if isinstance(asked, int) else KeyError)
    assert asked not in view


def test_a_missing_attribute_is_an_attribute_error() -> None:
    view = GraphView(NET)
    with pytest.raises(AttributeError, match=r'layers.0 has no module \'atention\'; did you mean "attention"\?'):
        view.layers[0].atention  # noqa: B018
    assert not hasattr(view, "atention")
    assert hasattr(view.layers[0], "attention")
    assert getattr(view, "nothing", None) is None
    assert "layers.0.attention" in view
    assert view.layers[0].attention in view.layers
    assert view.head not in view.layers


def test_what_wraps_all_modules_may_be_left_out_of_a_name() -> None:
    view = GraphView(graph_of("trainer.model", "trainer.model.embed", "trainer.model.layers.0", "trainer.model.layers.1"))
    assert view.embed == view["embed"] == view["trainer.model.embed"] == view.trainer.model.embed
    assert [m.fqn for m in view.find("layers.*")] == ["trainer.model.layers.0", "trainer.model.layers.1"]
    assert not hasattr(view.trainer, "embed")


def test_nodes_are_chosen_by_direction_and_kind() -> None:
    step = captured()
    view = GraphView.of_step(step)
    gathers = view["layers.1"].nodes("forward", "all_gather")
    assert len(gathers) == 9
    assert {str(node.target) for node in gathers} == {"_c10d_functional.all_gather_into_tensor.default"}
    calls = [n for n in step.graphs["joint"].graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    assert view.nodes() == calls
    assert sum(view.counts.values()) == len(calls)
    assert sorted(view.nodes("forward") + view.nodes("backward"), key=calls.index) == calls
    assert view["layers.1"].nodes(own=True) + [n for m in view["layers.1"] for n in m.nodes()] != []
    for wrong in ({"kind": "gather"}, {"direction": "backwards"}):
        with pytest.raises(GraphError, match="did you mean"):
            view.nodes(**wrong)
    with pytest.raises(GraphError, match="the step has no forward graph, but joint"):
        GraphView.of_step(step, "forward")


def test_parameters_that_somebody_names_are_those_of_their_modules() -> None:
    view = GraphView(NET, parameters={"x": "layers.1.attention.weight"})
    assert [p.fqn for p in view["layers.1"].parameters] == ["layers.1.attention.weight"]
    assert view.head.parameters == []
    with pytest.raises(GraphError, match=r"""no input 'y' that could be head.weight; did you mean "x"\?|no input 'y'"""):
        GraphView(NET, parameters={"y": "head.weight"}).parameters  # noqa: B018


def test_a_view_is_printed_as_a_model_is() -> None:
    graph = graph_of(*(f"layers.{i}.attention" for i in range(3)), "layers.3.attention", "layers.3.norm", "head")
    assert repr(GraphView(graph)) == "\n".join(
        [
            "Module(",
            "  6 nodes",
            "  (layers): Linear(",
            "    5 nodes",
            "    (0-2): 3 x Sequential(",
            "      1 node",
            "      (attention): Linear(1 node)",
            "    )",
            "    (3): Sequential(",
            "      2 nodes",
            "      (attention): Linear(1 node)",
            "      (norm): Linear(1 node)",
            "    )",
            "  )",
            "  (head): Linear(1 node)",
            ")",
        ]
    )


def test_lines_fold_as_those_of_a_module_list() -> None:
    model = nn.ModuleList([*(nn.Sequential(nn.Linear(1, 1)) for _ in range(4)), nn.Identity()])
    ours = repr(GraphView(graph_of(*(f"{i}.linear" for i in range(4)), "4")))
    for line in ("  (0-3): 4 x Sequential(", "  (4): "):
        assert any(text.startswith(line) for text in repr(model).splitlines())
        assert any(text.startswith(line) for text in ours.splitlines())


def test_a_function_that_gives_no_module_stack_is_named() -> None:
    with pytest.raises(GraphError, match=r'module_stack_fn gave "layers", expected a list of .* \(of node x\)'):
        GraphView(NET, lambda node: "layers")
    with pytest.raises(GraphError, match=r"module_stack_fn gave a list with 3 in it"):
        GraphView(NET, lambda node: [3])
