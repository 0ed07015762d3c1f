"""HTTP: the server, the application, and its routes."""
