"""Finds a small size that makes a step as ordinary code, and what it and the real size, without memory, say of a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli import written_files
from pytest_fxbucket.cli.hugging_face.inputs import BatchSource, fed, has_image_tokens, keys_of
from pytest_fxbucket.cli.hugging_face.module_and_plan import Written, always, module_text
from pytest_fxbucket.cli.hugging_face.read_config import DescribedModel
from pytest_fxbucket.cli.hugging_face.small import merged, small_sizes
from pytest_fxbucket.errors import CaptureError, named

if TYPE_CHECKING:
    from torch import Tensor, nn

MOST_BYTES = 1 << 30
"""Most bytes of parameters of a size that is tried."""
_STEPS, _RANKS, _RATE = 3, 2, 1e-2


@dataclass(frozen=True)
class RunnableSize:
    """A small size that makes a step."""

    written: Written
    idle: tuple[str, ...]
    """Parameters whose gradients were zero in every step, on every rank."""


def rehearsed(described: DescribedModel, path: Path) -> RunnableSize:
    """The smallest size of ``described`` that builds and makes a step; the module will be the file ``path``.

    Raises :class:`CaptureError` if none does, with what the model says to that.
    """
    values, said = described.values, dict[str, Exception]()
    for small in small_sizes(values):
        try:
            if (size := _bytes(described, small)) > MOST_BYTES:
                raise CaptureError(f"the smallest size that it takes has {size >> 20:,} MiB of parameters")
            written = replace(_written(described, small, path), always=always(values))
            with loaded(written) as module:
                return RunnableSize(written, tuple(_idle(module)))
        except Exception as error:  # whatever a model raises on a configuration or batch that it does not take
            said.setdefault(named(error), error)
    first = next(iter(said.values()))
    name = described.model_class.__name__
    try:
        what = f"it was fed {', '.join(keys_of(fed(described.model_class, values).lines))}"
    except Exception:  # then this is what went wrong
        what = "it was fed nothing"
    raise CaptureError(
        f"{name} makes no step of a small configuration of {described.path}: {named(first).rstrip('.')}; {what}: if it "
        "takes other inputs or a smaller size, write factory and batch, and give them to fxbucket init module:factory"
    ) from first


def _written(described: DescribedModel, small: Mapping[str, Any], path: Path) -> Written:
    """The file for the small size ``small``; in the text of either size an image has as many tokens as features."""
    values = described.values
    feds, model_class = list[BatchSource](), described.model_class
    for changes in ({}, small):  # the real size, then the small one
        now, tokens = merged(values, changes), 0
        if has_image_tokens(model_class, values):
            # Drawn with one token to begin with: how large an image is does not depend on their number.
            tokens = _image_tokens(described, changes, fed(model_class, now, 1))
        feds.append(fed(model_class, now, tokens))
    return Written(described, small, feds[0], feds[1], path)


def _image_tokens(described: DescribedModel, changes: Mapping[str, Any], drawn: BatchSource) -> int:
    """Rows of features that the model makes of one image: found without memory, or estimated if the model reads values."""
    import torch

    from pytest_fxbucket.compat.pytree import tensors_in

    sizes = drawn.sizes
    if "grid" in sizes:
        _, height, width = sizes["grid"][0]
        merge = (described.values.get("vision_config") or {}).get("spatial_merge_size", 2)
        return int(height * width // merge**2)
    model: Any = _without_memory(described, changes)
    try:
        with torch.device("meta"), torch.no_grad():
            found = model.get_image_features(pixel_values=torch.randn(sizes["image"]))
    except Exception:  # it looks at values, so a trace will say more
        return _patches(merged(described.values, changes), sizes["image"][-1])
    # Features may come bare or in an output. Their elements, divided by width and images, are the tokens of an image.
    found = getattr(found, "pooler_output", found)
    hidden = model.get_input_embeddings().weight.shape[1]
    elements = sum(one.numel() for one in tensors_in(found))
    return int(elements // hidden // sizes["image"][0])


def _patches(values: Mapping[str, Any], image: int) -> int:
    """Patches of an image, divided by how many are shuffled into one; or the number of queries, if there is one."""
    if "num_query_tokens" in values:
        return int(values["num_query_tokens"])
    side = image // (values.get("vision_config") or values).get("patch_size", 14)
    return int(side**2 // values.get("scale_factor", 1) ** 2)


def laid_out(written: Written) -> AbstractContextManager[Path]:
    """A folder with the file in it, first on the path."""
    return written_files.laid_out(written.path.stem, lambda path: module_text(replace(written, path=path)))


def loaded(written: Written) -> AbstractContextManager[ModuleType]:
    """The file as a module, though it is not in its place yet."""
    return written_files.loaded(written.path.stem, lambda path: module_text(replace(written, path=path)))


def _without_memory(described: DescribedModel, changes: Mapping[str, Any]) -> nn.Module:
    import torch

    config = described.with_changes(merged(always(described.values), changes))
    with torch.device("meta"):
        model: nn.Module = described.model_class(config)
    return model


def _bytes(described: DescribedModel, changes: Mapping[str, Any]) -> int:
    """Bytes of all parameters."""
    return sum(one.numel() * one.element_size() for one in _without_memory(described, changes).parameters())


def _idle(module: ModuleType) -> list[str]:
    """Names of the parameters whose gradients are zero in all steps; SGD between them, since weights may begin with zeros."""
    import torch

    torch.manual_seed(0)
    model: nn.Module = module.build(small=True)
    seen: dict[str, bool] = {}
    for step in range(_STEPS):
        model.zero_grad()
        for rank in range(_RANKS):
            batch = module.small_batch(rank, step)
            loss: Tensor = module.loss(model(**batch), batch)
            loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                seen[name] = seen.get(name, False) or bool(parameter.grad.any())
                parameter.data -= _RATE * parameter.grad
    return [name for name, moved in seen.items() if not moved]


def may_be_idle(model: nn.Module, idle: Sequence[str]) -> tuple[str, ...]:
    """Entries for ``[model] may_be_idle``: lists of experts in ``model``, and ``idle``, parameters of its small size.

    An expert's weights may be parts of one parameter, which is never idle as a whole and is left out.
    """
    from torch import nn

    experts = [(fqn, module) for fqn, module in model.named_modules() if fqn.rpartition(".")[2] == "experts"]
    lists = [f"{fqn}.*" for fqn, module in experts if isinstance(module, nn.ModuleList)]
    known = {name for name, _ in model.named_parameters()}
    rest = [name for name in idle if name in known and not any(name.startswith(entry.removesuffix("*")) for entry in lists)]
    of_each_layer = (re.sub(r"\.\d+(?=\.)", ".*", entry) for entry in lists)
    return tuple(dict.fromkeys([*of_each_layer, *_together(rest, sorted(known))]))


def _together(idle: list[str], known: list[str]) -> list[str]:
    """Names of idle parameters; modules all of whose parameters are idle go by their own names."""
    found: list[str] = []
    for name in idle:
        # The shortest prefix of the name all of whose parameters are idle, so that a whole module is one entry.
        stems = name.split(".")
        paths = [".".join(stems[:end]) for end in range(1, len(stems) + 1)]
        found.append(next(p for p in paths if all(one in idle for one in known if one == p or one.startswith(f"{p}."))))
    return list(dict.fromkeys(found))
