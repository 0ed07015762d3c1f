"""The gateway serves runs' policies over HTTP, to any client that knows a URL."""
