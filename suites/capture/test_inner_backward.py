"""``backward()`` while forward runs: what leaves keep, what parameters are given, and how often they are reduced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pytest_fxbucket.capture.backward import backward_in_forward, reached


class Given:
    """A part of a parameter, what is gathered of it, a leaf, and the gradients that the parameter was given."""

    def __init__(self) -> None:
        self.part = torch.arange(1.0, 4.0).requires_grad_()
        self.whole = {"weight": self.part * 1, "other": torch.ones(3, requires_grad=True)}
        self.leaf = torch.full((3,), 2.0, requires_grad=True)
        self.added: list[tuple[str, Tensor]] = []

    def inside(self):
        return backward_in_forward(self.whole, lambda fqn, gradient: self.added.append((fqn, gradient)))

    def loss(self) -> Tensor:
        return (self.whole["weight"] * self.leaf).sum()


def test_a_leaf_keeps_its_gradient_and_a_parameter_gives_its_away():
    given = Given()
    with given.inside():
        given.loss().backward()
        (2 * given.loss()).backward()
    assert torch.equal(given.leaf.grad, 3 * given.whole["weight"].detach())
    assert [fqn for fqn, _ in given.added] == ["weight", "weight"]
    assert [gradient.tolist() for _, gradient in given.added] == [[2.0] * 3, [4.0] * 3]
    assert given.part.grad is None


def test_one_that_is_gathered_as_a_leaf_is_told_from_other_leaves():
    given = Given()
    with given.inside():
        (given.whole["other"] * given.leaf).sum().backward()
    assert [(fqn, gradient.tolist()) for fqn, gradient in given.added] == [("other", [2.0] * 3)]
    assert given.whole["other"].grad is None


def test_inputs_and_gradients_are_taken_as_torch_takes_them():
    given = Given()
    with given.inside():
        torch.autograd.backward([given.loss()], [torch.tensor(3.0)], inputs=[given.leaf])
        given.loss().backward(torch.tensor(5.0), inputs=given.whole["weight"])
    assert torch.equal(given.leaf.grad, 3 * given.whole["weight"].detach())
    assert [(fqn, gradient.tolist()) for fqn, gradient in given.added] == [("weight", [10.0] * 3)]


def test_what_does_not_depend_on_anything_is_torchs_own_error():
    given = Given()
    with given.inside(), pytest.raises(RuntimeError, match="does not require grad"):
        torch.zeros(()).backward()


def test_outside_backward_is_torchs_own():
    given = Given()
    with given.inside():
        pass
    given.loss().backward()
    assert torch.equal(given.part.grad, given.leaf.detach())


def test_reached_stops_at_what_is_gathered():
    given = Given()
    found, leaves = reached([given.loss()], given.whole)
    assert list(found) == ["weight"]
    assert [one is given.leaf for one in leaves] == [True]
