"""The former path of `TorchExchange`."""

from ebbtide.client.publisher.torch_exchange import TorchExchange
from ebbtide.former_paths import warn_moved

__all__ = ["TorchExchange"]

warn_moved(__name__, "ebbtide.client.publisher.torch_exchange")
