"""The schema of a plan file: a field for each table, whose dataclasses are in the modules ``schema_*`` and ``cluster``.

The schema is the type: an unknown key is one that is no field, and each field's metadata holds the rule that reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pytest_fxbucket.pass_names import listed
from pytest_fxbucket.plan.cluster import Cluster
from pytest_fxbucket.plan.rules import DEGREES, Rule
from pytest_fxbucket.plan.schema_bucket import Bucket, Overlap, Passes, Transform
from pytest_fxbucket.plan.schema_checks import Checks, Eager, Run
from pytest_fxbucket.plan.schema_model import Graph, Model, Optimizer, Override, Parallel, Pipeline, Step


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan file with one row of its matrix applied, or none; compares by value and can be pickled."""

    path: Path
    matrix_id: str | None = None
    model: Model | None = field(default=None, metadata={"table": Model})
    graph: Graph | None = field(default=None, metadata={"table": Graph})
    parallel: Parallel = field(default_factory=Parallel, metadata={"table": Parallel})
    pipeline: Pipeline | None = field(default=None, metadata={"table": Pipeline})
    """Left out: the model is one stage."""
    step: Step = field(default_factory=Step, metadata={"table": Step})
    override: tuple[Override, ...] = field(default=(), metadata={"table": Override, "several": True})
    """Left out: every module is traced."""
    optimizer: tuple[Optimizer, ...] = field(default=(), metadata={"table": Optimizer, "several": True})
    """Left out: the step ends with the reduced gradients."""
    bucket: Bucket = field(default_factory=Bucket, metadata={"table": Bucket})
    overlap: Overlap = field(default_factory=Overlap, metadata={"table": Overlap})
    passes: Passes = field(default_factory=Passes, metadata={"table": Passes, "name": "pass"})
    transform: tuple[Transform, ...] = field(default=(), metadata={"table": Transform, "several": True})
    """Left out: the pass alone."""
    run: Run = field(default_factory=Run, metadata={"table": Run})
    eager: Eager = field(default_factory=Eager, metadata={"table": Eager})
    cluster: Cluster | None = field(default=None, metadata={"table": Cluster})
    """Left out: nothing is simulated."""
    checks: Checks = field(default_factory=Checks, metadata={"table": Checks})

    @property
    def traced(self) -> Model | Graph | None:
        """What the step comes from."""
        return self.model or self.graph

    @property
    def pass_name(self) -> str:
        """The name that stands for its passes."""
        return listed(self.passes.of)

    @property
    def crosses_iterations(self) -> bool:
        """Whether ``next_iteration`` is among its transformations."""
        return any(one.name == "next_iteration" for one in self.transform)

    @property
    def stages(self) -> int:
        """How many stages the model is cut into; 1 without ``[pipeline]``."""
        return 1 if self.pipeline is None else self.pipeline.stages or len(self.pipeline.cuts) + 1

    @property
    def world_size(self) -> int:
        """Ranks of the real job's mesh."""
        return prod(self.degrees.values())

    @property
    def run_world(self) -> int:
        """Ranks that are really run."""
        return prod(self.run_degrees.values())

    @property
    def degrees(self) -> dict[str, int]:
        """Size of each dimension of the real job's mesh, the outermost first; ``ep`` is a part of ``dp_shard``."""
        return {name: getattr(self.parallel, name) for name in DEGREES}

    @property
    def run_degrees(self) -> dict[str, int]:
        """The same of the mesh that is really run: ``[run] world``, where it says nothing ``[parallel]``."""
        return self.degrees | dict(self.run.world)


class Key(NamedTuple):
    """One key of the plan file; ``default`` is ``dataclasses.MISSING`` for a key that must be given."""

    table: str
    key: str
    default: object
    rule: Rule


def tables() -> dict[str, type[Any]]:
    """Give the dataclass of each table, by its name in the file."""
    return {_table_of(spec): spec.metadata["table"] for spec in dataclasses.fields(Plan) if "table" in spec.metadata}


def field_of(table: str) -> str:
    """Give the field of :class:`Plan` that has ``table``, whose name may be a word of Python's own."""
    return next(spec.name for spec in dataclasses.fields(Plan) if _table_of(spec) == table)


def _table_of(spec: dataclasses.Field[Any]) -> str:
    return str(spec.metadata.get("name", spec.name))


def may_be_several(table: str) -> bool:
    """Whether ``table`` may be an array of tables."""
    return bool(Plan.__dataclass_fields__[field_of(table)].metadata.get("several"))


def rule_of(table: str, key: str) -> Rule:
    """Give the rule of ``[table] key``."""
    rule: Rule = tables()[table].__dataclass_fields__[key].metadata["rule"]
    return rule


def keys() -> Iterator[Key]:
    """Yield every key of the plan file, in the order of the schema."""
    for table, cls in tables().items():
        for spec in dataclasses.fields(cls):
            default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
            yield Key(table, spec.name, default, spec.metadata["rule"])
