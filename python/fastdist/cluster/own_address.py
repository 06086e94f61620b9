"""Where other machines reach this one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from fastdist.errors import ClusterConfigError

_SIOCGIFADDR = 0x8915


def own_address(host: str, port: int) -> str:
    """The IP address of this machine on the way to another one.

    Args:
        host: of the other; its loopback address if that is this machine's, too.
        port: there; nothing is sent to it.

    Returns:
        That of the interface that the user named for Gloo, GLOO_SOCKET_IFNAME, where it is set.

    Raises:
        ClusterConfigError: there is no way, or no such interface.
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
