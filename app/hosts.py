"""Where the console may be reached, and which names of it a browser may use."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from starlette.requests import HTTPConnection

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Hosts:
    """The names that a Host header may have: others may be a foreign page's (DNS rebinding)."""

    def __init__(self, bind: str, also: Sequence[str] = ()) -> None:
        """bind: the address that is listened on; also: names under which a proxy reaches it."""
        self._names = {name.lower() for name in (*LOOPBACK, bind, *also)}
        self._any_address = is_wildcard(bind)  # an address in numbers cannot be rebound
        if self._any_address:
            own = socket.gethostname().lower()
            self._names |= {own, f"{own}.local", socket.getfqdn().lower()}
        self._shared: set[str] = set()

    def share(self, name: str) -> None:
        """Allows the name of a share link."""
        self._shared.add(name.lower())

    def is_shared(self, header: str) -> bool:
        """The request came through the share link (whose visitors all have one address)."""
        return host_name(header) in self._shared

    def address(self, request: HTTPConnection) -> str:
        """From where a request came; "share" for all that come through the link."""
        if self.is_shared(request.headers.get("host", "")):
            return "share"
        return request.client.host if request.client else "?"

    def allows(self, header: str) -> bool:
        """Whether a Host header names this console."""
        name = host_name(header)
        if name in self._names or name in self._shared:
            return True
        return self._any_address and _is_address(name)


def host_name(header: str) -> str:
    """The name in `name`, `name:port` or `[::1]:port`, in small letters; "" for none."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def is_loopback(bind: str) -> bool:
    """Only this machine can connect."""
    return bind in LOOPBACK


def check_bind(bind: str, *, share: bool, locked: bool) -> None:
    """ValueError if others could come in and need not sign in."""
    if locked or (is_loopback(bind) and not share):
        return
    opened = "--share" if share else f"--host {bind}"
    raise ValueError(
        f"{opened} opens the console to others and nobody would have to sign in; add --token, or "
        f"--auth USER:PASSWORD, or --auth-file FILE"
    )


def listen(bind: str, port: int) -> socket.socket:
    """A listening socket (port 0: any free one); ValueError if the port is taken."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        return socket.create_server((bind, port), family=family)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
        raise ValueError(
            f"port {port} on {bind} cannot be used ({reason}); choose another with --port"
        ) from error


def is_wildcard(bind: str) -> bool:
    """Every address of this machine is listened on."""
    return bind in ("0.0.0.0", "::", "")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
