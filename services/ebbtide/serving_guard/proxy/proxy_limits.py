"""Limits sizes, times and connections of the proxy's clients."""

from typing import Annotated

from msgspec import Meta, Struct


class ProxySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the proxy. Durations are seconds, sizes bytes.

    One client's connection holds at most twice `max_header_bytes`, `keep_body_bytes`, twice `buffer_bytes`, and what
    one read brings (256 KiB). All connections together hold at most `max_held_bytes`, and 16 KiB each that are not
    counted. Answers that are kept to read the engine's token counts (16 MiB), and the kernel's socket buffers, come on
    top.
    """

    max_header_bytes: Annotated[
        int, Meta(ge=1024, description="bytes of a request's target and headers; more: answered with 431")
    ] = 64 << 10
    max_headers: Annotated[int, Meta(ge=8, description="headers of a request; more: answered with 431")] = 128
    max_body_bytes: Annotated[int, Meta(ge=1024, description="bytes of a request's body; more: answered with 413")] = (
        256 << 20
    )
    keep_body_bytes: Annotated[
        int, Meta(ge=0, description="bytes of an inference request kept to estimate its prompt; longer: streamed on")
    ] = 1 << 20
    buffer_bytes: Annotated[
        int,
        Meta(ge=4096, description="bytes waiting for one slow reader before the engine's answer is read no further"),
    ] = 256 << 10
    max_held_bytes: Annotated[
        int, Meta(ge=1 << 20, description="bytes held for all clients; beyond, those who hold most are cut")
    ] = 512 << 20
    header_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds from a request's first byte to its headers' end; then 408")
    ] = 10.0
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds in which a body that is not complete brings nothing; then 408")
    ] = 30.0
    min_body_rate: Annotated[
        int,
        Meta(
            ge=0, description="bytes per second that a body brings on average, after body_timeout_s; 0: any; else 408"
        ),
    ] = 256
    idle_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds for which a connection without a request is kept")
    ] = 75.0
    stall_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds for which a client may leave its answer unread; then it is dropped")
    ] = 60.0
    max_connections: Annotated[
        int, Meta(ge=1, description="clients' connections; at the bound the longest idle one makes room")
    ] = 4096
    max_per_client: Annotated[
        int, Meta(ge=0, description="connections of one client address; 0: no bound, as behind a balancer")
    ] = 2048
    connect_timeout_s: Annotated[float, Meta(gt=0, description="seconds to connect to the engine")] = 5.0
    keep_upstream_s: Annotated[
        float,
        Meta(ge=0, description="seconds for which an idle connection to the engine is kept; less than the engine does"),
    ] = 3.0
    max_hold_s: Annotated[
        float, Meta(ge=0, description="seconds for which a request may wait for a rollout step to end; 0: never")
    ] = 0.5
    drain_s: Annotated[
        float, Meta(ge=0, description="seconds that requests under way have left when the guard is asked to end")
    ] = 30.0
