"""Defines the commands of what stands beside the product: demos, simulations and profiles."""
