"""What a coordinator remembers, and who is told when it changes."""
