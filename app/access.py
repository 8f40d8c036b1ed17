"""Who asks: the open console of one person, or users and a token with a signed session cookie."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import HTTPException, Request
from starlette.requests import HTTPConnection

from app.errors import Forbidden, TooMany
from app.limits import Window
from app.log import Log
from app.passwords import Account, merge
from app.private import SignedOut, signing_key

SESSION_SECONDS = 30 * 24 * 3600
LEAST_TOKEN = 16
LOGIN_TRIES, LOGIN_TRIES_OF_ALL, LOGIN_SECONDS = 5, 30, 60.0

_COOKIE = re.compile(r"([A-Za-z0-9._-]+)~([0-9]{1,12})~([0-9a-f]{16})~([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Somebody who is signed in; an admin sees what everybody made."""

    name: str
    admin: bool = False


UserDependency = Callable[[Request], User]

LOCAL = User(name="local", admin=True)
GUEST = "guest"  # who holds the token where there are users besides
_UNKNOWN = Account(name="?", salt="00" * 16, hash="00" * 32)  # so that no name answers faster


class Access:
    """Accounts and token of one console; without either everybody is its owner, `local`."""

    def __init__(
        self,
        root: Path,
        accounts: Sequence[Account] = (),
        token: str = "",
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """root: the runs folder, where the key of the cookies and the audit log are kept."""
        if token and len(token) < LEAST_TOKEN:
            raise ValueError(
                f"the token has {len(token)} characters; give at least {LEAST_TOKEN}, or --token "
                f"alone for a random one"
            )
        if any(one.name == GUEST for one in accounts):
            raise ValueError(f"{GUEST!r} is the holder of the token; choose another user name")
        root.mkdir(parents=True, exist_ok=True)
        self._accounts = {one.name: one for one in merge(accounts)}
        self._token = token
        self._clock = clock
        self._key = signing_key(root / "console.key")
        self._signed_out = SignedOut(root / "console.signed-out", clock)
        self._tries = Window(LOGIN_TRIES, LOGIN_SECONDS)
        self._tries_of_all = Window(LOGIN_TRIES_OF_ALL, LOGIN_SECONDS)
        self._one_hash_at_a_time = threading.Lock()  # each takes 16 MiB
        self.audit = Log(root / "audit.log")
        # Browsers share cookies between the ports of a host: each console has a name of its own.
        self.cookie = f"h3_{hashlib.sha256(self._key).hexdigest()[:8]}"

    @property
    def open(self) -> bool:
        """Nobody has to sign in."""
        return not self._accounts and not self._token

    @property
    def by_token(self) -> bool:
        """A token opens the console."""
        return bool(self._token)

    @property
    def by_name(self) -> bool:
        """Users with passwords open the console."""
        return bool(self._accounts)

    def user(self, request: HTTPConnection) -> User | None:
        """Who sent the request: by the session cookie or `Authorization: Bearer TOKEN`."""
        if self.open:
            return LOCAL
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given):
            return self._as_user(self._holder)
        return self._read(request.cookies.get(self.cookie, ""))

    def need(self, request: Request) -> User:
        """The dependency of every route; 401 when nobody is signed in."""
        user = self.user(request)
        if user is None:
            raise HTTPException(401, "sign in first: open /login, or send the token as a Bearer")
        return user

    def sign_in(self, name: str, password: str, address: str) -> str:
        """The cookie of a user; Forbidden for a wrong password, TooMany after too many tries."""
        self._count_try(address)
        account = self._accounts.get(name)
        with self._one_hash_at_a_time:
            right = (account or _UNKNOWN).accepts(password)
        if account is None or not right:
            self.audit.line(event="wrong password", user=name[:32], address=address)
            raise Forbidden("wrong user or password; try again")
        return self._signed_in(name, address)

    def sign_in_by_token(self, token: str, address: str) -> str:
        """The cookie of the token's holder; errors as in sign_in."""
        self._count_try(address)
        if not self._is_token(token):
            self.audit.line(event="wrong token", address=address)
            raise Forbidden("wrong token; use the link that the console printed when it started")
        return self._signed_in(self._holder, address)

    def sign_out(self, request: HTTPConnection, address: str) -> None:
        """The cookie of the request opens nothing any more, wherever else it was copied to."""
        match = _COOKIE.fullmatch(request.cookies.get(self.cookie, ""))
        user = self.user(request)
        if match and user:
            self._signed_out.add(match[3], int(match[2]))
            self.audit.line(event="signed out", user=user.name, address=address)

    @property
    def _holder(self) -> str:
        """The user name of who holds the token."""
        return GUEST if self._accounts else LOCAL.name

    def _is_token(self, given: str) -> bool:
        right = hmac.compare_digest(given.encode(), self._token.encode())
        return bool(self._token) and right

    def _count_try(self, address: str) -> None:
        wait = self._tries.take(address)
        if not wait and (wait := self._tries_of_all.take("")):
            self._tries.give_back(address)
        if wait:
            self.audit.line(event="too many sign-ins", address=address)
            raise TooMany(f"too many attempts to sign in; wait {math.ceil(wait)} s")

    def _signed_in(self, name: str, address: str) -> str:
        self._tries.give_back(address)
        self._tries_of_all.give_back("")
        self.audit.line(event="signed in", user=name, address=address)
        expires, nonce = int(self._clock() + SESSION_SECONDS), secrets.token_hex(8)
        return f"{name}~{expires}~{nonce}~{self._sign(name, expires, nonce)}"

    def _read(self, cookie: str) -> User | None:
        match = _COOKIE.fullmatch(cookie)
        if match is None:
            return None
        name, expires, nonce = match[1], int(match[2]), match[3]
        known = name in self._accounts or (self._token and name == self._holder)
        if not known or expires < self._clock() or nonce in self._signed_out:
            return None
        if not hmac.compare_digest(match[4], self._sign(name, expires, nonce)):
            return None
        return self._as_user(name)

    def _as_user(self, name: str) -> User:
        first = next(iter(self._accounts), LOCAL.name)
        return User(name=name, admin=name == first)

    def _sign(self, name: str, expires: int, nonce: str) -> str:
        """Bound to the password or token: a changed one ends the sessions of the old one."""
        account = self._accounts.get(name)
        text = f"{name}~{expires}~{nonce}~{account.hash if account else self._token}"
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()
