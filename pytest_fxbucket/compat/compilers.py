"""The parts of ``torch.compile`` that a compiler of somebody else uses: AOT autograd, inductor, the compilation that goes on.

``torch._dynamo.backends``, ``torch._functorch`` and ``torch._inductor.compile_fx``, in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["CustomGraphPass"]

Compiled = Callable[..., Any]
Compiler = Callable[["fx.GraphModule", Sequence[Any]], Compiled]
"""``(graph module, example inputs) -> callable`` of the same inputs."""


def aot(gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler) -> Compiled:
    """Dynamo's ``gm`` through AOT autograd and ``compiler``: forward and backward apart, parted as ``aot_eager`` does."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    compiled: Compiled = backend(gm, inputs)
    return compiled


def mark_backward(graph: fx.Graph) -> None:
    """Mark each node of a backward graph as backward: torch 2.11 and 2.12 leave launches in it without the mark.

    A graph of backward is known by the tangents among its inputs.
    """
    if any(str(node.target).startswith("tangents") for node in graph.find_nodes(op="placeholder")):
        for node in graph.nodes:
            node.meta.setdefault("autograd_backward", True)


def eager(gm: fx.GraphModule, _: Sequence[Any]) -> Compiled:
    """Run ``gm`` as it is; it frees each input as soon as the input was read for the last time."""
    from torch._dynamo.backends.debugging import boxed_nop

    compiled: Compiled = boxed_nop(gm, [])
    return compiled


def boxed(compiled: Compiled) -> Compiled:
    """``compiled`` taking its inputs in one list, as AOT autograd calls it."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    if getattr(compiled, "_boxed_call", False):
        return compiled
    taking_one: Compiled = make_boxed_func(compiled)
    return taking_one


def inductor(gm: fx.GraphModule, inputs: Sequence[Any], post_grad_pass: object, options: Mapping[str, Any]) -> Compiled:
    """Dynamo's ``gm`` through inductor with ``options``; ``post_grad_pass`` comes behind those that torch's config names."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    there: Any = config.post_grad_custom_post_pass
    others = list(there) if isinstance(there, (list, tuple)) else [there] if there is not None else []
    passes = [*others, post_grad_pass] if others else post_grad_pass
    compiled: Any = compile_fx(gm, list(inputs), config_patches={**options, "post_grad_custom_post_pass": passes})
    return cast(Compiled, compiled)


def as_whole(gm: fx.GraphModule, inputs: Sequence[Any], compiler: str) -> tuple[Compiled, list[str]]:
    """``gm``, the traced graph of a plan's step, compiled by ``aot_eager`` or ``inductor``; and the code that inductor wrote.

    Inductor moves no launches behind its passes, draws random numbers as eager does, and uses no cache, since a cached graph
    has no code to read. Its code for CPUs is not vectorized (``cpp.simdlen``): the last elements of a loop over vectors round
    otherwise than the others, and where loops end depends on what was fused. For the same reason it casts where the graph does
    (``emulate_precision_casts``), and does not leave numbers wider between what it fuses.
    """
    with _faked(inputs) as given:
        return (aot(gm, given, eager), []) if compiler == "aot_eager" else _by_inductor(gm, given)


@contextmanager
def _faked(inputs: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """``inputs`` as fake tensors of their shapes, of which numbers may be read: an optimizer reads its learning rate."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with tracing(TracingContext(mode)):
        yield [mode.from_tensor(one, static_shapes=True) for one in inputs]


def _by_inductor(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Compiled, list[str]]:
    import torch
    from torch._functorch import config as functorch
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    # ``compile_fx`` returns no code, but torch calls this hook with it.
    code: list[str] = []
    options = {
        **moving_nothing(),
        "fallback_random": True,
        "compile_threads": 1,
        "fx_graph_cache": False,
        "cpp.simdlen": 1,
        "emulate_precision_casts": True,
    }
    saving = GraphLowering.save_output_code
    GraphLowering.save_output_code = staticmethod(code.append)
    try:
        with functorch.patch(enable_autograd_cache=False), torch.no_grad():
            compiled: Any = compile_fx(gm, list(inputs), config_patches=options)
    finally:
        GraphLowering.save_output_code = saving
    return cast(Compiled, compiled), code


_MOVERS = (  # settings with which inductor moves launches and waits behind its post-grad passes
    "aten_distributed_optimizations.enable_simple_overlap",  # 2.15: up and down, on by default
    "aten_distributed_optimizations.enable_overlap_scheduling",
    "reorder_for_compute_comm_overlap",  # with the passes that another setting lists
)


def moving_launches() -> list[str]:
    """The settings with which inductor, as it is set now, moves launches and waits behind its passes."""
    from torch._inductor import config

    on = [name for name in _movers() if getattr(config, name)]
    return [name for name in on if name != _MOVERS[-1] or config.reorder_for_compute_comm_overlap_passes]


def moving_nothing() -> dict[str, Any]:
    """Inductor's options with which it moves no launches and no waits."""
    return dict.fromkeys(_movers(), False)


def _movers() -> list[str]:
    """The settings among :data:`_MOVERS` that this torch has."""
    from torch._inductor import config

    return [name for name in _MOVERS if hasattr(config, name)]


def inductor_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Decompositions of operators that inductor breaks down before its post-grad passes, since it has no code for them."""
    from torch._inductor.decomposition import select_decomp_table

    table: Mapping[Any, Callable[..., Any]] = select_decomp_table()
    return table


def is_whole() -> bool:
    """Whether dynamo compiles just now, and was told to raise at a graph break (``fullgraph=True``)."""
    translator = _translator()
    return translator is not None and bool(translator.one_graph)


def graph_of_dynamo() -> fx.Graph | None:
    """The graph that dynamo compiles just now; None in a backward that is compiled when it first runs."""
    translator = _translator()
    graph: fx.Graph | None = translator.output.graph if translator is not None else None
    return graph


def _translator() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # Dynamo has no current translator, and no attribute for it, while it compiles nothing on this thread.
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None


def compile_id() -> str:
    """Id of the compilation that goes on, as torch's logs write it; a backward compiled later has the id of its own graph."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def compilation() -> object | None:
    """Dynamo's context of the compilation that goes on, in the first backward too; None if nothing is compiled."""
    from torch._guards import TracingContext

    context: object | None = TracingContext.try_get()
    return context
