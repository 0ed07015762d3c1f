"""The attached workers: what they report, how healthy they are, and what they are asked."""
