"""Tells unlike workers of one pool apart: by memory, and by how often they are lost."""
