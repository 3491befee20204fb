"""Plans that operators have places in which the larger ones of ``fixtures`` have, too: here they are captured sooner."""

from __future__ import annotations

from suites.mutate import updated_first

HANDED_ON = """
[model]
factory = "fixtures.models.llama:build"
args = { layers = 1, dim = 16 }
batch = "fixtures.models.llama:batch"
loss = "fixtures.models.llama:loss"

[parallel]
dp_shard = 2

[optimizer]
factory = "torch.optim:AdamW"
args = { lr = 0.01, fused = true }
groups = "entry"

[bucket]
plan = ["tok_embeddings", "layers.0", "norm+output"]

[overlap]
updates = "ready"

[[transform]]
name = "next_iteration"
args = { entries = ["layers.0", "norm+output"] }
"""
"""An iteration hands gradients to the next one."""
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
IN_STAGES = """
[model]
factory = "fixtures.models.llama:build"
args = { layers = 1, dim = 16 }
batch = "fixtures.models.llama:batch"
loss = "fixtures.models.llama:loss"

[parallel]
mode = "replicate"
pp = 2
dp_replicate = 2

[pipeline]
stages = 2

[step]
microbatches = 2
clip_norm = 0.5

[optimizer]
factory = "torch.optim:AdamW"
args = { lr = 0.01 }

[bucket]
plan = ["tok_embeddings", "layers.0", "norm+output"]
"""
"""Values go from stage to stage, and ranks of all stages clip together."""
TEXTS = {"in_stages": IN_STAGES, "handed_on": HANDED_ON, "counting": COUNTING, "updated_first": updated_first.PLAN}
