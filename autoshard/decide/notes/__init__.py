"""What a plan says about itself: its kind, its tensors, its seeds and its micro-batches."""
