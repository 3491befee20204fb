"""AOT autograd's descriptors of the inputs and outputs of its graphs; in torch 2.11 to 2.15.

Their classes are in ``torch._functorch._aot_autograd.descriptors``, and are told by their names here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import fx

Kind = Literal["param", "buffer", "plain", "tangent", "grad", "part", "other"]
_KINDS: dict[str, Kind] = {
    "ParamAOTInput": "param",
    "BufferAOTInput": "buffer",
    "PlainAOTInput": "plain",
    "TangentAOTInput": "tangent",
    "PlainAOTOutput": "plain",
}


def described(desc: Any) -> tuple[Kind, str]:
    """The kind of an input or output, and its parameter, buffer or position.

    A DTensor goes in taken apart: its local tensor counts as the DTensor itself, its other parts are of kind "part".
    """
    name = type(desc).__name__
    if name.startswith("SubclassGetAttr"):
        return described(desc.base) if desc.attr == "_local_tensor" else ("part", "")
    if name == "GradAOTOutput" and described(desc.grad_of)[0] == "param":
        return "grad", described(desc.grad_of)[1]
    kind = _KINDS.get(name, "other")
    return kind, str(getattr(desc, "target", getattr(desc, "idx", ""))) if kind != "other" else name


def buffer_written(desc: Any) -> str:
    """The buffer whose new value an output is; empty if it is none."""
    kind, name = described(getattr(desc, "mutated_input", None))
    return name if kind == "buffer" else ""


def outputs_described(output: fx.Node) -> list[Any]:
    """AOT autograd's descriptor of each returned value; empty if it has left none."""
    return list(output.meta.get("desc") or ())


def takes_flat(graph: fx.Graph) -> None:
    """Have ``graph`` called with its inputs one after the other, and give its outputs as a tuple."""
    from torch.fx.graph import CodeGen

    graph.set_codegen(CodeGen())
