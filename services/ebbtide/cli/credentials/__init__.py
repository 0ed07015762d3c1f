"""Makes keys and certificates of a development cluster."""
