"""Prices in seconds and bytes: clusters, compute, redistribution, memory, fusion."""
