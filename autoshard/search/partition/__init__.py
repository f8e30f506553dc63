"""Cuts a row of blocks into pipeline stages: a bound that no cut can beat, and a search in the order of that bound.

    partition(chain, course, price) -> Partition
"""
from __future__ import annotations

from autoshard.search.partition.best import Partition, partition
from autoshard.search.partition.bound import bounds
from autoshard.search.partition.chain import Chain, Course, chain_of_blocks, rank_bytes
from autoshard.search.partition.feasible import Together

__all__ = ["Chain", "Course", "Partition", "Together", "bounds", "chain_of_blocks", "partition", "rank_bytes"]
