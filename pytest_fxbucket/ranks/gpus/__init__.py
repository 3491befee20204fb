"""What only ranks on GPUs need: leases, NCCL and its settings, and copies to the CPU and back."""
