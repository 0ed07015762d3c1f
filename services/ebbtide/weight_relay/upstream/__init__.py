"""What a relay brings from another relay or from a static copy."""
