"""Addresses of tasks, written "host:port" or "[IPv6]:port"."""

import ipaddress
import re

_LAST_PORT = 65535
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_LONGEST_HOST_NAME = 253
_IPV4 = re.compile(r"[0-9.]+")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")


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
    if ":" in host:
        return _IPV6.fullmatch(host) is not None and _is_ip(host)
    if _IPV4.fullmatch(host) is not None:
        return _is_ip(host)
    return len(host) <= _LONGEST_HOST_NAME and _HOST_NAME.fullmatch(host) is not None


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
