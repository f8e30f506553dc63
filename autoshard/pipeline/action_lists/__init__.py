"""What the ranks of a pipeline do, as data: action lists, what is added to them, their check and their player."""
