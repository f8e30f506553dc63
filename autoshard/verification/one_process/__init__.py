"""All ranks of a lowered program in one process."""
