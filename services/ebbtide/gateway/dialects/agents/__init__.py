"""Speaks the routes of agents' clients: OpenAI's responses and Anthropic's messages."""
