"""Who may come in: accounts, token, cookies, limits, and the files that keep them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from starlette.requests import Request

from app.access import LOGIN_TRIES, LOGIN_TRIES_OF_ALL, SESSION_SECONDS, Access, User
from app.errors import Forbidden, TooMany
from app.hosts import Hosts, check_bind
from app.limits import Window
from app.log import Log
from app.passwords import Account, account, merge, read_accounts
from app.private import kept_token

ANNA, BEN = "anna:correct horse", "ben:battery staple"
TOKEN = "0123456789abcdef"


@cache
def known(text: str) -> Account:
    """The account; hashing is slow on purpose."""
    return account(text, source="--auth")


def locked(root: Path, *users: str, token: str = "", now: float = 1e9) -> Access:
    accounts = [known(text) for text in users or (ANNA, BEN)]
    return Access(root, accounts if users or not token else [], token, clock=lambda: now)


def asked(access: Access, cookie: str = "", **headers: str) -> Request:
    """A request with a session cookie."""
    given = {"cookie": f"{access.cookie}={cookie}", **headers}
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    return Request({"type": "http", "headers": raw})


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_without_accounts_everybody_is_the_owner(tmp_path: Path) -> None:
    access = Access(tmp_path)
    assert access.open and access.user(asked(access)) == User(name="local", admin=True)


def test_the_first_user_is_the_admin(tmp_path: Path) -> None:
    access = locked(tmp_path)
    anna = access.sign_in("anna", "correct horse", "a")
    ben = access.sign_in("ben", "battery staple", "a")
    assert access.user(asked(access, anna)) == User(name="anna", admin=True)
    assert access.user(asked(access, ben)) == User(name="ben", admin=False)


@pytest.mark.parametrize(("name", "password"), [("anna", "battery staple"), ("eve", "x"), ("", "")])
def test_a_wrong_password_or_name_gets_the_same_answer(
    tmp_path: Path, name: str, password: str
) -> None:
    with pytest.raises(Forbidden, match="wrong user or password"):
        locked(tmp_path).sign_in(name, password, "a")


def test_a_changed_cookie_opens_nothing(tmp_path: Path) -> None:
    access = locked(tmp_path)
    cookie = access.sign_in("ben", "battery staple", "a")
    forged = [cookie.replace("ben", "anna"), cookie[:-1] + ("0" if cookie[-1] != "0" else "1")]
    later = cookie.split("~")
    later[1] = str(int(later[1]) + 1)
    for bad in (*forged, "~".join(later), "", "x", cookie + "0"):
        assert access.user(asked(access, bad)) is None


def test_a_session_survives_a_restart_and_ends_in_time(tmp_path: Path) -> None:
    cookie = locked(tmp_path).sign_in("anna", "correct horse", "a")
    again = locked(tmp_path, now=1e9 + SESSION_SECONDS - 1)
    assert again.user(asked(again, cookie)) is not None
    late = locked(tmp_path, now=1e9 + SESSION_SECONDS + 1)
    assert late.user(asked(late, cookie)) is None


def test_a_new_password_a_removed_user_and_another_folder_end_sessions(tmp_path: Path) -> None:
    cookie = locked(tmp_path).sign_in("anna", "correct horse", "a")
    changed = locked(tmp_path, "anna:another horse", BEN)
    gone = locked(tmp_path, BEN)
    other = locked(tmp_path / "other")
    assert not any(one.user(asked(one, cookie)) for one in (changed, gone, other))


def test_a_signed_out_session_stays_out_after_a_restart(tmp_path: Path) -> None:
    access = locked(tmp_path)
    first, second = (access.sign_in("anna", "correct horse", "a") for _ in range(2))
    access.sign_out(asked(access, first), "a")
    for one in (access, locked(tmp_path)):
        assert one.user(asked(one, first)) is None
        assert one.user(asked(one, second)) is not None
    assert mode(tmp_path / "console.signed-out") == 0o600


def test_the_token_opens_by_link_and_as_a_bearer(tmp_path: Path) -> None:
    access = locked(tmp_path, token=TOKEN)
    cookie = access.sign_in_by_token(TOKEN, "a")
    assert access.user(asked(access, cookie)) == User(name="local", admin=True)
    assert access.user(asked(access, authorization=f"Bearer {TOKEN}")) is not None
    assert access.user(asked(access, authorization=f"Bearer {TOKEN}x")) is None
    assert access.user(asked(access, authorization="Bearer ")) is None


def test_beside_users_the_token_s_holder_is_a_guest(tmp_path: Path) -> None:
    access = locked(tmp_path, ANNA, token=TOKEN)
    cookie = access.sign_in_by_token(TOKEN, "a")
    assert access.user(asked(access, cookie)) == User(name="guest", admin=False)
    with pytest.raises(ValueError, match="choose another user name"):
        locked(tmp_path, "guest:correct horse", token=TOKEN)


def test_without_a_token_an_empty_one_opens_nothing(tmp_path: Path) -> None:
    access = locked(tmp_path)
    with pytest.raises(Forbidden):
        access.sign_in_by_token("", "a")


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 5 characters; give at least 16"):
        Access(tmp_path, token="12345")


def test_wrong_passwords_are_limited_by_address(tmp_path: Path) -> None:
    access = locked(tmp_path)
    for _ in range(LOGIN_TRIES):
        with pytest.raises(Forbidden):
            access.sign_in("anna", "guess", "1.2.3.4")
    with pytest.raises(TooMany, match=r"wait [0-9]+ s"):
        access.sign_in("anna", "correct horse", "1.2.3.4")
    assert access.sign_in("anna", "correct horse", "5.6.7.8")


def test_wrong_passwords_are_limited_over_all_addresses(tmp_path: Path) -> None:
    access = locked(tmp_path)
    for n in range(LOGIN_TRIES_OF_ALL):
        with pytest.raises(Forbidden):
            access.sign_in_by_token("guess", f"address {n}")
    with pytest.raises(TooMany):
        access.sign_in("anna", "correct horse", "one more")


def test_right_passwords_do_not_count(tmp_path: Path) -> None:
    access = locked(tmp_path)
    for _ in range(LOGIN_TRIES + 1):
        access.sign_in("ben", "battery staple", "a")


def test_what_happened_stands_in_a_private_log_without_secrets(tmp_path: Path) -> None:
    access = locked(tmp_path)
    access.sign_in("anna", "correct horse", "1.2.3.4")
    with pytest.raises(Forbidden):
        access.sign_in("e\nve", "hunter2-secret", "1.2.3.4")
    lines = (tmp_path / "audit.log").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["event"] for e in events] == ["signed in", "wrong password"]
    assert events[1]["address"] == "1.2.3.4" and events[1]["user"] == "e\nve"
    assert not any(word in "".join(lines) for word in ("horse", "hunter2"))
    assert mode(tmp_path / "audit.log") == mode(tmp_path / "console.key") == 0o600


def test_a_random_token_is_made_once_and_kept_privately(tmp_path: Path) -> None:
    token, fresh = kept_token(tmp_path / "runs")
    assert fresh and len(token) >= 32 and mode(tmp_path / "runs" / "console.token") == 0o600
    assert kept_token(tmp_path / "runs") == (token, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("anna", "must be USER:PASSWORD"),
        (":secret password", "must be USER:PASSWORD"),
        ("an na:secret password", "got the name 'an na'"),
        ("a/b:secret password", "must be USER:PASSWORD"),
        ("anna:short", "has 5 characters; give it at least 8"),
    ],
)
def test_a_user_that_is_none_is_refused_without_repeating_the_password(
    text: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        account(text, source="--auth")
    assert "secret" not in str(refused.value) and "short" not in str(refused.value)


def test_a_user_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="anna is given twice"):
        merge([account(ANNA, source="--auth"), account(ANNA, source="--auth")])


def test_a_file_of_users_may_hold_what_the_helper_prints(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app.passwords", "anna"]
    root = Path(__file__).parents[2]
    made = subprocess.run(
        command, input="correct horse\n", cwd=root, capture_output=True, text=True, check=True
    )
    file = tmp_path / "users"
    file.write_text(f"# people\n\n{made.stdout}")
    file.chmod(0o644)
    (anna,) = read_accounts(file)
    assert anna.name == "anna" and anna.accepts("correct horse") and not anna.accepts("horse")
    assert "horse" not in made.stdout


def test_the_helper_refuses_in_one_sentence() -> None:
    command = [sys.executable, "-m", "app.passwords", "an/na"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, input="correct horse\n", cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "must be USER:PASSWORD" in done.stderr
    assert "Traceback" not in done.stderr


def test_plain_passwords_are_taken_from_a_private_file_only(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.write_text(f"{ANNA}\n{BEN}\n")
    file.chmod(0o600)
    assert [one.name for one in read_accounts(file)] == ["anna", "ben"]
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"line 1 of .* others can read the file; chmod 600 it"):
        read_accounts(file)


@pytest.mark.parametrize("text", ["", "# nobody\n", "anna:scrypt:00:11\n"])
def test_a_file_without_users_or_with_a_damaged_line_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "users"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ValueError, match=r"names no user|line 1 of .* is damaged"):
        read_accounts(file)


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_machines_come_in_only_where_somebody_has_to_sign_in(bind: str) -> None:
    with pytest.raises(ValueError, match=f"--host {bind} opens the console to others"):
        check_bind(bind, share=False, locked=False)
    check_bind(bind, share=False, locked=True)


def test_a_link_is_not_asked_for_where_nobody_has_to_sign_in() -> None:
    with pytest.raises(ValueError, match="--share opens the console to others"):
        check_bind("127.0.0.1", share=True, locked=False)
    check_bind("127.0.0.1", share=True, locked=True)
    check_bind("127.0.0.1", share=False, locked=False)


@pytest.mark.parametrize(
    ("bind", "header", "allowed"),
    [
        ("127.0.0.1", "localhost:7860", True),
        ("127.0.0.1", "[::1]:7860", True),
        ("127.0.0.1", "LOCALHOST", True),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "192.168.1.5", False),
        ("127.0.0.1", "", False),
        ("192.168.1.5", "192.168.1.5:7860", True),
        ("0.0.0.0", "192.168.1.5:7860", True),
        ("0.0.0.0", "[fe80::1]:7860", True),
        ("0.0.0.0", "evil.example", False),
        ("127.0.0.1", "h3.example.org", True),
    ],
)
def test_only_names_of_this_console_are_answered(bind: str, header: str, allowed: bool) -> None:
    assert Hosts(bind, ["H3.example.org"]).allows(header) is allowed


def test_the_name_of_a_share_link_is_allowed_once_it_is_known() -> None:
    hosts = Hosts("127.0.0.1")
    assert not hosts.allows("abc.gradio.live")
    hosts.share("abc.gradio.live")
    assert hosts.allows("abc.gradio.live") and hosts.is_shared("abc.gradio.live")
    assert not hosts.is_shared("127.0.0.1")


def test_a_window_moves_on_and_tells_how_long_to_wait() -> None:
    now = [0.0]
    window = Window(2, 10.0, clock=lambda: now[0])
    assert window.take("a") == 0.0
    now[0] = 4.0
    assert [window.take("a"), window.take("a"), window.take("b")] == [0.0, 6.0, 0.0]
    now[0] = 10.0
    assert window.take("a") == 0.0
    window.give_back("a")
    assert [window.take("a"), window.take("a")] == [0.0, 4.0]


def test_a_full_log_begins_anew_and_keeps_the_last_one(tmp_path: Path) -> None:
    log = Log(tmp_path / "audit.log", most_bytes=300)
    for n in range(10):
        log.line(event="x" * 40, n=n)
    old = (tmp_path / "audit.log.1").read_text().splitlines()
    new = (tmp_path / "audit.log").read_text().splitlines()
    kept = [json.loads(line)["n"] for line in (*old, *new)]
    assert kept == list(range(kept[0], 10)) and len(new) < len(kept)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full")
def test_a_log_on_a_full_disk_speaks_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Log(Path("/dev/full")).line(event="signed in")
    assert "No space left on device" in (said := capsys.readouterr().err)
    assert "signed in" in said
