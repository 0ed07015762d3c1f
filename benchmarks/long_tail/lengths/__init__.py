"""Forecasts of lengths, on drawn and on recorded groups."""
