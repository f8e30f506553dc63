"""The search for the shape of a pipeline: stages, submeshes, micro-batches, schedule and cuts."""
