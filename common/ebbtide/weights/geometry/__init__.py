"""Locates the elements, pieces and tiles of tensors."""
