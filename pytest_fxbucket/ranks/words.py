"""What others say, made fit to be shown: an exception may have a message of any length, or none that can be had."""

from __future__ import annotations

MOST_OF_LINE, MOST_OF_TEXT = 1 << 11, 1 << 16
"""Characters of a message's first line, and of a longer text, that travel and are shown."""


def line_of(error: BaseException) -> str:
    """The first line of the exception's message, as far as it can be had and a person reads it."""
    try:
        line = str(error).strip().partition("\n")[0]
    except BaseException as second:
        return f"(its __str__ raised {type(second).__name__})"
    return cut(line, MOST_OF_LINE)


def cut(text: str, most: int = MOST_OF_TEXT) -> str:
    """`text`, or its beginning and its end, `most` characters in all, with a word of what was left out between them."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... ({len(text) - most:,} characters left out) ... {text[len(text) - most // 2 :]}"
