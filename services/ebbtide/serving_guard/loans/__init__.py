"""Limits what borrowers may do: budgets, memory, and making an engine stand still."""
