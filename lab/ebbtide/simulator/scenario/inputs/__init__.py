"""Reads the tables that a scenario names: spot traces, quantiles, prices and served requests."""
