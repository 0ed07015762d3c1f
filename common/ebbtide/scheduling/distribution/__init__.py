"""Decides how versions travel: the cheapest patches, the nearest sources, fair links, and what a relay keeps."""
