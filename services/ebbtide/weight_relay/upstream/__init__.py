"""Brings versions from another relay or from a static copy."""
