"""Scores responses beside the steps that give the next turns: in processes, by a queue and by limits of its own."""
