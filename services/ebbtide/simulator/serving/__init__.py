"""Plays a serving engine and a borrowed rollout engine on one device in virtual time."""
