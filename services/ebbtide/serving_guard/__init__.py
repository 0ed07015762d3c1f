"""Lends a device to the worker beside it: a serving engine's within its SLO, or a trainer's between its steps."""
