"""Manifests: which tensors and tiles a policy version has, and how manifests and patches travel in parts."""
