"""The ranks of a run: mesh coordinates, process groups, and checks that all ranks agree."""
