"""The serving-guard keeps one serving engine's SLO, and lends the rest of its GPU to the worker beside it."""
