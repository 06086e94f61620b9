"""The address at which other machines reach this machine."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from fastdist.errors import ClusterConfigError

_SIOCGIFADDR = 0x8915


def own_address(host: str, port: int) -> str:
    """Returns this machine's IP address on the route to another machine.

    Args:
        host: host of the other machine; a loopback address gives this machine's loopback address.
        port: port of the other machine; nothing is sent to it.

    Returns:
        An IP address; with GLOO_SOCKET_IFNAME set, the address of that interface.

    Raises:
        ClusterConfigError: there is no route to the host, or no such interface.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        if interface:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                request = struct.pack("256s", interface.encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        place = f"GLOO_SOCKET_IFNAME={interface!r}" if interface else f"no route to {host}:{port}"
        raise ClusterConfigError(f"rendezvous: {place}: {error.strerror or error}") from None
