"""Helps tests of Ebbtide, and of programs that use it, with real Redis servers and waiting."""

from ebbtide.testing.redis import EmbeddedRedis, EmbeddedSentinel
from ebbtide.testing.wait import wait_until

__all__ = ["EmbeddedRedis", "EmbeddedSentinel", "wait_until"]
