"""The address at which other machines reach this machine."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import time

from fastdist._config import settings
from fastdist.errors import ClusterConfigError

_SIOCGIFADDR = 0x8915
_RETRY_S = 0.1


def own_address(host: str, port: int, deadline: float = 0.0) -> str:
    """Return this machine's IP address on the route to another machine.

    Args:
        host: host of the other machine; a loopback address gives this machine's loopback address.
        port: port of the other machine; nothing is sent to it.
        deadline: try again until then, by `time.monotonic`, while the network is unreachable.

    Returns:
        An IP address; with GLOO_SOCKET_IFNAME set, the address of that interface.
    """
    interface = settings().interface
    while True:
        try:
            return _address_of(interface) if interface else _address_towards(host, port)
        except OSError as error:
            if error.errno == errno.ENETUNREACH and time.monotonic() < deadline:
                time.sleep(_RETRY_S)
                continue
            route = f"no route to {host}:{port}"
            place = f"GLOO_SOCKET_IFNAME={interface!r}" if interface else route
            raise ClusterConfigError(f"rendezvous: {place}: {error.strerror or error}") from None


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])


def _address_towards(host: str, port: int) -> str:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
