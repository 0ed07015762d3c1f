"""Pairs of a served and a borrowed engine in virtual time: other policies, figures, and costs fitted to real pairs."""
