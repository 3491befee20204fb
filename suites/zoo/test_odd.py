"""Odd but ordinary modules: audit is green, and the captured gradients are those of plain eager; or a sentence refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.ranks.pools import Pools
from suites.zoo import odd_backwards, odd_forwards, odd_layers, odd_parameters
from suites.zoo.shelf import ZooModel
from suites.zoo.table import wrong
from suites.zoo.visit import ITEMS, plans_of, run_of, visit

SHELVES = (odd_parameters, odd_forwards, odd_backwards, odd_layers)
MODELS = {model.name: model for shelf in SHELVES for model in shelf.SHELF}
NOTES = {
    "logit_scale": "logit_scale without dimension, sharded as one element, where FSDP2 asks for the shape (1,)",
    "sparse_embedding": "embedding with dense gradients in place of sparse ones",
    "sparse_bag": "the model with dense gradients in place of sparse ones",
    "compiled_submodule": "0, 1 run as what torch.compile wraps",
    "tensor_global": "suites.zoo.odd_forwards.TABLE held in no parameter or buffer, and inputs all the same",
    "tensor_attribute": "1.scale, 1.tables['a'][0] held in no parameter or buffer, and inputs all the same",
}
"""What audit says besides of a step that is otherwise than the module is written; of all others nothing."""
BETWEEN_DTYPES = ("autocast", "weight_in_float", "float_between_units", "complex_parameter")
ALL_ITEMS = ("read_under_no_grad", "gradient_hook", "checkpoint_dropout", "writes_rows", "labels_beside")
CASES = [*((model, "fp32") for model in MODELS.values()), *((MODELS[name], "bf16") for name in BETWEEN_DTYPES)]


@pytest.mark.parametrize(("model", "row"), CASES, ids=[f"{model.name}-{row}" for model, row in CASES])
def test_a_module_as_people_write_it_has_eagers_gradients_or_is_refused(
    model: ZooModel, row: str, pools: Pools, tmp_path: Path
) -> None:
    outcome = visit(model, row, pools, tmp_path, ITEMS if model.name in ALL_ITEMS else ("audit",))
    assert list(wrong(model, [outcome])) == []
    assert outcome.kind != "near"
    if outcome.kind == "green":
        notes = f" ({NOTES[model.name]})" if model.name in NOTES else ""
        assert outcome.audited.partition(" ranks")[2] == notes


def test_a_recurrent_layer_of_onednn_is_traced_as_what_runs(pools: Pools, tmp_path: Path) -> None:
    graph = run_of(plans_of(MODELS["lstm"])["fp32"], pools, tmp_path).step.graphs["joint"].graph
    assert not [node for node in graph.nodes if "mkldnn" in str(node.target)]


def gathered(name: str, direction: str, pools: Pools, tmp_path: Path) -> list[str]:
    """FQN of what each gather in ``direction`` carries in the captured step."""
    step = run_of(plans_of(MODELS[name])["fp32"], pools, tmp_path).step
    reading = read_graph(step.graphs["joint"].graph, step.inputs["joint"], step.outputs["joint"])
    return [one.members[0].fqn for one in reading.buckets if (one.kind, one.direction) == ("all_gather", direction)]


def test_what_is_written_into_zeros_is_forward_with_its_gathers_in_order(pools: Pools, tmp_path: Path) -> None:
    parameters = [fqn for fqn, _ in MODELS["writes_rows"].build().named_parameters()]
    assert gathered("writes_rows", "forward", pools, tmp_path) == parameters


def test_weights_joined_early_are_read_there_so_what_is_last_are_the_blocks_behind(pools: Pools, tmp_path: Path) -> None:
    """Those stay gathered until backward, and of the others it reads the join alone."""
    assert gathered("joined_linears", "backward", pools, tmp_path) == []
