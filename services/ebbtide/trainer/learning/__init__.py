"""Learns from samples: networks, batches, GRPO, the optimiser's step."""
