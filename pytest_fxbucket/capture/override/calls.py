"""Real modules that graphs call when they run: by which key a process finds them, and the operators that call them.

``call_forward`` runs the module, and ``call_backward`` runs it again: what backward needs it computes from the same tensors, as
activation checkpointing does (T. Chen et al., arXiv 1604.06174). So a call must not draw, write or remember anything. What can
be seen in forward is refused there; the rest in backward, which gets a digest of what forward gave and compares.

``module`` is the key of the module, ``call`` the text of a :class:`ModuleCall`, ``held`` its parameters and buffers, ``inputs``
the tensors that it is called with. ``grads`` are gradients of the results with numbers ``of``. ``wanted`` are the numbers of
those tensors, held and then inputs, whose gradients are returned.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import fx, nn

from pytest_fxbucket.capture.backward import autograd_nodes
from pytest_fxbucket.capture.override.call_text import ModuleCall, call_of, looks, looks_so, rebuilt, shown, written
from pytest_fxbucket.capture.python_state import changes, state_of
from pytest_fxbucket.compat.dispatch_keys import above_autograd
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.words import some

Tensors = Sequence[torch.Tensor]
GIVEN = "str module, str call, Tensor[] held, Tensor[] inputs"
GIVEN_BACK = f"{GIVEN}, Tensor[] grads, int[] of, int[] wanted"
_CHUNK = 1 << 18
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # SplitMix64's, as signed numbers
_count = count()
_known: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
_kept = threading.local()
"""Modules of the model that this rank built last, by key; only this keeps them. By thread, as ranks may be threads."""
_looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose first call was seen to change nothing in Python."""


def fresh_key(fqn: str) -> str:
    """A key of this process for a module called ``fqn``."""
    return f"{fqn}#{next(_count)}"


def fqn_of(key: str) -> str:
    """What people call the module."""
    return key.partition("#")[0]


def know(key: str, module: nn.Module) -> None:
    """Let graphs find ``module``, for as long as somebody else keeps it."""
    _known[key] = module


def keep_for_calls(model: nn.Module, fqns: Iterable[str]) -> None:
    """Keep the modules ``fqns`` of a rank's own ``model``, in place of earlier ones of the same names.

    Their parameters and buffers lose their memory: whoever needs first values has to have taken them.
    """
    for fqn in dict.fromkeys(fqns):
        vars(_kept)[fqn] = module = model.get_submodule(fqn)
        empty: dict[torch.Tensor, torch.Tensor] = {}  # what is tied stays tied
        places: Any = (held for inner in module.modules() for held in (inner._parameters, inner._buffers))
        for held in places:
            for name, tensor in held.items():
                if tensor is not None and tensor not in empty:
                    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    empty[tensor] = nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
                if tensor is not None:
                    held[name] = empty[tensor]


def module_at(key: str) -> nn.Module:
    """The module with this key. Raises :class:`CaptureError` if this process has none."""
    module: nn.Module | None = vars(_kept).get(key, _known.get(key))
    if module is None:
        raise CaptureError(
            f"the graph calls module {fqn_of(key)}, which this process has not built; build the model and hand it to "
            "keep_for_calls first"
        )
    return module


def modules_called_by(graph: fx.Graph) -> tuple[str, ...]:
    """Keys of the modules that ``graph`` calls when it runs, in order."""
    return tuple(dict.fromkeys(str(node.args[0]) for node in graph.nodes if node.target in (CALL_FORWARD, CALL_BACKWARD)))


def names_of(module: nn.Module) -> list[str]:
    """Names within ``module`` of its parameters, then of its buffers; a tied one has its first name."""
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


def call_forward(module: str, call: str, held: Tensors, inputs: Tensors) -> list[torch.Tensor]:
    """What the module gives, without an autograd graph; behind it its digest, where gradients are asked for.

    Raises :class:`CaptureError` for a call that a graph cannot make.
    """
    made, tensors = call_of(call), [*held, *inputs]
    real, drawn = module_at(module), torch.get_rng_state()
    first = real not in _looked_at
    twins = _twins(tensors, made.asks, safe=first)
    # Pictures of Python state are taken around the first call alone. Of later calls the digest shows what changes results.
    with _refuse_remembering(module, real) if first else nullcontext():
        results = _run(module, made, twins)
        if first:
            _refuse_strangers(module, results, twins)
    _looked_at.add(real)
    if not torch.equal(drawn, torch.get_rng_state()):
        raise CaptureError(
            f"module {fqn_of(module)} draws random numbers, which backward, where it is called again, would draw anew; set its "
            "dropout to 0, or override it by a sub-graph"
        )
    # By the operator's schema no result shares memory with an argument, so a view of one is copied.
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    given = [one.detach().clone() if one.untyped_storage().data_ptr() in storages else one.detach() for one in results]
    return [*given, digest_of(given)] if made.asks else given


def call_backward(
    module: str,
    call: str,
    held: Tensors,
    inputs: Tensors,
    grads: Tensors,
    of: Sequence[int],
    wanted: Sequence[int],
    digest: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradients of ``wanted``. ``digest`` is of what forward gave, None where the graph has no forward.

    Raises :class:`CaptureError` where the module gives something else now.
    """
    made, state = call_of(call), torch.get_rng_state()
    twins = _twins([*held, *inputs], made.asks)
    results = _run(module, made, twins)
    # Should the module draw, then what the graph draws later stays as it is without this second call.
    torch.set_rng_state(state)
    if digest is not None and not torch.equal(digest, digest_of(results)):
        raise CaptureError(
            f"module {fqn_of(module)} gives other values when backward calls it again than it gave in forward: it draws random "
            "numbers, or keeps something from call to call; give it what it draws or keeps as an input, or override it by a "
            "sub-graph with state"
        )
    with torch.enable_grad():
        found = gradients(results, [twins[i] for i in wanted], dict(zip(of, grads, strict=True)))
    promised = []
    for i, grad in zip(wanted, found, strict=True):
        if grad is None and i in made.needed:
            raise CaptureError(
                f"{made.name_of(i)} of module {fqn_of(module)} has no gradient in this call, where eager would leave .grad as "
                "it is and a graph cannot; let every call use it, set requires_grad = False, or name it in may_be_idle: it has "
                "zeros then"
            )
        if grad is None:
            promised.append(torch.zeros_like(twins[i]))
            continue
        like = torch.empty_like(twins[i], dtype=grad.dtype)  # with the strides of an empty twin
        promised.append(grad if grad.stride() == like.stride() else like.copy_(grad))
    return promised


def _empty_forward(module: str, call: str, held: Tensors, inputs: Tensors) -> list[torch.Tensor]:
    results = call_of(call).empty_results([*inputs, *held])
    return [*results, empty_digest(results)] if call_of(call).asks else results


def empty_backward(
    module: str, call: str, held: Tensors, inputs: Tensors, grads: Tensors, of: Any, wanted: Sequence[int], *_: Any
) -> list[torch.Tensor]:
    """What :func:`call_backward` gives, without values."""
    return [torch.empty_like([*held, *inputs][i]) for i in wanted]


def _define(name: str, schema: str, real: Callable[..., Any], empty: Callable[..., Any]) -> torch._ops.OpOverload:
    # Not torch.library.custom_op: its kernels run below autograd (torch 2.11 to 2.15), where nothing that the module computes
    # has a gradient, nor can be seen to read a parameter past its attribute.
    torch.library.define(f"fxbucket::{name}", f"({schema}) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"fxbucket::{name}", "default", above_autograd(real))
    torch.library.register_fake(f"fxbucket::{name}", empty)
    op: torch._ops.OpOverload = getattr(torch.ops.fxbucket, name).default
    return op


CALL_FORWARD = _define("call_forward", GIVEN, call_forward, _empty_forward)
CALL_BACKWARD = _define("call_backward", f"{GIVEN_BACK}, Tensor? digest=None", call_backward, empty_backward)


def gradients(results: Tensors, inputs: Tensors, grads: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Gradients of ``inputs``, from ``grads`` of some results by their numbers; None for an input that no gradient reaches."""
    pairs = [(results[i], grad) for i, grad in grads.items() if results[i].requires_grad]
    if not pairs:
        return [None] * len(inputs)
    outputs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, inputs, given, allow_unused=True)


def _twins(tensors: Tensors, asks: Sequence[int], *, safe: bool = False) -> list[torch.Tensor]:
    """Leaves of an autograd graph of their own, on the memory of ``tensors``.

    ``safe`` copies those without gradient, so that a write in place, refused only behind the call, does not reach them.
    """
    return [
        tensor.detach().requires_grad_() if i in asks else tensor.detach().clone() if safe else tensor.detach()
        for i, tensor in enumerate(tensors)
    ]


class _Forward(nn.Module):
    """The forward of a module alone: its hooks ran around it when the step was traced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def _run(key: str, made: ModuleCall, twins: Tensors) -> list[torch.Tensor]:
    """What the module gives with ``twins`` in place of its tensors and inputs. Raises for other results than were promised."""
    module = module_at(key)
    if list(made.state_names) != names_of(module):
        raise CaptureError(
            f"module {fqn_of(key)} has other parameters and buffers than when the step was traced: "
            f"{some(names_of(module)) or 'none'}, and it had {some(made.state_names) or 'none'}"
        )
    args, kwargs = rebuilt(made.arguments, twins[len(made.state_names) :])
    held = {f"module.{name}": twin for name, twin in zip(made.state_names, twins, strict=False)}
    versions = [twin._version for twin in twins]
    try:
        with torch.enable_grad() if made.asks else torch.no_grad():
            output = torch.func.functional_call(_Forward(module), held, args, kwargs)
    except RuntimeError as error:  # torch itself refuses writes to what gradients are asked for
        if "a leaf Variable that requires grad" not in str(error):
            raise
        raise _writing(key, "a parameter, or one of its inputs,") from error
    for i, (twin, version) in enumerate(zip(twins, versions, strict=True)):
        if twin._version != version:
            raise _writing(key, made.name_of(i))
    results: list[torch.Tensor] = []
    found = written(output, results, f"module {fqn_of(key)} gives")
    if json.dumps(found) != json.dumps(made.gives):  # as text NaN is like NaN, and 1 is not True
        raise _giving(key, f"a {shown(found)}", shown(made.gives))
    for i, (result, promise) in enumerate(zip(results, made.promise, strict=True)):
        if not looks_so(result, promise):
            raise _giving(key, f"{looks(result)} as result {i}", promise)
    return results


def _giving(key: str, what: str, promised: str) -> CaptureError:
    return CaptureError(
        f"module {fqn_of(key)} gives {what}, where {promised} was promised when the step was traced; let `output` of its "
        "override give what a call gives"
    )


def _writing(key: str, what: str) -> CaptureError:
    return CaptureError(
        f"module {fqn_of(key)} writes {what} in place, which backward, where it is called again, would write once more; give "
        "the new value back, or override it by a sub-graph with state"
    )


@contextmanager
def _refuse_remembering(key: str, module: nn.Module) -> Iterator[None]:
    """Raise :class:`CaptureError` if the block, a call of ``module``, changes its Python state; attributes are put back."""
    before, attributes = state_of(module), [(inner, dict(vars(inner))) for inner in module.modules()]
    yield
    changed = changes(before, state_of(module))
    if changed:
        for inner, held in attributes:
            vars(inner).clear()
            vars(inner).update(held)
        raise CaptureError(
            f"module {fqn_of(key)} changes {changed[0].replace('the root module', 'its own')} when it is called, and backward, "
            "where it is called again, would change it once more; give it back from forward"
        )


def _refuse_strangers(key: str, results: Tensors, twins: Tensors) -> None:
    """Raise :class:`CaptureError` if gradients of ``results`` go to another leaf than ``twins``, where they would be lost."""
    known = {id(twin) for twin in twins}
    for grad_fn in autograd_nodes(results):
        variable = getattr(grad_fn, "variable", None)
        if isinstance(variable, torch.Tensor) and id(variable) not in known:
            raise CaptureError(
                f"module {fqn_of(key)} reads a parameter of shape {tuple(variable.shape)} past its module's attribute, so its "
                "gradient would be lost; read it as the attribute that it was registered as"
            )


def digest_of(tensors: Tensors) -> torch.Tensor:
    """An int64 of shape () on the device of the first of ``tensors``, made of all bits and of their places in the tensors.

    Each 8 bytes are mixed with their place by the steps of SplitMix64 (G. Steele et al., OOPSLA 2014), and added up. Needs
    memory for a few chunks of 2 MiB at most, and does not wait for the device.
    """
    # Integers wrap, so their sum is the same in whatever order a device adds. Between chunks the total is multiplied by an odd
    # number, by which their order counts.
    total = empty_digest(tensors).zero_()
    with torch.no_grad():
        for tensor in tensors:
            flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            for start in range(0, flat.numel(), _CHUNK):
                part = flat[start : start + _CHUNK]
                size = part.numel() * part.element_size()
                words = torch.zeros(-(-size // 8), dtype=torch.int64, device=part.device)  # zeros behind the last byte
                words.view(torch.uint8)[:size].copy_(part.contiguous().view(torch.uint8))
                words.add_(torch.arange(start + 1, start + 1 + len(words), device=words.device).mul_(_ODD[0]))
                words.bitwise_xor_(words >> 30).mul_(_ODD[1])
                words.bitwise_xor_(words >> 27).mul_(_ODD[2])
                words.bitwise_xor_(words >> 31)
                total = total * _ODD[1] + words.sum().to(total.device)
    return total


def empty_digest(tensors: Tensors) -> torch.Tensor:
    """What :func:`digest_of` gives, without a value."""
    return torch.empty((), dtype=torch.int64, device=tensors[0].device if tensors else "cpu")
