"""Describes a policy version's tensors and tiles, and cuts manifests and patches into parts for the wire."""
