"""Simulates scenarios with several seeds side by side, each in a process of its own."""
