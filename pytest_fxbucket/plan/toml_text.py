"""Values as TOML text: the standard library reads TOML and does not write it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(value: object) -> str:
    """Write a value that :mod:`tomllib` has read, on one line; ``tomllib`` reads the same value back."""
    if isinstance(value, str):
        # A string of JSON is one of TOML, but for DEL, which TOML takes escaped only.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(str(key))} = {to_toml(inner)}" for key, inner in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(to_toml(inner) for inner in value)}]"
    return str(value)  # numbers and dates: Python writes them as TOML does


def from_toml(text: str) -> object:
    """Read one TOML value; text that is none is taken as a string, so that quotes can be left out in a shell."""
    try:
        # With a line break the text could hold a second key, which would be lost.
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else to_toml(key)
