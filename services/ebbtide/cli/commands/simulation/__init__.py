"""Runs the commands that simulate, record and measure for simulations."""
