"""Ranks that are processes of torchrun's, on one machine or many: where they meet, and the pool of which each holds one."""
