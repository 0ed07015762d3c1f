"""Messages in, one call, messages out: the three services on the wire."""
