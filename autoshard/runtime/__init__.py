"""Runs a lowered plan behind an `nn.Module`."""
