"""Who may sign in: accounts from the command line or a file, passwords as scrypt hashes.

`python -m app.passwords NAME` asks for a password and prints the line for --auth-file.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

LEAST_CHARACTERS = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_N, _R, _P = 1 << 14, 8, 1  # 16 MiB and about 50 ms: one guess is slow, one sign-in is not
_HASHED = re.compile(r"scrypt:([0-9a-f]{32}):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A user name with the salt and the hash of its password (hexadecimal)."""

    name: str
    salt: str = field(repr=False)
    hash: str = field(repr=False)

    def accepts(self, password: str) -> bool:
        """Whether this is the password; takes the same time either way."""
        return hmac.compare_digest(_scrypt(password, self.salt), self.hash)

    @property
    def line(self) -> str:
        """The account as a line of an --auth-file."""
        return f"{self.name}:scrypt:{self.salt}:{self.hash}"


def account(text: str, *, source: str, salt: str = "") -> Account:
    """The account of USER:PASSWORD; ValueError, which never repeats the password.

    Without a salt the name is taken: such a hash stays in memory, and the same at every start.
    """
    name, colon, password = text.partition(":")
    if not colon or not _NAME.fullmatch(name):
        raise ValueError(
            f"{source} must be USER:PASSWORD with a name of at most 32 letters, digits, '.', '_' "
            f"or '-'; got the name {name[:40]!r}"
        )
    if len(password) < LEAST_CHARACTERS:
        raise ValueError(
            f"the password of {name} in {source} has {len(password)} characters; give it at least "
            f"{LEAST_CHARACTERS}"
        )
    salt = salt or hashlib.sha256(f"h3 console {name}".encode()).hexdigest()[:32]
    return Account(name=name, salt=salt, hash=_scrypt(password, salt))


def read_accounts(path: Path) -> tuple[Account, ...]:
    """The accounts of a file: a line each, NAME:scrypt:SALT:HASH or NAME:PASSWORD, # comments.

    Plain passwords are refused (ValueError) in a file that others than its owner can read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; write lines of NAME:PASSWORD") from error
    private = not path.stat().st_mode & 0o077
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            found.append(_account_line(line.strip(), f"line {number} of {path}", private=private))
    if not found:
        raise ValueError(f"{path} names no user; write lines of NAME:PASSWORD")
    return tuple(found)


def merge(accounts: Sequence[Account]) -> tuple[Account, ...]:
    """The accounts in order; ValueError when a name stands twice."""
    names = [one.name for one in accounts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"the user {twice[0]} is given twice; leave one out")
    return tuple(accounts)


def _account_line(line: str, source: str, *, private: bool) -> Account:
    name, _, rest = line.partition(":")
    hashed = _HASHED.fullmatch(rest)
    if hashed and _NAME.fullmatch(name):
        return Account(name=name, salt=hashed[1], hash=hashed[2])
    if rest.startswith("scrypt:"):
        raise ValueError(f"{source} is damaged; make it anew with python -m app.passwords NAME")
    if not private:
        raise ValueError(
            f"{source} holds a plain password and others can read the file; chmod 600 it, or put "
            f"in the line that python -m app.passwords NAME prints"
        )
    return account(line, source=source)


def _scrypt(password: str, salt: str) -> str:
    data = password.encode("utf-8", "surrogatepass")
    return hashlib.scrypt(data, salt=bytes.fromhex(salt), n=_N, r=_R, p=_P, dklen=32).hex()


def main(arguments: Sequence[str]) -> int:
    """Prints the line of one account; its password is asked for, or read from a pipe."""
    if len(arguments) != 1:
        print("usage: python -m app.passwords NAME", file=sys.stderr)
        return 2
    ask = getpass.getpass if sys.stdin.isatty() else lambda _prompt: sys.stdin.readline().strip()
    try:
        text, salt = f"{arguments[0]}:{ask('password: ')}", secrets.token_hex(16)
        print(account(text, source="the account", salt=salt).line)
    except ValueError as error:
        print(f"python -m app.passwords: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
