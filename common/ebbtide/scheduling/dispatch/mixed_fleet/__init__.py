"""Tells unlike workers of one pool apart: by speed, by memory, and by how often they are lost."""
