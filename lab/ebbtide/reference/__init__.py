"""Writes the pages under docs/reference/ from the definitions in the code (`make docs`)."""
