"""What travels between the parent and a rank: pickles, with the bytes of CPU tensors beside them.

A frame is a list of buffers: four bytes that begin every frame, ``count`` (uint32), ``count`` lengths in bytes (uint64 each),
all little endian, then the buffers. The first buffer is a pickle (protocol 5), the others its out-of-band buffers. Tensors
become plain copies: no shared memory, no files.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
import sys
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HEAD = struct.Struct("<4sI")
_LENGTH_BYTES = 8
BEGIN = b"fxb1"
# More is no frame of ours, whatever it begins with.
_MOST_BUFFERS, _MOST_BYTES = 1 << 24, 1 << 44

Buffer = bytes | bytearray | memoryview


class Unpicklable(Exception):
    """An object that cannot be sent; the text says why."""


class GarbledFrameError(Exception):
    """Bytes that are no frame."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not is_plain_tensor(value):
            return NotImplemented
        # As pickle has it: (function, arguments, state, items, pairs, what puts the state back).
        return (*reduce_tensor(value), vars(value), None, None, _put_attributes) if vars(value) else reduce_tensor(value)


def pack(value: object) -> list[Buffer]:
    """The pickle of ``value`` and its out-of-band buffers, which share the memory of its tensors. Raises Unpicklable."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = _pickled(value, buffers.append)
    return [pickled, *(buffer.raw() for buffer in buffers)]


def unpack(buffers: Sequence[Buffer]) -> object:
    """The value behind ``pack``; tensors own the received memory. Raises Unpicklable."""
    try:
        return pickle.loads(buffers[0], buffers=buffers[1:])
    except Exception as error:
        raise Unpicklable(f"{type(error).__name__}: {line_of(error)}") from error


def pack_whole(value: object) -> bytes:
    """``value`` as one pickle, tensors copied into it: to be part of another value. Raises Unpicklable.

    Not as PickleBuffers of ``pack``'s memoryviews: CPython crashes when it collects garbage that has both.
    """
    return _pickled(value, None)


def _pickled(value: object, beside: Callable[[pickle.PickleBuffer], object] | None) -> bytes:
    """The pickle of ``value``; ``beside`` gets the buffers that do not go into it, where there is one."""
    out = io.BytesIO()
    try:
        _Pickler(out, protocol=5, buffer_callback=beside).dump(value)
    except Exception as error:
        # Picklers raise PicklingError, TypeError, AttributeError, RecursionError, or whatever a __reduce__ raises.
        raise Unpicklable(f"{type(error).__name__}: {line_of(error)}") from error
    return out.getvalue()


def head(buffers: Sequence[Buffer]) -> bytes:
    """The beginning, the count and the lengths that go before ``buffers``."""
    return HEAD.pack(BEGIN, len(buffers)) + b"".join(struct.pack("<Q", memoryview(b).nbytes) for b in buffers)


def frame(most_bytes: int = _MOST_BYTES) -> Generator[bytearray, None, list[Buffer]]:
    """The parts of a frame, each to be filled before the next is asked for; its buffers in the end.

    Raises GarbledFrameError for what is no frame, or has more than ``most_bytes``.
    """
    first = bytearray(HEAD.size)
    yield first
    begin, count = HEAD.unpack(first)
    # Checked before any memory is taken: bytes of something else may claim any length.
    if begin != BEGIN or not 0 < count <= min(_MOST_BUFFERS, most_bytes):
        raise GarbledFrameError
    second = bytearray(count * _LENGTH_BYTES)
    yield second
    lengths = struct.unpack(f"<{count}Q", second)
    if sum(lengths) > most_bytes:
        raise GarbledFrameError
    buffers: list[Buffer] = []
    for length in lengths:
        buffers.append(buffer := bytearray(length))
        yield buffer
    return buffers


def is_plain_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor or parameter that is nothing but its numbers, and attributes that somebody gave it."""
    torch = sys.modules.get("torch")
    # torch is not imported for this: where nobody has imported it there are no tensors.
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return bool(value.layout == torch.strided and value.device.type in ("cpu", "cuda") and not value.is_quantized)


def reduce_tensor(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """``rebuild_tensor`` and its arguments for a copy of a plain tensor; the first of these shares its memory if it can."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().cpu()  # what was on a GPU arrives on the CPU
    # Only a view of a part, or an expanded tensor, is copied, and arrives contiguous; a dense tensor keeps its strides.
    if not _is_dense(plain):
        plain = plain.contiguous()
    buffer = pickle.PickleBuffer(_bytes_of(plain))
    dtype = str(plain.dtype).removeprefix("torch.")
    is_parameter = type(tensor) is torch.nn.Parameter
    args = (buffer, dtype, tuple(plain.shape), plain.stride(), tensor.requires_grad, is_parameter)
    return rebuild_tensor, args


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one span of memory, each once, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _bytes_of(tensor: torch.Tensor) -> Any:
    # Not by way of NumPy, which has no bfloat16.
    array = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # keeps the memory alive as long as the buffer
    return array


def rebuild_tensor(
    data: bytearray, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    """The tensor on the memory ``data``; ``dtype`` as "float32"."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    if len(data):
        flat = torch.frombuffer(data, dtype=torch.uint8).view(kind)
        tensor = flat.as_strided(shape, stride)
    else:
        # torch.frombuffer refuses an empty buffer.
        tensor = torch.empty_strided(shape, stride, dtype=kind, device="cpu")
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _put_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


MOST_OF_LINE, MOST_OF_TEXT = 1 << 11, 1 << 16
"""Characters of a message's first line, and of a longer text, that travel and are shown."""


def class_name(kind: type) -> str:
    """Its name on every rank."""
    return f"{kind.__module__}.{kind.__qualname__}"


def line_of(error: BaseException) -> str:
    """The first line of the exception's message, cut to a length that a person reads; a note if it cannot be had."""
    try:
        line = str(error).strip().partition("\n")[0]
    except BaseException as second:
        return f"(its __str__ raised {type(second).__name__})"
    return cut(line, MOST_OF_LINE)


def cut(text: str, most: int = MOST_OF_TEXT) -> str:
    """``text``, or its beginning and its end, ``most`` characters in all, with a word of what was left out between them."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... ({len(text) - most:,} characters left out) ... {text[len(text) - most // 2 :]}"
