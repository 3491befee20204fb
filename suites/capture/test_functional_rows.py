"""Every row of the table of functional twins that an optimizer can use gives what the operator in place gives, bit for bit.

Arguments are made from the operators' schemas, so a new operator of torch's is tested as it comes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fxbucket.capture.functional_operators import twin_of
from pytest_fxbucket.capture.functionalize import make_functional
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from suites.capture.functional_graphs import bytes_of

ATEN = torch.ops.aten
SHAPES = ((3, 4), (5,), (1,))
PLAIN = (
    *("add_.Tensor", "add_.Scalar", "sub_.Tensor", "sub_.Scalar", "mul_.Tensor", "mul_.Scalar", "div_.Tensor", "div_.Scalar"),
    *("addcmul_.default", "addcdiv_.default", "lerp_.Scalar", "lerp_.Tensor", "copy_.default", "zero_.default", "fill_.Scalar"),
    *("fill_.Tensor", "sqrt_.default", "rsqrt_.default", "neg_.default", "abs_.default", "sign_.default", "square_.default"),
    *("reciprocal_.default", "pow_.Scalar", "pow_.Tensor", "exp_.default", "log_.default", "clamp_.default", "clamp_.Tensor"),
    *("clamp_min_.default", "clamp_max_.default", "clamp_min_.Tensor", "clamp_max_.Tensor", "maximum.out", "minimum.out"),
    *("add.out", "sub.out", "mul.out", "div.out", "sqrt.out", "addcmul.out", "addcdiv.out", "eq_.Tensor", "gt_.Scalar"),
    *("masked_fill_.Scalar", "masked_fill_.Tensor", "where.self_out", "sgn_.default", "floor_.default", "tanh_.default"),
    *("logical_not_.default", "nan_to_num_.default", "addmm_.default", "relu_.default", "hypot_.default", "atan2_.default"),
)
WITHOUT_FAKE_KERNEL = [
    *("_foreach_addcdiv.Tensor_out", "_foreach_addcdiv_.Tensor", "_foreach_addcmul.Tensor_out", "_foreach_addcmul_.Tensor")
]
"""They read a tensor of scalars on the CPU even when they are given fake ones, so no graph has them."""


def rows() -> list[str]:
    """Names of all operators in place of the families foreach and fused, and the plain ones above."""
    found = list(PLAIN)
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if name.startswith(("_foreach_", "_fused_a", "_fused_s")) and any(_is_written(a) for a in schema.arguments):
            found.append(f"{name}.{schema.overload_name or 'default'}")
    return sorted(set(found))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def overload(name: str) -> Any:
    packet, _, overload_name = name.partition(".")
    return getattr(getattr(ATEN, packet), overload_name)


ROWS = [name for name in rows() if twin_of(overload(name)) is not None]


def test_the_only_rows_without_a_twin_are_known():
    """``out=`` forms of fused operators write their other arguments too; no optimizer calls them."""
    left = [name for name in rows() if name not in ROWS]
    assert [name for name in left if not (name.startswith("_fused_") and name.endswith("out"))] == []


class Arguments:
    """Makes an argument of each type; positive numbers, so that every function is defined."""

    def __init__(self, name: str) -> None:
        self.draw = torch.Generator().manual_seed(7)
        self.fused = name.startswith("_fused_")
        self.name = name

    def tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=self.draw) * 0.8 + 0.1

    def of(self, argument: Any) -> Any:
        kind, name = str(argument.type), argument.name
        if argument.has_default_value() and not argument.alias_info and name not in ("min", "value", "alpha"):
            return argument.default_value
        if kind == "List[Tensor]":
            if name == "state_steps":
                return [torch.tensor(3.0) for _ in SHAPES]
            return [self.tensor(shape) for shape in SHAPES]
        if name == "mask" or (self.name.startswith("where") and name == "condition"):
            return self.tensor((4, 4)) > 0.5
        if kind in ("Tensor", "Optional[Tensor]"):
            scalar = name in ("lr", "value") or (self.name.startswith("_foreach") and name in ("other", "tensor"))
            if name == "scalars":
                return torch.rand(len(SHAPES), generator=self.draw)
            return torch.tensor(0.3, dtype=torch.float64 if name == "lr" else torch.float32) if scalar else self.tensor((4, 4))
        if "number" in kind or "Scalar" in kind or kind == "float":
            return [0.5, 0.25, 0.75] if "List" in kind else 0.5
        if kind == "bool":
            return name == "amsgrad"
        if kind == "List[float]":
            return [0.5, 0.25, 0.75]
        raise AssertionError(f"no argument of type {kind} for {self.name}: {name}")


def given(name: str) -> tuple[list[Any], dict[str, Any]]:
    make = Arguments(name)
    made = [(argument, make.of(argument)) for argument in overload(name)._schema.arguments]
    args = [value for argument, value in made if not argument.kwarg_only]
    return args, {argument.name: value for argument, value in made if argument.kwarg_only}


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def graph_of(op: Any, args: Any, kwargs: Any) -> torch.fx.GraphModule:
    """A graph that calls ``op`` once and returns nothing of it."""
    graph = torch.fx.Graph()
    mode = FakeTensorMode()
    nodes = {}
    for tensor in tensors((args, kwargs)):
        nodes[id(tensor)] = graph.placeholder(f"x{len(nodes)}")
        nodes[id(tensor)].meta["val"] = mode.from_tensor(tensor)

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return nodes[id(value)]
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value

    node = graph.call_function(op, tuple(plain(args)), plain(kwargs))
    shown = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    node.meta["val"] = op(*shown[0], **shown[1])
    graph.output([])
    return torch.fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("name", WITHOUT_FAKE_KERNEL)
def test_rows_that_no_graph_can_have_give_the_bits_too(name):
    args, kwargs = given(name)
    with pytest.raises(RuntimeError, match="Expected scalars to be on CPU"):
        graph_of(overload(name), args, kwargs)
    twin = twin_of(overload(name))
    results = twin.op(*args, **{key: value for key, value in kwargs.items() if key != "out"})
    overload(name)(*args, **kwargs)
    written = kwargs.get("out", args[0])
    assert [bytes_of(result) for result in results] == [bytes_of(tensor) for tensor in written]


@pytest.mark.parametrize("name", [name for name in ROWS if name not in WITHOUT_FAKE_KERNEL])
def test_the_twin_gives_the_bits_that_the_operator_writes(name):
    args, kwargs = given(name)
    module = graph_of(overload(name), args, kwargs)
    inputs = module.graph.find_nodes(op="placeholder")
    values = make_functional(module.graph)
    assert values, "nothing was written"
    module.graph.output_node().args = ([values.get(node, node) for node in inputs],)
    module.graph.lint()
    module.recompile()
    before = tensors((args, kwargs))
    results = module(*(tensor.clone() for tensor in before))
    overload(name)(*args, **kwargs)
    for place, (result, eager) in enumerate(zip(results, before, strict=True)):
        assert (result.dtype, result.shape) == (eager.dtype, eager.shape)
        assert bytes_of(result) == bytes_of(eager), f"argument {place} of {name}"
