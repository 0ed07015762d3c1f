"""Plays requests for text: their prompts become rollouts, and the tokens of these become text again."""
