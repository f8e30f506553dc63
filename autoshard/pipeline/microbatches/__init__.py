"""The batch of a step in micro-batches: inputs cut, the proof that they compute what the batch does, results put together."""
