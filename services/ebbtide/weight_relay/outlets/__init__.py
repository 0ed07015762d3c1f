"""Sends versions out: reads, the readers' sources, and the links that carry them."""
