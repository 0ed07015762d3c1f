"""Compares ways to run several jobs on the same devices, in simulations of published traces and mixes."""
