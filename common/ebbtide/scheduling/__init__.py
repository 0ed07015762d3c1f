"""Every decision: pure, synchronous, and handed `now`. The live services and all simulations call the same code."""
