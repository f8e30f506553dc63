"""Functions of torch and of libraries that a trace takes in a form of its own, a mode or patch each."""
