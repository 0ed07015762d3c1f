"""Decides which calls are allowed: roles, tokens, certificates, and admission before every call."""
