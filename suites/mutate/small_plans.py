"""Plans that operators have places in which the larger ones of ``fixtures`` have, too: here they are captured sooner."""

from __future__ import annotations

from suites.mutate import updated_first
from suites.plans.llama import llama

SIZES = "layers = 1, dim = 16"
HANDED_ON = f"""{llama(SIZES)}
[optimizer]
factory = "torch.optim:AdamW"
args = {{ lr = 0.01, fused = true }}
groups = "entry"

[overlap]
updates = "ready"

[[transform]]
name = "next_iteration"
args = {{ entries = ["layers.0", "norm+output"] }}
"""
"""An iteration hands gradients to the next one."""
IN_STAGES = f"""{llama(SIZES, 1, mode="replicate", pp=2, dp_replicate=2)}
[pipeline]
stages = 2

[step]
microbatches = 2
clip_norm = 0.5

[optimizer]
factory = "torch.optim:AdamW"
args = {{ lr = 0.01 }}
"""
"""Values go from stage to stage, and ranks of all stages clip together."""
COUNTING = """
[model]
factory = "fixtures.models.gpt:build"
args = { layers = 1, counts = true }
batch = "fixtures.models.gpt:batch"
loss = "fixtures.models.gpt:loss"

[parallel]
dp_shard = 2

[bucket]
plan = ["tokens+positions+norm+output", "layers.0"]
"""
"""Forward writes a buffer."""
TEXTS = {"counting": COUNTING, "handed_on": HANDED_ON, "in_stages": IN_STAGES, "updated_first": updated_first.PLAN}
