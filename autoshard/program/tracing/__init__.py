"""One trace of a model, and what hinders it."""
