"""What operators do that their schemas do not tell, and which namespaces are known to tell all else. Data alone."""

from __future__ import annotations

import builtins
import operator

KNOWN = frozenset(
    [
        *("aten", "prims", "prim", "rngprims", "quantized", "quantized_decomposed", "_quantized", "mkldnn", "mkl", "onednn"),
        *("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem", "fsdp"),
        *("bucketing", "inductor", "profiler"),
    ]
)
"""Namespaces whose schemas and the tables below tell all; operators of others must annotate or carry pt2_compliant_tag."""
COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
CHAINED_NAMESPACES = frozenset({"c10d", "symm_mem", "profiler"})
"""What they do to other ranks, to workspaces or to the profiler, no schema tells."""
CHAINED = frozenset({"isend", "irecv", "batch_p2p_ops"})
"""Sends and receives are matched by their order."""

SHARES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        [
            *("aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"),
            *("aten::type_as", "aten::sum_to_size", "aten::data", "aten::lift", "aten::_coalesce", "aten::coalesce"),
            *(f"aten::_cast_{name}" for name in ("Byte", "Char", "Double", "Float", "Int", "Long", "Short", "Half")),
            *("inductor::_alloc_from_pool", "inductor::_reinterpret_tensor"),
        ],
        ("self",),
    ),
    **dict.fromkeys(["aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::native_dropout"], ("input",)),
    **dict.fromkeys(["aten::atleast_1d", "aten::atleast_2d", "aten::atleast_3d"], ("self", "tensors")),
    **dict.fromkeys(["aten::broadcast_tensors", "aten::meshgrid"], ("tensors",)),
    "prims::device_put": ("a",),
    "_c10d_functional::_wrap_tensor_autograd": ("input",),
    "_c10d_functional::wait_tensor": ("tensor",),
    "c10d_functional::wait_tensor": ("self",),
    "_c10d_functional::isend": ("tensor",),
    "_c10d_functional::irecv": ("tensor",),
    "_c10d_functional::batch_p2p_ops": ("tensors",),
    "c10d_functional::isend": ("self",),
    "c10d_functional::irecv": ("self",),
    "c10d_functional::batch_p2p_ops": ("tensors",),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
    "aten::set_": ("source",),
    "symm_mem::get_remote_tensors": ("x",),
    "symm_mem::_rendezvous": ("tensor",),
}
"""Arguments that the result shares although the schema is silent."""

_STATISTICS = ("running_mean", "running_var")
WRITES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        [
            *("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::batch_norm"),
            *("aten::_batch_norm_impl_index", "aten::instance_norm", "aten::batch_norm_update_stats"),
            *("aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts"),
        ],
        _STATISTICS,
    ),
    "_c10d_functional::irecv": ("tensor",),
    "_c10d_functional::batch_p2p_ops": ("tensors",),
    "c10d_functional::irecv": ("self",),
    "c10d_functional::batch_p2p_ops": ("tensors",),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
    "inductor::resize_storage_bytes_": ("variable",),
}
"""Arguments that are written although the schema is silent."""
TURNED_OFF = ("training", "use_input_stats")
HIDDEN = frozenset({"inductor::accumulate_grad_"})
"""Operators that write what is no argument of theirs."""

PYTHON = frozenset(
    getattr(builtins, name) for name in ("abs", "bool", "divmod", "float", "int", "len", "max", "min", "pow", "round", "sum")
)
IN_PLACE = frozenset(
    [
        *(operator.iadd, operator.isub, operator.imul, operator.imatmul, operator.itruediv, operator.ifloordiv, operator.imod),
        *(operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.iconcat),
        *(operator.setitem, operator.delitem),
    ]
)
