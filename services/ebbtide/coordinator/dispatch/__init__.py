"""Decides in rounds, by the rules and forecasts: placement, moves, shares, versions and borrowed hosts."""
