"""The step as it runs on all ranks: who waits for whom, which link is full, what is exposed."""
