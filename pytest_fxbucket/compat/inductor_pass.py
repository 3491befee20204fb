"""The base of what inductor takes as a graph pass: ``torch._inductor.custom_graph_pass``, in torch 2.11 to 2.15."""

from __future__ import annotations

from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["CustomGraphPass"]
