"""The files that ``fxbucket init --hf`` writes, for people to read and change: factory, batches and loss, and a plan.

The plan has the real size for audit, golden and collectives, and a row for what ranks run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_fxbucket.cli.first_entries import Draft
from pytest_fxbucket.cli.first_plan import DP_SHARD, RUN_SHARD, eager_lines, override_lines, parallel_lines, written_model_lines
from pytest_fxbucket.cli.hugging_face.inputs import BatchSource, keys_of
from pytest_fxbucket.cli.hugging_face.read_config import DescribedModel
from pytest_fxbucket.plan.toml_text import to_toml

_OFF = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment", "use_cache", "use_mamba_kernels")


_WIDTH, _LINE = 90, 120


@dataclass(frozen=True)
class Written:
    """What the module file is written from."""

    described: DescribedModel
    small: Mapping[str, Any]
    """Changes of the configuration for the small size."""
    fed: BatchSource
    small_fed: BatchSource
    path: Path
    """Path of the file."""
    eager_attention: bool = False
    """Whether the real size, too, has attention by plain operators."""
    always: Mapping[str, Any] = field(default_factory=dict)
    drops_nothing: bool = False
    """Whether ``always`` was given :func:`without_dropout`, which has changed something."""


def always(values: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of both sizes: no layer is left out at random, no mask is drawn by numpy, and all parts are float32."""
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key in _OFF and value:
            changes[key] = False if value is True else 0.0
        elif key == "dtype" and value not in (None, "float32"):
            changes[key] = "float32"  # parts would be built in it, and others not
        elif isinstance(value, Mapping) and (inner := always(value)):
            changes[key] = inner
    return changes


def without_dropout(values: Mapping[str, Any]) -> dict[str, Any]:
    """Changes that leave no dropout: an overridden module is called again in backward, where it would draw anew."""
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if "drop" in key and isinstance(value, float) and value > 0:
            changes[key] = 0.0
        elif isinstance(value, Mapping) and (inner := without_dropout(value)):
            changes[key] = inner
    return changes


def module_text(written: Written) -> str:
    """The file."""
    return "\n".join([*_head(written), *_model(written), *_batches(written), *_loss(written)]) + "\n"


def _head(written: Written) -> Iterator[str]:
    config, model = _names(written)
    # Both without links: ``..`` behind one is the folder above that which it leads to.
    where = Path(os.path.relpath(written.described.path.resolve(), written.path.parent.resolve())).as_posix()
    counts = "image_tokens" in written.fed.sizes
    yield f'"""{model} as {where} has it, with random weights: model, batches and loss of {written.path.stem}.toml.'
    yield ""
    yield "`fxbucket init --hf` wrote it, and it is yours to change. Nothing is downloaded."
    yield from ('"""', "", "from __future__ import annotations", "")
    yield from ["import os"] * counts
    yield from ("from pathlib import Path", "from typing import Any", "", "import torch")
    yield from (f"from transformers import {config}, {model}", "")
    if counts:
        yield "# It counts the tokens of images: a value, which a trace does not have."
        yield from ('os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")', "")
    yield from (f'CONFIG = Path(__file__).parent / "{where}"', "")
    yield f"ALWAYS: dict[str, Any] = {_literal(written.always)}"
    drops = ", nothing is dropped" if written.drops_nothing else ""
    yield f'"""Of both sizes: weights are float32, no layer is left out at random, no mask is drawn by numpy{drops}."""'
    yield from ("", f"SMALL: dict[str, Any] = {_literal(written.small)}")
    yield '"""Of the size that ranks really run: few layers, and widths divided by one number, so that all fits as before."""'


def _names(written: Written) -> tuple[str, str]:
    """Names of the classes of configuration and model."""
    return type(written.described.config).__name__, written.described.model_class.__name__


def _model(written: Written) -> Iterator[str]:
    config, model = _names(written)
    attention = '"eager"' if written.eager_attention else '"eager" if small else None'
    yield f'''

def build(small: bool = False) -> torch.nn.Module:
    """The model in float32: small, with random weights, or as the configuration has it, without memory."""
    values = merged(merged({config}.from_json_file(CONFIG).to_dict(), ALWAYS), SMALL if small else {{}})
    # Other attention than "eager" has masks only where it is traced, so bits would not be those of the trainer's own step.
    config = {config}.from_dict(values, attn_implementation={attention})
    with torch.device("cpu" if small else "meta"):
        return {model}(config)


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, table by table."""
    inner = {{key: merged(values.get(key) or {{}}, one) if isinstance(one, dict) else one for key, one in changes.items()}}
    return {{**values, **inner}}'''


def _batches(written: Written) -> Iterator[str]:
    sizes, small_sizes = written.fed.sizes, written.small_fed.sizes
    typed = [f"{key}: {'tuple[Any, ...]' if isinstance(one, tuple) else 'int'}" for key, one in sizes.items()]
    yield f'''

def batch(rank: int, step: int) -> dict[str, Any]:
    """What a rank gets in a step."""
    {_wrapped("return draw(", _arguments(sizes), ")", "    ")}


def small_batch(rank: int, step: int) -> dict[str, Any]:
    """The same for the small size."""
    {_wrapped("return draw(", _arguments(small_sizes), ")", "    ")}


{_wrapped("def draw(", ["rank: int", "step: int", *(["*"] if typed else []), *typed], ") -> dict[str, Any]:")}
    """{", ".join(keys_of(written.fed.lines))}: drawn anew for each rank and step."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    drawn: dict[str, Any] = {{}}'''
    yield from (f"    {line}" for line in written.fed.lines)
    yield "    return drawn"


def _arguments(sizes: Mapping[str, Any]) -> list[str]:
    return ["rank", "step", *(f"{key}={value}" for key, value in sizes.items())]


def _wrapped(begin: str, parts: Sequence[str], end: str, indent: str = "") -> str:
    """A call or a signature, on three lines if it is long."""
    inside = ", ".join(parts)
    if len(indent + begin + inside + end) <= _LINE:
        return f"{begin}{inside}{end}"
    return f"{begin}\n{indent}    {inside},\n{indent}{end}"


def _loss(written: Written) -> Iterator[str]:
    yield from ("", "", "def loss(output: Any, batch: dict[str, Any]) -> torch.Tensor:")
    if written.fed.gives_loss:
        yield '    """The model\'s own, a scalar."""'
        yield "    return output.loss"
    else:
        yield '    """A scalar to begin with, since the model makes none of this batch that can be traced: yours goes here."""'
        yield "    return output[0].float().square().mean()"


def _literal(value: Any, indent: str = "") -> str:
    """``value`` as Python of our own style: on one line if that is short, else a key a line."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(_literal(one) for one in value)}]"
    if not isinstance(value, Mapping):
        return repr(value)
    flat = ", ".join(f"{json.dumps(key)}: {_literal(one)}" for key, one in value.items())
    if len(indent) + len(flat) < _WIDTH:
        return f"{{{flat}}}"
    inner = f"{indent}    "
    lines = (f"{inner}{json.dumps(key)}: {_literal(one, inner)},\n" for key, one in value.items())
    return f"{{\n{''.join(lines)}{indent}}}"


@dataclass(frozen=True)
class HfPlan:
    """What the plan says of one model."""

    module: str
    """The module that has factory, batches and loss."""
    model: str
    """Its class."""
    bucket: Draft
    ties: Mapping[str, str]
    """Names of tied parameters, with those that they have in the plan."""
    may_be_idle: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    param_dtype: str | None = None
    rounds_otherwise: tuple[str, ...] = ()
    """Reasons for which torch's own step rounds otherwise, as ``[eager]`` names them."""


def plan_text(plan: HfPlan) -> str:
    """The plan file."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: HfPlan) -> Iterator[str]:
    yield f"# {plan.model}, by fxbucket init --hf: this file and {plan.module}.py are yours to change."
    yield from written_model_lines(plan.module)
    if plan.may_be_idle:
        yield "# Their gradients may be zero in every step: experts without tokens, or by the model's design."
        yield f"may_be_idle = {to_toml(list(plan.may_be_idle))}"
    yield from override_lines(plan.overridden)
    yield from parallel_lines(DP_SHARD)
    if plan.param_dtype:
        yield f'param_dtype = "{plan.param_dtype}"  # as the configuration has it'
        yield 'reduce_dtype = "float32"'
    yield from ("", *plan.bucket.lines(plan.ties))
    yield from eager_lines(plan.rounds_otherwise)
    yield from ("", "[checks]  # the real size is traced, and never in memory", "bitwise = false", "eager = false")
    yield from ("", "[[matrix]]", 'id = "small"  # what ranks run', "model.args = { small = true }")
    yield f'model.batch = "{plan.module}:small_batch"'
    yield f"run.world = {{ dp_shard = {RUN_SHARD} }}"
    yield "checks = { audit = false, golden = false, collectives = false, same = false, bitwise = true, eager = true }"
