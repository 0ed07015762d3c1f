"""Geometry: which elements, pieces and tiles of a tensor lie where."""
