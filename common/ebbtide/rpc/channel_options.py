"""Lists the gRPC options of clients and servers. gRPC silently ignores unknown ones, so tests check their effect."""

from typing import Final

Options = list[tuple[str, int]]

#: Size of one message, both ways. Larger data (weights, big batches) travels in several messages.
MAX_MESSAGE_BYTES: Final = 4 << 20
#: A client pings this often, also while idle, and gives up after the timeout: it notices a frozen or unplugged peer
#: within 15 s.
KEEPALIVE_S: Final = 10.0
KEEPALIVE_TIMEOUT_S: Final = 5.0
#: Calls that a server has not begun yet, of all connections.
MAX_PENDING: Final = 1 << 16


def client_options(keepalive_s: float = KEEPALIVE_S) -> Options:
    return [
        *_common(keepalive_s),
        # Reconnect soon after a service's restart, even after a long absence.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_retries", 0),  # callers retry: only they know which calls are safe to repeat
        ("grpc.use_local_subchannel_pool", 1),  # channels do not share connections
    ]


def server_options(keepalive_s: float = KEEPALIVE_S, *, max_streams: int = 1024, window_bytes: int = 0) -> Options:
    """`window_bytes`: bytes that a client may have under way per stream; 0: gRPC finds the number by pings, which costs
    a server of many small messages a tenth of its time.
    """
    fixed = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window_bytes)] if window_bytes else []
    return [
        *_common(keepalive_s),
        *fixed,
        # Without this, a server answers clients' pings with too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", round(keepalive_s * 500)),
        ("grpc.max_concurrent_streams", max_streams),
        # Of calls that arrive faster than the server begins them, gRPC cancels some beyond 1,000.
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
        ("grpc.so_reuseport", 0),  # else two servers could silently share one port
    ]


def _common(keepalive_s: float) -> Options:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
