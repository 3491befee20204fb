"""torch's own eager step of a plan's model, beside the bucketed graph: FSDP2, DistributedDataParallel, tensor parallelism."""
