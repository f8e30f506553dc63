"""What the user fixes before the search: seeds, marks in a model, names of tensors, placements of user collectives."""
