"""Ring attention of torch's own context parallelism: ``torch.distributed.tensor.experimental``, in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention

Kernel = Callable[..., tuple[torch.Tensor, ...]]
_SEQUENCE = 2


def ring_attention(
    kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a sequence whose parts are on ranks in order, each (batch, heads, sequence, head_dim); and its logsumexp.

    ``kernel(query, key, value, is_causal=...)`` gives attention and logsumexp of one block.
    """
    with _from_neighbour_to_neighbour():
        out, logsumexp = _attention._templated_ring_attention(group, _SEQUENCE, kernel, query, key, value, is_causal)
    return out, logsumexp


def ring_attention_backward(
    kernel: Kernel,
    gradient: torch.Tensor,
    kept: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    is_causal: bool,
) -> tuple[torch.Tensor, ...]:
    """Gradients of queries, keys and values; ``kept`` are the three, and what :func:`ring_attention` gave for them.

    ``kernel`` takes all of these by name, ``gradient`` as ``grad_out``, and gives the gradients of one block.
    """
    given: Any = (group, _SEQUENCE, kernel, gradient, "grad_out", *kept, is_causal)
    with _from_neighbour_to_neighbour():
        return _attention._templated_ring_attention_backward(*given)


class _Neighbours:
    """In its blocks parts of a sequence are in order of ranks, and keys and values go from rank to rank, not gathered.

    That is a setting of the process, and ranks may be threads: the first one in sets it, the last one out puts it back.
    """

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0
        self._before: tuple[Any, Any] = (None, None)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        options = _attention._cp_options
        with self._lock:
            if not self._inside:
                self._before = options.enable_load_balance, options.rotate_method
                options.enable_load_balance, options.rotate_method = False, _attention._RotateMethod.ALL_TO_ALL
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    options.enable_load_balance, options.rotate_method = self._before


_from_neighbour_to_neighbour = _Neighbours()
