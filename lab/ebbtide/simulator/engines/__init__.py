"""Models engines and trainers by the time of their steps, with profiles that say how fast they are."""
