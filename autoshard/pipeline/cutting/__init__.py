"""The joint graph of forward and backward, cut into stages."""
