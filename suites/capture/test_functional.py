"""Writes in place become edges, and readers through every name see what they saw before."""

from __future__ import annotations

import random

import pytest
import torch

from pytest_fxbucket.capture.functionalize import make_functional
from pytest_fxbucket.errors import CaptureError
from suites.capture.functional_graphs import both, same, traced

ATEN = torch.ops.aten


def base(rows: int = 4, columns: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).to(dtype)


def read_before_and_after(x):
    before = x + 1
    x.mul_(2)
    return before, x + 1


def read_through_an_older_view(x):
    view = x[1:3].t()
    x.mul_(2)
    return view + 1


def write_through_a_view(x):
    x[1:3].mul_(2)
    return x + 1


def write_through_a_view_of_a_view(x):
    whole = x.view(-1)
    x.t()[1].add_(5)
    return whole * 2


def write_through_the_same_place(x):
    x.view_as(x).add_(1)
    x.detach().mul_(3)
    return x + 1


def read_parts_of_a_split(x):
    first, second = x.split(2)
    x.mul_(2)
    second.add_(first)
    return first + 1, second + 1, x + 1


def chained(x):
    return x.mul_(2).add_(1).sqrt_()


def two_views_of_one_memory_at_once(x):
    torch._foreach_add_([x[:2], x[2:]], 3.0)
    return x * 2


def several_outs(x):
    values, places = torch.empty(4), torch.empty(4, dtype=torch.int64)
    torch.max(x, 1, out=(values, places))
    return values + 1, places + 1


def a_comparison_into_floats(x):
    return x.gt_(0)


@pytest.mark.parametrize(
    "function",
    [
        read_before_and_after,
        read_through_an_older_view,
        write_through_a_view,
        write_through_a_view_of_a_view,
        write_through_the_same_place,
        read_parts_of_a_split,
        chained,
        two_views_of_one_memory_at_once,
        several_outs,
        a_comparison_into_floats,
    ],
)
def test_values_through_every_name_stay_what_they_were(function):
    eager, graph = both(function, [base()])
    assert same(eager, graph)


def test_a_write_that_promotes_is_cast_back_to_the_parameters_dtype():
    eager, graph = both(lambda x, y: x.mul_(y).addcdiv_(y, y.abs() + 1, value=-0.1), [base(dtype=torch.bfloat16), base()])
    assert same(eager, graph)


def test_a_foreach_write_that_promotes_some_of_its_tensors_casts_those():
    def function(a, b, c):
        torch._foreach_mul_([a, b], [c, c])

    inputs = [base(dtype=torch.bfloat16), base(), base(4, 3) + 2]
    eager, graph = both(function, inputs)
    assert same(eager[1:], graph[1:] if graph[0] is None else graph)


def test_the_last_value_of_a_written_input_is_given_and_untouched_inputs_are_not():
    graph = traced(lambda x, y: x.add_(y).mul_(2), [base(), base()]).graph
    x, _ = graph.find_nodes(op="placeholder")
    values = make_functional(graph)
    assert list(values) == [x]
    assert values[x].target is ATEN.mul.Tensor
    assert isinstance(values[x].meta["val"], torch.Tensor)


def test_no_new_value_shares_its_fake_storage_with_another():
    graph = traced(lambda x, y: torch._foreach_add_([x, y], 1.0), [base(), base()]).graph
    new = list(make_functional(graph).values())
    storages = {node.meta["val"].untyped_storage()._cdata for node in [*new, *graph.find_nodes(op="placeholder")]}
    assert len(storages) == 4


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_of_views_and_writes_give_eagers_bits(seed):
    eager, graph = both(program(seed), [base(4, 4), base(4, 4) * 2])
    assert same(eager, graph)


def program(seed):
    views = [lambda t: t[1:], lambda t: t[:, :2], lambda t: t.t(), lambda t: t.reshape(-1)[3:], lambda t: t.view(-1)]
    views += [lambda t: t.unsqueeze(0), lambda t: t.detach()]
    writes = [lambda t, u: t.mul_(1.5), lambda t, u: t.add_(u.sum()), lambda t, u: t.zero_(), lambda t, u: t.copy_(u.mean())]

    def function(*inputs):
        draw = random.Random(seed)
        tensors = list(inputs)
        results = []
        for _ in range(14):
            tensor, other = draw.choice(tensors), draw.choice(tensors)
            kind = draw.randrange(3)
            if kind == 0:
                try:
                    tensors.append(draw.choice(views)(tensor))
                except (IndexError, RuntimeError, ValueError):
                    continue
            elif kind == 1:
                draw.choice(writes)(tensor, other)
            else:
                results.append(tensor * 2)
        return [*results, tensors[-1] + 1]

    return function


def held(x):
    return x + 1


@pytest.mark.parametrize(
    ("function", "count", "said"),
    [
        (lambda x: x.t_(), 1, "aten.t_.default .* writes .* in place and has no functional twin"),
        (lambda x: x.resize_(2, 2), 1, "aten.resize_.default .* has no functional twin"),
        (lambda x: torch._foreach_add_([x[:3], x[2:]], 1.0), 1, "writes the memory that .* and .* share twice"),
        (lambda x: x.t()[:2].t()[1:].expand(3, 2).unbind()[0].add_(x.view(12)[:2]), 1, None),
    ],
)
def test_what_has_no_functional_form_is_refused_in_one_sentence(function, count, said):
    inputs = [base()] * count
    if said is None:
        eager, graph = both(function, inputs)
        assert same(eager, graph)
        return
    graph = traced(function, inputs).graph
    with pytest.raises(CaptureError, match=said):
        make_functional(graph)


def test_inputs_that_share_memory_are_refused_if_it_is_written():
    graph = traced(lambda x, y: x.add_(y), [base(), base()]).graph
    x, y = graph.find_nodes(op="placeholder")
    y.meta["val"] = x.meta["val"]
    with pytest.raises(CaptureError, match=r"inputs .* and .* share memory"):
        make_functional(graph)


def test_a_tensor_that_the_graph_holds_is_not_written_in_secret():
    module = torch.fx.symbolic_trace(lambda x: x)
    module.register_buffer("counter", torch.zeros(3))
    graph = module.graph
    with graph.inserting_before(graph.output_node()):
        attribute = graph.get_attr("counter")
        attribute.meta["val"] = module.counter
        written = graph.call_function(ATEN.add_.Tensor, (attribute, 1))
        written.meta["val"] = module.counter
    with pytest.raises(CaptureError, match="writes counter, a tensor that the graph holds"):
        make_functional(graph)
