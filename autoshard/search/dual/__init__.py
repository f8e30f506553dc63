"""Lower bounds: message passing, row prices, reduced costs, and the proof in whole numbers."""
