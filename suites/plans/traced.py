"""The text of a plan for a step that was traced."""

TRACED = """
[graph]
factory = "fixtures.models.traced:step"

[parallel]
dp_shard = 4

[bucket]
plan = ["layers.[0-2]"]
"""
