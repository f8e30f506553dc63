"""What the user fixes before the search: seeds, names of tensors, placements of user collectives."""
