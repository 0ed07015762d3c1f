"""Ports for programs that start seconds later."""

import socket
from pathlib import Path

import pytest

from ebbtide.free_ports import free_port

EPHEMERAL = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_a_free_port_is_none_that_the_kernel_gives_to_connections() -> None:
    ports = [free_port() for _ in range(50)]
    assert all(port < EPHEMERAL for port in ports)
    assert len(set(ports)) > 40
    for port in set(ports):
        socket.create_server(("127.0.0.1", port)).close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")
