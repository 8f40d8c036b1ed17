"""A prompt that LTX's context has no room for is refused before an engine is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import ltx_prompt, preflight
from app.children import ChildFailed
from app.console import Console
from runtime.checkpoints.header import RANDOM_WEIGHTS
from runtime.ltx.tiny_components import ComponentFolders
from runtime.messages import LTXRequest, Plan
from tests.consoles import client, ltx_console
from tests.ltx_plans import counted_children, plan_of

ROOT = Path(__file__).parents[2]
SMALL = {"family": "ltx", "width": 64, "height": 64, "frames": 9}
TOLD = "the prompt has 1025 tokens, at most 1024 fit; shorten it"


@pytest.fixture
def ltx(tmp_path: Path, ltx_components: ComponentFolders) -> Plan:
    """With the tower and the tokenizer of the demo: a token a byte, and no BOS of its own."""
    plan = plan_of(tmp_path / "models", RANDOM_WEIGHTS)
    files = replace(
        plan.models,
        text_encoder=ltx_components.text_encoder,
        tokenizer=ltx_components.tokenizer,
    )
    return replace(plan, models=files)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules of the children that are started."""
    return counted_children(monkeypatch)


def test_a_prompt_is_counted_as_the_tower_counts_it(ltx: Plan) -> None:
    ltx_prompt.check(f" {'x' * 1023}\n", ltx)
    ltx_prompt.check("é" * 511, ltx)
    for long in ("x" * 1024, "é" * 512):
        with pytest.raises(ValueError) as refused:
            ltx_prompt.check(long, ltx)
        assert str(refused.value) == TOLD


def test_a_tokenizer_beside_the_tower_counts_where_the_plan_names_none(ltx: Plan) -> None:
    beside = replace(ltx, models=replace(ltx.models, tokenizer=None))
    with pytest.raises(ValueError, match="has 1101 tokens"):
        ltx_prompt.check("x" * 1100, beside)


def test_only_a_prompt_that_may_be_too_long_costs_a_process_and_that_once(
    ltx: Plan, asked: list[str]
) -> None:
    ltx_prompt.check("y" * 1023, ltx)
    assert not asked
    for _ in range(2):
        with pytest.raises(ValueError):
            ltx_prompt.check("y" * 2000, ltx)
    assert asked == ["runtime.ltx.measure"]
    file = ltx.models.tokenizer / "tokenizer.json"  # type: ignore[operator]
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    with pytest.raises(ValueError):
        ltx_prompt.check("y" * 2000, ltx)
    assert len(asked) == 2


def test_a_child_that_died_is_asked_again(ltx: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(module: str, **options: Any) -> str:
        raise ChildFailed("counting the tokens of the prompt took too much time")

    with monkeypatch.context() as patched:
        patched.setattr(ltx_prompt, "run_child", died)
        with pytest.raises(ChildFailed):
            ltx_prompt.check("z" * 1500, ltx)
    with pytest.raises(ValueError, match="has 1501 tokens"):
        ltx_prompt.check("z" * 1500, ltx)


def test_a_tokenizer_that_could_not_be_read_is_asked_again(ltx: Plan, tmp_path: Path) -> None:
    shown = tmp_path / "tokenizer"
    shown.mkdir()
    plan = replace(ltx, models=replace(ltx.models, tokenizer=shown))
    file, real = shown / "tokenizer.json", ltx.models.tokenizer / "tokenizer.json"  # type: ignore[operator]
    file.write_text("{}")
    when = file.stat()
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        ltx_prompt.check("v" * 1500, plan)
    file.write_bytes(real.read_bytes())
    os.utime(file, ns=(when.st_atime_ns, when.st_mtime_ns))  # as chmod leaves it
    with pytest.raises(ValueError, match="has 1501 tokens"):
        ltx_prompt.check("v" * 1500, plan)


def test_two_children_at_once_count_for_all_pages(
    ltx: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []
    most = 0

    def slow(module: str, **options: Any) -> str:
        nonlocal most
        running.append(module)
        most = max(most, len(running))
        time.sleep(0.05)
        running.pop()
        return "9"

    monkeypatch.setattr(ltx_prompt, "run_child", slow)
    with ThreadPoolExecutor(8) as pages:
        list(pages.map(lambda n: ltx_prompt.check(f"{n}" * 1100, ltx), range(8)))
    assert most == 2


def test_the_child_loads_no_torch(ltx: Plan) -> None:
    asked = {"prompt": "x", "text_encoder": str(ltx.models.text_encoder)}
    asked["tokenizer"] = str(ltx.models.tokenizer)
    code = "import sys; from runtime.ltx.measure import main; main(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.split() == ["2", "False"]


def test_preflight_of_the_command_line_counts(ltx: Plan, tmp_path: Path) -> None:
    preflight.check(LTXRequest(id="x", prompt="x" * 1023), ltx, tmp_path, media=False)
    with pytest.raises(ValueError, match="has 1025 tokens"):
        preflight.check(LTXRequest(id="x", prompt="x" * 1024), ltx, tmp_path, media=False)


@pytest.fixture
def console(tmp_path: Path, ltx: Plan) -> Iterator[Console]:
    with ltx_console(tmp_path / "runs", ltx) as console:
        yield console


def test_preflight_and_queue_say_the_same_of_a_long_prompt(
    console: Console, ltx: Plan, asked: list[str]
) -> None:
    web = client(console)
    request = SMALL | {"prompt": "x" * 1024}
    found = web.post("/api/v1/preflight", json={"request": request, "plan": "mine"}).json()
    assert (found["blocked"], found["verdict"]) == (TOLD, "no")
    assert found["rows"]["total"] == 17  # which do not depend on the prompt
    queued = web.post("/api/v1/jobs", json={"request": request, "plans": ["mine"], "force": True})
    assert (queued.status_code, queued.json()) == (400, {"detail": TOLD})
    short = SMALL | {"prompt": "x"}
    found = web.post("/api/v1/preflight", json={"request": short, "plan": "mine"}).json()
    assert found["blocked"] == ""
    asked.clear()  # without a denoiser there is nothing to count for
    ltx.models.dit.unlink()
    request = SMALL | {"prompt": "w" * 1024}
    found = web.post("/api/v1/preflight", json={"request": request, "plan": "mine"}).json()
    assert "dit.safetensors is not there" in found["blocked"] and not asked
