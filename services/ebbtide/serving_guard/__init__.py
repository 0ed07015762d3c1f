"""The serving-guard: it keeps one serving engine's SLO, and grants what that leaves to the worker beside it."""
