"""Takes versions in: publishers stage them, or the relay builds them from patches."""
