"""Keys and certificates of a development cluster."""
