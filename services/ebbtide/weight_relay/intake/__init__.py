"""How versions come in: staged by publishers, or built here from patches."""
