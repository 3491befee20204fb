"""The files that ``fxbucket init --torchtitan`` writes: torchtitan's own functions, called for a plan, and the plan.

The plan says what torchtitan's defaults do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_fxbucket.cli.first_entries import Draft
from pytest_fxbucket.cli.first_plan import DP_SHARD, RUN_SHARD, override_lines, parallel_lines, written_model_lines
from pytest_fxbucket.cli.torchtitan.registry import VERSION, ChosenModel
from pytest_fxbucket.plan.toml_text import to_toml


@dataclass(frozen=True)
class TitanModule:
    """What the module file is written from."""

    name: str
    """Name of the file, without its ending."""
    chosen: ChosenModel
    has_passes: bool
    """Whether torchtitan's compiler toolkit has the model."""
    has_experts: bool
    """Whether it is a mixture of torchtitan's grouped experts."""


def module_text(module: TitanModule) -> str:
    """The file."""
    return (
        "\n".join([*_head(module), *_experts(module), *_model(module), *_batches(module), *_trainer(), *_toolkit(module)])
        + "\n"
    )


def _head(module: TitanModule) -> Iterator[str]:
    chosen = module.chosen
    managers = "\nfrom contextlib import ExitStack, contextmanager" if module.has_passes else ""
    mocked = "\nfrom unittest import mock" if module.has_passes else ""
    operators = "\nimport torch._inductor.fx_passes.bucketing  # what passes put into graphs, for ranks, too"
    operators = operators if module.has_passes else ""
    yield f'"""{chosen.name} of torchtitan, {chosen.flavor}: model, batches, loss and trainer of {module.name}.toml.'
    yield f'''
`fxbucket init --torchtitan` wrote it for torchtitan {VERSION}, and it is yours to change.
"""

from __future__ import annotations

import sys
from collections.abc import {"Iterator, Mapping" if module.has_passes else "Mapping"}{managers}
from copy import deepcopy
from importlib.util import find_spec
from types import ModuleType
from typing import Any{mocked}

import torch
import torch.distributed as dist{operators}
from torch import Tensor, nn
{_imports(module)}

def stand_in(name: str, *functions: str) -> None:
    """For a module of torchtitan that cannot be imported on a CPU, where nothing calls its functions."""
    module = ModuleType(name)
    vars(module).update(dict.fromkeys(functions))
    sys.modules.setdefault(name, module)


if find_spec("triton") is None:
    stand_in("torchtitan.models.moe.kernels", "generate_permute_indices")

from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, parallel_dims  # noqa: E402
from torchtitan.distributed.utils import clip_grad_norm_  # noqa: E402
{_moe(module)}from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

MODEL = "{chosen.name}"
SPEC = get_train_spec(MODEL)
FLAVOR = "{chosen.flavor}"'''
    if chosen.small != chosen.flavor:
        yield f'SMALL = "{chosen.small}"  # what ranks run'


def _moe(module: TitanModule) -> str:
    return "from torchtitan.models.moe import moe  # noqa: E402\n" if module.has_experts else ""


def _experts(module: TitanModule) -> Iterator[str]:
    """Code that makes experts compute the same numbers with operators that a CPU has."""
    if module.has_experts:
        yield '''

class CountedTokens(TorchFunctionMode):
    """Tokens are counted by comparison, since a CPU has histc for floats alone."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.histc:
            return function(*args, **(kwargs or {}))
        chosen, bins = args[0], kwargs["bins"]
        return (chosen[:, None] == torch.arange(bins, device=chosen.device)).sum(0)


def for_a_cpu() -> None:
    """Experts of torchtitan, and nothing else: tokens are not padded for a kernel of CUDA, either."""
    run = moe.MoE.forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with CountedTokens():
            return run(self, x)

    moe.MoE.forward = forward
    moe.indices_padding_wrapper = lambda run: run


if not torch.cuda.is_available():
    for_a_cpu()'''


def _imports(module: TitanModule) -> str:
    """Imports that only the compiler toolkit's graph needs, or experts."""
    dealt = "from torch.distributed.tensor import distribute_tensor\n" if module.has_passes else ""
    mode = "from torch.overrides import TorchFunctionMode\n" if module.has_experts else ""
    steps = "\nfrom pytest_fxbucket.capture import TracedStep, joint_step\n" if module.has_passes else ""
    return dealt + mode + steps


def _small(module: TitanModule) -> str:
    return "FLAVOR" if module.chosen.small == module.chosen.flavor else "SMALL"


def _model(module: TitanModule) -> Iterator[str]:
    yield '''

def config() -> JobConfig:
    """The job: torchtitan's defaults, but for the size of a batch, which changes no collective."""
    job = JobConfig()
    job.model.name, job.model.flavor = MODEL, FLAVOR
    job.training.local_batch_size, job.training.seq_len = 2, 32
    return job


def build(flavor: str = FLAVOR) -> nn.Module:'''
    if _small(module) == "FLAVOR":
        yield '    """The model by its own initialisation."""'
    else:
        yield '    """The model by its own initialisation; without memory, if it is not the small one."""'
    yield """    arguments = deepcopy(SPEC.model_args[flavor])
    arguments.update_from_config(config())
    with torch.device("meta"):
        model: nn.Module = SPEC.model_cls(arguments)"""
    if module.has_experts:
        yield """    for one in model.modules():
        if isinstance(one, moe.GroupedExperts):
            one.use_grouped_mm = True  # where there is no GPU torchtitan has a loop, which looks at values"""
    if _small(module) != "FLAVOR":
        yield "    if flavor != SMALL:\n        return model"
    yield """    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model"""


def _batches(module: TitanModule) -> Iterator[str]:
    yield '''

def batch(rank: int, step: int, flavor: str = FLAVOR) -> dict[str, Tensor]:
    """Tokens, and those that come next: drawn anew for each rank and step."""
    generator, training = torch.Generator().manual_seed(1_000_003 * step + rank), config().training
    shape = training.local_batch_size, training.seq_len + 1
    drawn = torch.randint(SPEC.model_args[flavor].vocab_size, shape, generator=generator)
    return {"tokens": drawn[:, :-1], "labels": drawn[:, 1:]}'''
    if _small(module) != "FLAVOR":
        yield '''

def small_batch(rank: int, step: int) -> dict[str, Tensor]:
    """The same for the small flavor."""
    return batch(rank, step, SMALL)'''
    yield f'''

LOSS = SPEC.build_loss_fn(config())


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """torchtitan's, a sum, as the mean of this rank's tokens; the plan's reduction is the mean of ranks."""
    total: Tensor = LOSS(output, batch["labels"])
    return total / batch["labels"].numel()


def dims(mesh: Mapping[str, int]) -> ParallelDims:
    """The plan's mesh as torchtitan has it, on the device of this process group."""
    parallel_dims.device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    replicas, shards, tp = (mesh.get(name, 1) for name in ("dp_replicate", "dp_shard", "tp"))
    return ParallelDims(replicas, shards, cp=1, tp=tp, pp=1, ep=1, etp=1, world_size=replicas * shards * tp)


class Trainer:
    """torchtitan's own step, of [eager]: its parallelize function, optimizers and clipping."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        ranks, self.job = dims(mesh), config()
        model = build({_small(module)}).to(parallel_dims.device_type)
        self.model: nn.Module = SPEC.parallelize_fn(model, ranks, self.job)
        self.optimizers = list(SPEC.build_optimizers_fn([self.model], self.job.optimizer, ranks))
        self.replicas = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)'''


def _trainer() -> Iterator[str]:
    yield '''
    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        """Gradients are added over ranks and not averaged: a token counts as one of all ranks'."""
        mean = loss(self.model(batch["tokens"]), batch)
        (mean / self.replicas).backward()
        return mean.detach()

    def update(self) -> None:
        """Clip, step."""
        clip_grad_norm_(list(self.model.parameters()), self.job.training.max_norm, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()'''


def _toolkit(module: TitanModule) -> Iterator[str]:
    if module.has_passes:
        yield f'''

class WithLoss(nn.Module):
    """What is traced: the model, and the loss of what it gives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The scalar."""
        return loss(self.model(tokens), {{"labels": labels}})


def traced() -> TracedStep:
    """The step as torchtitan's compiler toolkit traces it, over SimpleFSDP: a plan's [graph] factory."""
    from torchtitan.experiments.compiler_toolkit.graph_utils import export_joint

    job = config()
    job.activation_checkpoint.mode = "none"  # the partitioner's, behind this graph
    torch.manual_seed(0)
    whole, model = build({_small(module)}), build({_small(module)})
    shards = dims({{"dp_shard": dist.get_world_size()}})
    model = get_train_spec(f"simple_fsdp.{{MODEL}}").parallelize_fn(model, shards, job)
    for name, own in model.named_parameters():  # process groups may be fake, so nothing is sent
        dealt = distribute_tensor(whole.get_parameter(name), own.device_mesh, own.placements, src_data_rank=None)
        own.to_local().detach().copy_(dealt.to_local().detach())
    given = {"small_batch" if _small(module) == "SMALL" else "batch"}(dist.get_rank(), 0)
    joint, _ = export_joint(WithLoss(model), (given["tokens"], given["labels"]))
    return joint_step(joint.graph_module, WithLoss(model), (given["tokens"], given["labels"]), inner="model")


PASSES = ["transformer_block_bucketing"]
"""Of torchtitan's compiler toolkit, as --compile.passes names them."""


def passes(gm: torch.fx.GraphModule, plans: Any) -> torch.fx.GraphModule:
    """torchtitan's own pipeline: pytest --fxbucket-plans={module.name}.toml --fxbucket-pass={module.name}:passes."""
    with without_a_gpu():
        from torchtitan.experiments.compiler_toolkit.passes import AVAILABLE_COMPILER_PASSES

        for name in PASSES:
            options = {{"fsdp_manual_buckets": plans}} if name == "transformer_block_bucketing" else {{}}
            gm = AVAILABLE_COMPILER_PASSES[name](gm, None, **options)
    return gm


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """Where there is none: no CUDA graphs, and no estimates of time, which torch's pass makes and does not read."""
    with ExitStack() as inside:
        if not torch.cuda.is_available():
            stand_in("torchtitan.experiments.compiler_toolkit.cudagraph", "CUDAGraphWrapper", "get_static_input_indices")
            for name in ("get_transfer_time", "get_compute_time"):
                inside.enter_context(mock.patch(f"torch.utils._runtime_estimation.{{name}}", return_value=0.0))
        yield'''


_RANKS = "audit = false, golden = false, collectives = false, same = false, bitwise = true"


@dataclass(frozen=True)
class TitanPlan:
    """What the plan says of one model."""

    module: str
    """The module that has factory, batches, loss and trainer."""
    chosen: ChosenModel
    job: Any
    """torchtitan's configuration."""
    bucket: Draft
    ties: Mapping[str, str]
    """Names of tied parameters, with those that they have in the plan."""
    checkpoint: Mapping[str, tuple[str, ...]]
    """By flavor, the layers whose forward is computed again in backward."""
    overridden: tuple[str, ...] = ()

    @property
    def has_trainer(self) -> bool:
        """Whether torchtitan's own step is of the plan's model: it shards tied parameters twice, which unties them."""
        return not self.ties


def plan_text(plan: TitanPlan) -> str:
    """The plan file."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: TitanPlan) -> Iterator[str]:
    chosen, training = plan.chosen, plan.job.training
    yield f"# {chosen.name} of torchtitan, {chosen.flavor}: this file and {plan.module}.py are yours to change."
    yield from written_model_lines(plan.module)
    yield from override_lines(plan.overridden)
    yield from parallel_lines(DP_SHARD)
    yield f'param_dtype = "{training.mixed_precision_param}"'
    yield f'reduce_dtype = "{training.mixed_precision_reduce}"'
    yield from ("", "[step]", f"clip_norm = {float(training.max_norm)}")
    if again := plan.checkpoint[chosen.flavor]:
        yield f"checkpoint = {to_toml(list(again))}  # as {_mode(plan.job.activation_checkpoint)} does"
    yield from ("", *_optimizer(plan.job.optimizer), "", *plan.bucket.lines(plan.ties), "")
    if plan.has_trainer:
        yield from (
            "[eager]  # torchtitan's own parallelize function, optimizers and clipping",
            f'factory = "{plan.module}:Trainer"',
        )
    else:
        yield "# Item eager is beside torch's own step: torchtitan's units shard the tied parameter twice, and so part it."
    yield ""
    if chosen.small == chosen.flavor:
        yield from ("[run]", f"world = {{ dp_shard = {RUN_SHARD} }}")
        return
    yield from ("[checks]  # this flavor is traced, and never in memory", "bitwise = false", "eager = false", "")
    yield from ("[[matrix]]", 'id = "small"  # what ranks run', f'model.args = {{ flavor = "{chosen.small}" }}')
    yield f'model.batch = "{plan.module}:small_batch"'
    yield f"step.checkpoint = {to_toml(list(plan.checkpoint[chosen.small]))}"
    yield f"run.world = {{ dp_shard = {RUN_SHARD} }}"
    yield f"checks = {{ {_RANKS}, eager = true }}"


def _mode(again: Any) -> str:
    return f"{again.mode} {again.selective_ac_option}" if again.mode == "selective" else str(again.mode)


def _optimizer(given: Any) -> Iterator[str]:
    yield "[optimizer]"
    yield f'factory = "torch.optim:{given.name}"'
    numbers = f"lr = {given.lr}, betas = [{given.beta1}, {given.beta2}], eps = {given.eps}, weight_decay = {given.weight_decay}"
    how = {"fused": ", fused = true", "foreach": ", foreach = true"}.get(given.implementation, "")  # "for-loop": neither
    yield f"args = {{ {numbers}{how} }}"
