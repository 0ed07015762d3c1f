"""The reverse proxy in front of the serving engine: connections, requests, answers."""
