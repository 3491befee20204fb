"""Passes of a user, each wrong in its own way, as text of a module that tests write; and one that mends them."""

from __future__ import annotations

HEAD = """
import torch
import torch.distributed as dist
from pytest_fxbucket.passes import manual_overlap_bucketing

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def launches(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)


def well(gm, plans):
    return manual_overlap_bucketing(gm, plans)
"""
BROKEN = {
    "exception": """
def broken(gm, plans):
    if launches(gm, c10d.reduce_scatter_tensor.default):
        raise KeyError("no such\\nmodule as layers_3")
    return well(gm, plans)
""",
    "would hang": """
def broken(gm, plans):
    gm = well(gm, plans)
    if dist.get_rank() == 1:
        first = gm.graph.find_nodes(op="placeholder")[0]
        with gm.graph.inserting_before(gm.graph.output_node()):
            launch = gm.graph.call_function(c10d.all_reduce.default, (first, "sum", "0"))
            launch.meta["val"] = first.meta["val"]
            gm.graph.call_function(c10d.wait_tensor.default, (launch,)).meta["val"] = first.meta["val"]
        gm.recompile()
    return gm
""",
    "wrong values": """
def broken(gm, plans):
    gm = well(gm, plans)
    for launch in launches(gm, c10d.all_reduce.default):
        launch.update_arg(1, "max")
    gm.recompile()
    return gm
""",
    "plan silently not kept": """
def broken(gm, plans):
    return gm if launches(gm, c10d.all_reduce.default) else well(gm, plans)
""",
    "not idempotent": """
def broken(gm, plans):
    gm = well(gm, plans)
    output = gm.graph.output_node()
    given = output.args[0][0]
    with gm.graph.inserting_before(output):
        turned = gm.graph.call_function(aten.neg.default, (given,))
        back = gm.graph.call_function(aten.neg.default, (turned,))
        turned.meta["val"] = back.meta["val"] = given.meta["val"]
    output.args = ([back, *output.args[0][1:]],)
    gm.recompile()
    return gm
""",
}
"""By the kind of what is to be found."""
MENDED = HEAD + "\n\nbroken = well\n"
SEVERAL = f"""{HEAD}

def broken(gm, plans):
    if launches(gm, c10d.all_reduce.default):
        raise RuntimeError("cannot")
    gm = well(gm, plans)
    for launch in launches(gm, c10d.reduce_scatter_tensor.default):
        launch.update_arg(1, "max")
    gm.recompile()
    return gm
"""
