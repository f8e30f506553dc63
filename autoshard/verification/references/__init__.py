"""What the unsharded model computes."""
