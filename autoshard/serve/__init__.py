"""Generation with models of transformers: their own loop over caches that a plan has split."""
