"""Fused projections of unequal parts (q|k|v of grouped heads) as one product for each part."""
