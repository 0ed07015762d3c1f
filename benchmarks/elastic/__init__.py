"""Compares windows of trainers that generate between their steps, in simulations of published settings."""
