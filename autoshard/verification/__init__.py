"""Does a plan compute what the model computes? All ranks of its lowered program in one process, with real numbers."""
