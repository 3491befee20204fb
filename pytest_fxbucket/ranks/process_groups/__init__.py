"""Process groups that ranks run in: gloo with sums in a known order, NCCL under settings that give the same bits again."""

from __future__ import annotations
