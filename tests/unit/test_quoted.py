"""A refusal names what it refuses, and no megabyte of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import presets
from app.families import named
from launch import main
from runtime.caches import step_cache
from runtime.kernels.attention import attention_backend
from runtime.kernels.elementwise import elementwise_backend
from runtime.kernels.linear import linear_backend
from runtime.messages import LTXRequest, Plan, Ref2VARequest, Reference
from runtime.parity.plans import read_plan
from runtime.quoted import brief, cut, quoted
from tests.consoles import client, demo_plan, fake_console

LONG = "x y" * 400_000
TOLD = "... (1,200,000 characters)"
DIGITS = 10**4000
MOST = 700  # of a sentence, with the allowed values that it lists


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as refused:
        make()
    told = str(refused.value)
    assert len(told) < MOST and "\n" not in told
    return told


def test_what_is_short_stands_whole() -> None:
    for value in ("x" * 80, "it's", 3, None, ["ltx"], 1.5):
        assert quoted(value) == repr(value)
    assert cut("x" * 80) == "x" * 80


def test_of_what_is_long_the_beginning_and_the_length_are_told() -> None:
    assert quoted("x" * 81) == f"'{'x' * 80}'... (81 characters)"
    assert quoted([1] * 1000) == f"[{'1, ' * 26}1... (3,000 characters)"
    assert cut("x" * 1000) == f"{'x' * 80}... (1,000 characters)"


def test_a_number_that_python_does_not_show_is_one_of_many_digits(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"  # only as hexadecimal does TOML take such a one
    file.write_text(f'prompt = "x"\nwidth = 0x{"f" * 6000}\nheight = 64\n')
    assert "width" in (told := refusal(partial(presets.load_request, file, id="x")))
    assert "got (a number of thousands of digits)x64" in told


def test_only_long_arguments_are_cut_out_of_a_sentence() -> None:
    path, long = "/a" * 60, "z" * 300
    told = brief(f"{path} and {long}", ["--file", path, f"--only=a,{long}"])
    assert told == f"{path} and {cut(long)}"
    told = brief(f"/here/http:/{long} does not exist", [f"http://{long}"])
    assert told == f"/here/{cut(f'http:/{long}')} does not exist"


def test_a_path_that_leads_nowhere_is_told_whole(tmp_path: Path) -> None:
    loop = tmp_path / ("a" * 60)
    loop.symlink_to(loop)
    assert refusal(partial(presets.user_path, loop / "x")).startswith(f"{loop}/x leads nowhere")


LOOKED_UP = {"family", "attention", "vae_attention", "nvfp4", "fp8", "int8"}  # by others


@pytest.mark.parametrize("family", ["h3", "ltx"])
@pytest.mark.parametrize("name", [f.name for f in fields(Plan) if f.type == "str"])
def test_a_plan_s_field(name: str, family: str) -> None:
    plan = replace(demo_plan(), family=family, video_vae_dtype="fp32")
    if name not in LOOKED_UP or (family == "ltx" and name in ("attention", "vae_attention")):
        told = refusal(partial(replace, plan, **{name: LONG}))
        assert name in told and "x yx y" in told and "1,200,000 characters" in told


@pytest.mark.parametrize(
    "look_up", [attention_backend, linear_backend, elementwise_backend, step_cache, named]
)
def test_what_is_looked_up_by_name(look_up: Callable[[str], object]) -> None:
    assert TOLD in refusal(partial(look_up, LONG))


@pytest.mark.parametrize("name", ["vae_tiles", "threads", "cache_warmup", "cache_max_run"])
def test_a_plan_s_number(name: str) -> None:
    for number in (DIGITS, -DIGITS):
        told = refusal(partial(replace, demo_plan(), **{name: number}))
        assert f"plan field {name}" in told


@pytest.mark.parametrize("kind", [Ref2VARequest, LTXRequest])
def test_a_request_s_field(kind: Any) -> None:
    texts = ("sampler", "scheduler", "ref_image_size") if kind is Ref2VARequest else ("family",)
    for name in texts:
        assert TOLD in refusal(partial(kind, id="x", prompt="", **{name: LONG}))
    numbers = {"width", "height", "frames", "steps", "seed", "cfg", "fps", "shift_audio"}
    for name in numbers & {f.name for f in fields(kind)}:
        for number in (DIGITS, -DIGITS, 32 * DIGITS):
            refusal(partial(kind, id="x", prompt="", **{name: number}))
    assert TOLD in refusal(partial(Reference, kind=LONG, path=Path("x")))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f'device = "{LONG}"', TOLD),
        (f'family = "{LONG}"', TOLD),
        (f'layout = "{LONG}"', TOLD),
        (f'"{LONG}" = 1', "unknown key 'x yx y"),
        (f'threads = "{LONG}"', TOLD),
        (f"threads = {'9' * 5000}", "is not valid TOML: Exceeds the limit"),
        (f"sol_tau = {'9' * 4000}", ""),
        (f'name = "{LONG}"', "a plan's name has at most 255 characters"),
    ],
    ids=str(list(range(8))).strip("[]").split(", "),
)
def test_a_plan_s_file(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "p.toml"
    models = presets.dump_plan(replace(demo_plan(), family="h3")).partition("[models]")[2]
    path.write_text(f"{line}\n[models]{models}")
    assert words in refusal(lambda: presets.load_plan(path))
    if "family" not in line:  # which parity asks of others
        refusal(lambda: read_plan(str(path)))


# ---- REST and the command line


@pytest.fixture
def web(tmp_path: Path) -> Iterator[TestClient]:
    with fake_console(tmp_path / "runs") as console:
        yield client(console)


def test_what_was_sent(web: TestClient) -> None:
    body = web.get("/api/v1/plans/cpu").json()["fields"]
    del body["name"]
    body["family"] = "h3"
    put: list[tuple[str, Any]] = [(name, LONG) for name in ("device", "layout", "cache", "family")]
    put += [(LONG, 1), ("dit", "x"), ("vae_tiles", DIGITS), ("row_split", LONG)]
    for name, value in put:
        answer = web.put("/api/v1/plans/mine", content=json.dumps(body | {name: value}))
        assert answer.status_code in (400, 413), name[:40]
        assert len(answer.text) < MOST, name[:40]
    for request in ({"width": 10**400}, {"sampler": LONG}, {"family": LONG}, {"seed": LONG}):
        asked = {"request": {"prompt": "x"} | request, "plan": "cpu"}
        answer = web.post("/api/v1/preflight", json=asked)
        assert answer.status_code in (400, 413) and len(answer.text) < MOST
    asked = {"request": {"prompt": "x"}, "plan": LONG}
    answer = web.post("/api/v1/preflight", json=asked)
    assert answer.status_code in (404, 413) and len(answer.text) < MOST
    answer = web.delete(f"/api/v1/parity/goldens/{'x' * 3000}")
    assert answer.status_code == 404 and len(answer.text) < MOST


@pytest.mark.parametrize(
    "arguments",
    [
        ["x" * 60_000],
        ["generate", "--plan", "cpu", "--width", "9" * 5000 + "x"],
        ["generate", "--plan", "x" * 60_000],
        ["inspect", "x" * 60_000],
        ["make-demo", "--size=" + "x" * 60_000, "--out", "x"],
        ["sweep", "--plan", "cpu", "--layouts", "U2," + "x" * 60_000],
    ],
    ids=["command", "number", "plan", "file", "choice", "layout"],
)
def test_what_was_typed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = int(str(ended.code))
    told = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and len(told) < MOST
    assert "characters)" in told
