"""Channel options of both sides. gRPC ignores what it does not know in silence, so tests check their effect."""

from typing import Final

Options = list[tuple[str, int]]

#: Of one message, both ways. Larger things (weights, big batches) travel in several messages.
MAX_MESSAGE_BYTES: Final = 4 << 20
#: A client asks for a sign of life this often, also while idle, and gives up after the timeout: a frozen or unplugged
#: peer is noticed in 15 s.
KEEPALIVE_S: Final = 10.0
KEEPALIVE_TIMEOUT_S: Final = 5.0


def client_options(keepalive_s: float = KEEPALIVE_S) -> Options:
    return [
        *_common(keepalive_s),
        # Reconnect soon after a service's restart, however long it was away.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_retries", 0),  # retries are ours: gRPC's own would hide which calls may be repeated
        ("grpc.use_local_subchannel_pool", 1),  # a channel's fate is its own
    ]


def server_options(keepalive_s: float = KEEPALIVE_S, *, max_streams: int = 1024, window_bytes: int = 0) -> Options:
    """`window_bytes`: what a client may have on its way at once, per stream; 0: gRPC finds it out by a ping with what
    comes, which costs a server of many small messages a tenth of its time.
    """
    fixed = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window_bytes)] if window_bytes else []
    return [
        *_common(keepalive_s),
        *fixed,
        # Without this half of the pair, clients' pings end in too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", round(keepalive_s * 500)),
        ("grpc.max_concurrent_streams", max_streams),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its connections in silence
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
