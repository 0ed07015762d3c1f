"""Turns simulated outcomes into figures with their spread over seeds, a file and a picture."""
