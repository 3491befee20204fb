"""What trainers of torchtitan and transformers import, for the server of ranks: each rank would import it anew, in 5 s."""

from __future__ import annotations

import os
from importlib import import_module

from pytest_fxbucket.cli.torchtitan.registry import stand_in_for_triton_kernels
from suites.zoo.libraries import provide

# pyarrow's allocator would start a thread, and a server with two cannot fork.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
provide()
stand_in_for_triton_kernels()
for name in (
    "suites.zoo.titan_captured",
    "suites.zoo.titan_trainer",
    "pytest_fxbucket.train_step",
    "torchtitan.config",
    "torchtitan.distributed.utils",
    "torchtitan.models.llama3.infra.parallelize",
    "transformers.models.llama.modeling_llama",
):
    import_module(name)
