"""`launch.py parity --layout`: goldens on ranks that meet as the engine's do."""

from __future__ import annotations

import json
import os
import re
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import launch
from runtime.layouts import Layout
from runtime.parity import ranks
from runtime.parity.ranks import on_ranks
from runtime.parity.report import CaseResult
from tests.denoiser_parts import FILES
from tests.parity.test_parity_honest import GOLDENS, flip_exponent, parity, spoilt

SMALL, GUIDED = "unit_pruned_fp32", "ref2va_1img_22f_cfg4_textneg"


def plan_file(folder: Path, **fields: str) -> Path:
    path = folder / "p.toml"
    lines = [f'{name} = "{value}"' for name, value in {"device": "cpu", **fields}.items()]
    path.write_text("\n".join([*lines, "[models]", f'dit = "{FILES.dit}"']), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("layout", "cases"), [("U2", (SMALL, GUIDED)), ("TP2", (SMALL,)), ("CFG2", (GUIDED,))]
)
def test_whole_requests_meet_their_goldens_on_the_ranks_of_a_layout(
    layout: str, cases: tuple[str, ...], tiny_checkpoints: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    done = parity(
        *(GOLDENS / f"{case}.safetensors" for case in cases),
        *("--checkpoints", tiny_checkpoints, "--layout", layout, "--json", out, "--jobs", "2"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())
    assert (told["layout"], told["passed"], told["failed"]) == (layout, len(cases), [])
    steps = {d["step"] for d in told["results"][0]["details"] if d["step"] is not None}
    assert len(steps) >= 2 and all(r["compared"] > 40 for r in told["results"])


def test_a_plan_s_own_layout_is_replayed_and_told(tiny_checkpoints: Path, tmp_path: Path) -> None:
    plan, out = plan_file(tmp_path, dtype="fp32", layout="U2", overlap="qkv"), tmp_path / "r.json"
    done = parity(
        GOLDENS / f"{SMALL}.safetensors",
        *("--checkpoints", tiny_checkpoints, "--plan", plan, "--json", out),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())
    assert told["layout"] == "U2"
    assert {"field": "layout", "value": "U2", "from": "plan"} in told["results"][0]["settings"]


def test_a_spoilt_golden_fails_on_ranks_too(tiny_checkpoints: Path, tmp_path: Path) -> None:
    def spoil(header: object, tensors: dict) -> None:  # type: ignore[type-arg]
        flip_exponent(tensors["final/audio"])

    path = spoilt(SMALL, tmp_path, spoil)
    done = parity(path, "--checkpoints", tiny_checkpoints, "--layout", "U2")
    assert done.returncode == 1
    assert "free final: final/audio" in done.stdout


def test_what_ranks_cannot_share_is_unsupported(tiny_checkpoints: Path) -> None:
    paths = [GOLDENS / "schedules.safetensors", GOLDENS / f"{SMALL}.safetensors"]
    done = parity(*paths, "--checkpoints", tiny_checkpoints, "--layout", "CFG2")
    assert done.returncode == 1
    assert "golden kind 'schedules' has nothing that ranks share" in done.stdout
    assert "the golden has no negative side, which half of the ranks" in done.stdout


@pytest.mark.parametrize(
    ("layout", "fields", "words"),
    [
        ("U9", {}, "--layout must be one of single, U2, .*, got 'U9'"),
        ("TP2", {"layout": "U2"}, "--layout TP2 contradicts plan p, which names U2"),
        ("U2", {"memory": "low", "dtype": "fp32"}, 'set memory = "plain"'),
    ],
)
def test_a_layout_that_cannot_be_is_one_sentence(
    layout: str, fields: dict[str, str], words: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plan = plan_file(tmp_path, **fields)
    paths = [str(GOLDENS / f"{SMALL}.safetensors"), "--plan", str(plan), "--layout", layout]
    assert launch.main(["parity", *paths]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(words, said), said


def answered(statuses: tuple[str, ...], rank: int, store: str) -> CaseResult:
    died = Path(store.removeprefix("file://")).with_name("died")
    if statuses[rank] == "dead":
        died.touch()
        os._exit(3)
    if statuses[rank] == "hangs":
        time.sleep(60)
    if statuses[rank] == "echo":
        while "dead" in statuses and not died.exists():
            time.sleep(0.01)
        return CaseResult(case="c", path="p", status="FAIL", reason="connection closed by peer")
    return CaseResult(case="c", path="p", status=statuses[rank], equal=5 - rank, reason="said")


@pytest.mark.parametrize(
    ("statuses", "status", "reason"),
    [
        (("bit-equal", "pass"), "pass", "rank 1; said"),
        (("pass", "bit-equal"), "pass", "said"),
        (
            ("bit-equal", "dead"),
            "FAIL",
            "rank 1; its process died (exit code 3; out of memory?)",
        ),
        (("hangs", "FAIL"), "FAIL", "rank 1; said; rank 0 killed 0.5 s later"),
        (("echo", "dead"), "FAIL", "rank 1; its process died (exit code 3; out of memory?)"),
        (("dead", "echo"), "FAIL", "its process died (exit code 3; out of memory?)"),
        (("FAIL", "FAIL"), "FAIL", "said"),
    ],
)
def test_the_worst_rank_decides_and_a_dead_one_fails_the_case(
    statuses: tuple[str, ...], status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "hangs" in statuses:  # elsewhere a rank may start seconds after the one that fails
        monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)
    found = on_ranks(partial(answered, statuses), 2, "c", Path("p"))
    assert (found.status, found.reason) == (status, reason)


def exchanging(dying: int, rank: int, store: str) -> CaseResult:
    """Replays that meet; one of them dies when each has got something of the other."""
    from runtime.parallel.mesh import mesh_of
    from runtime.team import Meeting, Ranks

    Ranks(Meeting(rank=rank, ranks=2, local=rank, store=store, interface="lo"), "cpu")
    everyone = mesh_of(Layout.parse("U2")).everyone
    try:
        for count in range(3):
            if (count, rank) == (1, dying):
                os._exit(3)
            everyone.total(torch.ones(8))
    except RuntimeError as error:
        return CaseResult(case="c", path="p", status="FAIL", reason=str(error))
    return CaseResult(case="c", path="p", status="bit-equal")


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_in_an_exchange_is_the_one_that_is_told(dying: int) -> None:
    began = time.monotonic()
    found = on_ranks(partial(exchanging, dying), 2, "c", Path("p"))
    told = "its process died (exit code 3; out of memory?)"
    assert (found.status, found.reason) == ("FAIL", f"rank 1; {told}" if dying else told)
    assert time.monotonic() - began < 60
