"""A joint graph of AOT autograd comes in as a step, with the roles that its own descriptors give."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.capture import joint_step
from pytest_fxbucket.errors import CaptureError


class WithLoss(nn.Module):
    def __init__(self, *, counts: bool = False, both: bool = False) -> None:
        super().__init__()
        self.model = nn.Linear(4, 2)
        self.register_buffer("scale", torch.full((2,), 3.0))
        self.counts, self.both = counts, both

    def forward(self, rows: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.counts:
            self.get_buffer("scale").add_(1)
        output = self.model(rows) * self.scale
        loss = output.square().mean()
        return (output, loss) if self.both else loss


ROWS = torch.arange(12.0).reshape(3, 4)


def joint(module: nn.Module) -> torch.fx.GraphModule:
    with ExitStack() as inside:
        graph: torch.fx.GraphModule = aot_export_joint_with_descriptors(inside, module, (ROWS,)).graph_module
    return graph


def test_roles_and_names_are_the_tracers_and_the_graph_gives_the_modules_own_loss_and_gradients() -> None:
    module = WithLoss()
    step = joint_step(joint(module), module, (ROWS,), inner="model")
    assert step.roles["joint"] == {
        "inputs": ["param", "param", "buffer", "batch", "batch"],
        "outputs": ["loss", "grad", "grad"],
    }
    assert step.fqns["joint"] == {"inputs": ["weight", "bias", "scale", "0", "tangent"], "outputs": ["", "weight", "bias"]}
    loss, weight, bias = step.graphs["joint"](*step.inputs["joint"])
    expected = module(ROWS)
    expected.backward()
    torch.testing.assert_close((loss, weight, bias), (expected, module.model.weight.grad, module.model.bias.grad))


def test_modules_of_nodes_are_named_as_in_the_model_within_so_that_passes_find_a_plans_entries() -> None:
    module = WithLoss()
    graph = joint(module)
    spelled = {
        "L['self']": "L['self']",
        "L['self'].model": "",
        "L['self']._modules['model']._modules['layers']['0']": "layers.0",
        "L['self'].model.layers.1._checkpoint_wrapped_module.norm": "layers.1._checkpoint_wrapped_module.norm",
        "modeling.norm": "modeling.norm",
    }
    for node, key in zip(graph.graph.nodes, ("nn_module_stack", "fwd_nn_module_stack"), strict=False):
        node.meta[key] = {str(level): (name, nn.Linear) for level, name in enumerate(spelled)}
    joint_step(graph, module, (ROWS,), inner="model")
    forward, backward, *_ = graph.graph.nodes
    expected = [(name, nn.Linear) for name in spelled.values()]
    assert list(forward.meta["nn_module_stack"].values()) == list(backward.meta["fwd_nn_module_stack"].values()) == expected


def test_a_graph_of_another_tracer_is_refused_by_its_input() -> None:
    module = WithLoss()
    with pytest.raises(CaptureError, match=r"input x_1 is described as NoneType, .* aot_export_joint_with_descriptors"):
        joint_step(make_fx(lambda x: x.sum())(ROWS), module, (ROWS,))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (
            WithLoss(counts=True),
            r"^forward writes buffer scale, whose new value joint_step does not take; call eval\(\) of its module",
        ),
        (WithLoss(both=True), "gives no one value of its module first, where its loss was expected"),
    ],
)
def test_what_is_no_loss_or_gradient_is_refused(module: WithLoss, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        joint_step(joint(module), module, (ROWS,))
