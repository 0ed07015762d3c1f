"""Decisions put into practice: placement, moves, shares and borrowed hosts."""
