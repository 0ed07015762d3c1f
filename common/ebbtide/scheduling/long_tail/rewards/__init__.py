"""Decides how long the scoring of a response may take, and which calls of an environment are scorings."""
