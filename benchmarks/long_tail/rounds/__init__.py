"""Rules of rounds: what they do to the data, and what they save."""
