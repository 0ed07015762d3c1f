"""Serves the routes: reads requests within their bounds, and sends answers and errors."""
