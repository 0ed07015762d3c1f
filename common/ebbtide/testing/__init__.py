"""What tests of Ebbtide, and of programs that use it, are made of."""

from ebbtide.testing.redis import EmbeddedRedis, EmbeddedSentinel
from ebbtide.testing.wait import wait_until

__all__ = ["EmbeddedRedis", "EmbeddedSentinel", "wait_until"]
