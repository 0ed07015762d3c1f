"""Brings versions into the processes of a vLLM engine: in place, layer by layer, or from files."""
