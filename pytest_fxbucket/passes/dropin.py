"""The drop-in for torch's function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.module_names import ModuleStackFn
from pytest_fxbucket.passes.targets import by_module
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.process import collector
from pytest_fxbucket.words import nearest, one_or_other, show

if TYPE_CHECKING:
    from torch import fx

_ONE_DTYPE = ("default", "custom_ops")
_MODES = (*_ONE_DTYPE, "custom_ops_multidtype")


def manual_overlap_bucketing(
    gm: fx.GraphModule,
    module_bucket_plans: Sequence[str | Sequence[str]],
    insert_overlap_deps: bool = False,
    module_stack_fn: ModuleStackFn | None = None,
    bucket_mode: str | None = None,
) -> fx.GraphModule:
    """Drop-in for torch's function of the same name and call shape: bucket by module, then reorder.

    ``module_bucket_plans``: module FQNs, or lists of FQNs that share a bucket, each as an entry of a plan file
    (``layers.[0-3]``, ``layers.*`` and ``norm+output`` too); without the variable and the modules that wrap the whole model.
    ``module_stack_fn(node)`` gives a node's module stack, outermost first; left out, ``nn_module_stack`` and
    ``fwd_nn_module_stack`` are read. ``bucket_mode``: None, "default" and "custom_ops" all mean this package's pack,
    "custom_ops_multidtype" lets an all-gather carry several dtypes.

    ``gm`` is changed and returned; no entry at all leaves it as it is. On :class:`PlanError` (no list of FQNs, an entry that
    matches no module or no collective or overlaps another, a graph without module names, an unknown mode) and on
    :class:`PassError` it is as it was.
    """
    _refuse_other_arguments(gm, insert_overlap_deps, module_stack_fn, bucket_mode)
    entries = parse_entries(module_bucket_plans, "module_bucket_plans")
    if not entries:
        return gm
    with collector.paused():
        graph = without_kept_order(gm.graph)
        targets = by_module(graph, [(entry.name, entry.selectors) for entry in entries], module_stack_fn)
        dtypes = "mixed" if bucket_mode == "custom_ops_multidtype" else "separate"
        ManualPass.of(dtypes=dtypes, insert_overlap_deps=insert_overlap_deps).apply(graph, targets)
        if graph is gm.graph:
            gm.recompile()
        else:
            gm.graph = graph  # which recompiles
    return gm


def _refuse_other_arguments(gm: object, insert_overlap_deps: object, module_stack_fn: object, bucket_mode: object) -> None:
    from torch import fx

    if not isinstance(gm, fx.GraphModule):
        raise PlanError(f"gm must be a torch.fx.GraphModule, not a value of type {type(gm).__name__}")
    if not isinstance(insert_overlap_deps, bool):
        raise PlanError(f"insert_overlap_deps must be True or False, not {show(insert_overlap_deps)}")
    if module_stack_fn is not None and not callable(module_stack_fn):
        raise PlanError(f"module_stack_fn must be callable(node) or None, not {show(module_stack_fn)}")
    if bucket_mode is None or bucket_mode in _MODES:
        return
    known = one_or_other([show(mode) for mode in _MODES])
    if bucket_mode == "coalesced":
        raise PlanError(
            f'bucket_mode "coalesced" is refused: a bucket is one tensor here, not one call of several; use {known}'
        )
    near = nearest(bucket_mode, list(_MODES)) if isinstance(bucket_mode, str) else ""
    raise PlanError(f"bucket_mode must be None, {known}, not {show(bucket_mode)}{near}")
