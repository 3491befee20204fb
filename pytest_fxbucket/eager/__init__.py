"""torch's own eager step of a plan's model, beside the bucketed graph: FSDP2, DistributedDataParallel, tensor parallelism."""

WARM = ("pytest_fxbucket.eager.job", "torch._dynamo")
"""What ranks import for it; FSDP2 and every optimizer import dynamo when they are first used."""
