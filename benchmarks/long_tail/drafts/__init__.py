"""Drafts: their lengths beside a published rule, and how many tokens of a step they make."""
