"""What is written down of one call of an overridden module, in the text that its node carries."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call: what it is given, what it gives, and where gradients go. Plain data."""

    held: tuple[str, ...]
    """Names, within the module, of the parameters, buffers and state that it reads, in the order of the node's argument."""
    given: Any
    """(args, kwargs) as :mod:`pytest_fxbucket.capture.override.structure` writes them."""
    gives: Any
    """The result, likewise."""
    promise: tuple[str, ...]
    """Of each tensor in the result."""
    asks: tuple[int, ...]
    """Those of held, then of the tensors given, by number, that a gradient is asked for; none where gradients are off."""
    unused: str = "zeros"
    """What is done where backward has no gradient for one that is asked for: ``zeros``, or it is ``refused``."""

    def text(self) -> str:
        """All of it, in one line."""
        return json.dumps(asdict(self))


@lru_cache(maxsize=10_000)
def call_of(text: str) -> Call:
    """The call that :meth:`Call.text` wrote."""
    raw = json.loads(text)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
    return Call(**values)
