"""Speaks the routes of OpenAI's completions and chats."""
