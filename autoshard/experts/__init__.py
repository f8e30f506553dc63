"""Mixture-of-experts layers as ops: tokens sorted by expert, two grouped matmuls with an activation between them, summed back."""
