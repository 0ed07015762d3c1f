"""What making, checking and applying patches costs, beside memcpy of the same bytes."""
