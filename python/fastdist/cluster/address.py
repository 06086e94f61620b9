"""Addresses of tasks, written "host:port" or "[IPv6]:port"; this machine's, and free ports."""

import errno
import fcntl
import ipaddress
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fastdist._config import settings
from fastdist.errors import ClusterConfigError

_LAST_PORT = 65535
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_LONGEST_HOST_NAME = 253
_IP = re.compile(r"[0-9.]+|(?=.*:)[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")
_SIOCGIFADDR = 0x8915
_RETRY_S = 0.1


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an address; the host of "[::1]:80" is "::1".

    Raises:
        ValueError: the address is not "host:port", with an IPv6 host in brackets and a port up to
            65535.

    Examples:
        >>> import fastdist as fd
        >>> fd.cluster.split_address("[::1]:80")
        ('::1', 80)
    """
    host, separator, port = address.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if in_brackets else host
    if not separator or in_brackets != (":" in bare) or not _is_host(bare):
        raise ValueError(f"malformed address {address!r}; expected 'host:port' or '[IPv6]:port'")
    if _PORT.fullmatch(port) is None or int(port) > _LAST_PORT:
        raise ValueError(f"malformed address {address!r}; expected a port from 1 to {_LAST_PORT}")
    return bare, int(port)


def join_address(host: str, port: int | str) -> str:
    """Return the address of a port on a host: a name, or an IP address without brackets.

    Raises:
        ValueError: the host or the port is malformed.

    Examples:
        >>> import fastdist as fd
        >>> fd.cluster.join_address("::1", 80)
        '[::1]:80'
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    split_address(address)
    return address


def canonical_address(address: str) -> tuple[str, int]:
    """Return host and port in a canonical form, equal for all spellings of an address."""
    host, port = split_address(address)
    if ":" in host:
        return str(ipaddress.IPv6Address(host)), port
    return host.lower().removesuffix("."), port


def _is_host(host: str) -> bool:
    if _IP.fullmatch(host) is None:
        return len(host) <= _LONGEST_HOST_NAME and _HOST_NAME.fullmatch(host) is not None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def own_address(host: str, port: int, deadline: float = 0.0) -> str:
    """Return this machine's IP address on the route to another machine, to which nothing is sent.

    With GLOO_SOCKET_IFNAME set, return the address of that interface. While the network is
    unreachable, try again until the deadline, by `time.monotonic`.
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


def reserve_port(host: str = "127.0.0.1") -> tuple[socket.socket, int]:
    """Reserve a free TCP port; return the socket that reserves it until closed, and the port.

    The socket is bound but does not listen. A server that sets SO_REUSEADDR, as nearly every server
    does, can listen at the port, end, and listen again.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
    except OSError:
        holder.close()
        raise
    return holder, int(holder.getsockname()[1])


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Reserve free ports of 127.0.0.1 with `reserve_port` until the context is closed."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            holder, port = reserve_port()
            stack.enter_context(holder)
            ports.append(port)
        yield ports
