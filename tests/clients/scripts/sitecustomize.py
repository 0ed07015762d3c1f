"""Clients reach nothing but the loopback: what else they look for by themselves is not there, and no test needs it."""

import socket

_connect, _getaddrinfo = socket.socket.connect, socket.getaddrinfo
_HERE = ("127.", "localhost", "::1")


def _local(host) -> bool:
    return host is None or str(host if not isinstance(host, bytes) else host.decode()).startswith(_HERE)


def connect(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and not _local(address[0]):
        raise ConnectionRefusedError(f"{address[0]} is not on the loopback")
    return _connect(self, address)


def getaddrinfo(host, *rest, **options):
    if not _local(host):
        raise socket.gaierror(socket.EAI_NONAME, f"{host} is not on the loopback")
    return _getaddrinfo(host, *rest, **options)


socket.socket.connect, socket.getaddrinfo = connect, getaddrinfo
