"""For the server of ranks: what a first compilation imports, registers and looks up is there in each rank that is forked."""

from __future__ import annotations

import torch
from tqdm import tqdm

from suites.compiled.rank_jobs_of_compiled import WITHOUT_CODE
from suites.compiled.small_nets import Net, step

# Inductor counts passes by a bar, whose monitor is a thread, and a server with two cannot fork.
tqdm.monitor_interval = 0
# In a build of torch for GPUs the first backward starts threads of autograd's for them, whether they are there or not.
if torch.version.cuda is None:
    with torch.compiler.config.patch(force_disable_caches=True):
        step(torch.compile(Net(), options=WITHOUT_CODE))
    torch._dynamo.reset()
