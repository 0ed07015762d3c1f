"""Carries out the decisions of `scheduling`: placement, moves, shares and borrowed hosts."""
