"""What tests of Ebbtide, and of programs that use it, are made of."""

from ebbtide.testing.redis import EmbeddedRedis
from ebbtide.testing.wait import wait_until

__all__ = ["EmbeddedRedis", "wait_until"]
