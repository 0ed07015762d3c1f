"""Runs the elastic demo: a trainer that generates between its steps, and spot workers that come and go."""
