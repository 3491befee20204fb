"""Graphs that this rank decoded before: the same ones are sent again for another check of a plan, or another row of its matrix.

Decoding the graph of a small model takes as long as three of its steps.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.step.portable import PortableGraph, decode, fill

if TYPE_CHECKING:
    from torch import fx

_MOST_NODES = 30_000


class DecodedGraphs(threading.local):
    """Decoded graphs by a digest of what was sent; the oldest are forgotten first.

    Each thread has its own: ranks of one process are threads of it, and each fills in attributes of its own.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[tuple[Any, ...], fx.GraphModule]] = {}

    def take(self, sent: Mapping[str, PortableGraph], *, keep: bool) -> dict[str, fx.GraphModule]:
        """The graphs of ``sent`` with their attributes, each a module of its own, though two be equal.

        ``keep`` says that the caller changes nothing of them but tensors in their attributes, and is done with them when it
        takes others.
        """
        keys = {name: _key(one) for name, one in sent.items()}
        graphs = {name: self._kept_module(keys[name], one) or decode(one) for name, one in sent.items()}
        if keep:
            for name, one in sent.items():
                if not one.modules:  # which register operators, and may be imported anew before the next job
                    self._kept[keys[name]] = one.rows, graphs[name]
            while sum(len(rows) for rows, _ in self._kept.values()) > _MOST_NODES:
                del self._kept[next(iter(self._kept))]
        return graphs

    def _kept_module(self, key: bytes, portable: PortableGraph) -> fx.GraphModule | None:
        rows, module = self._kept.pop(key, (None, None))
        # Pickles hold functions by name only, so those of a user's module that was imported anew have the same key.
        if module is None or rows != portable.rows:
            return None
        fill(module, portable.attributes)
        return module


def _key(portable: PortableGraph) -> bytes:
    """Digest of all but attributes; of a pickle, since 1 and 1.0 are equal but not the same argument."""
    return hashlib.sha256(pickle.dumps((portable.rows, portable.modules))).digest()
