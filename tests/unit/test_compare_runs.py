"""Two runs against each other: settings, times, and latents measured in a child process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from app import compare, records
from app.stored import plain
from runtime.messages import Reference
from runtime.parity import latents
from tests import fakes

ROOT = Path(__file__).parents[2]


def record(id: str = "a", *, plan: str = "fake", **fields: Any) -> dict[str, Any]:
    request = fakes.request(id=id, **fields.pop("request", {}))
    stages = [{"stage": "denoise", "seconds": fields.pop("seconds", 2.0), "rank": 0, "step": 0}]
    return {
        "id": id,
        "state": "done",
        "request": plain(request),
        "plan": plain(fakes.plan(plan)),
        "engine": {"load_seconds": 3.0, "resolved": fields.pop("resolved", {"torch": "2.13"})},
        "notes": [],
        "stages": stages,
        "result": {"peak_memory_bytes": fields.pop("peak", 0)},
        "failure": None,
    }


def write(root: Path, id: str, **tensors: NDArray[Any]) -> None:
    (root / id).mkdir(parents=True, exist_ok=True)
    save_file(tensors, root / id / records.LATENTS)


def random(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_only_the_settings_that_differ_are_told() -> None:
    a = record("a", request={"steps": 4}, resolved={"torch": "2.13", "device": "cpu"})
    b = record("b", request={"steps": 8}, plan="other", resolved={"torch": "2.14"})
    rows = {(r["section"], r["name"]): (r["a"], r["b"]) for r in compare.compare(a, b)["settings"]}
    assert rows == {
        ("request", "steps"): (4, 8),
        ("plan", "name"): ("fake", "other"),
        ("machine", "torch"): ("2.13", "2.14"),
        ("machine", "device"): ("cpu", None),
    }


def test_equal_runs_differ_in_nothing() -> None:
    assert compare.compare(record("a"), record("b"))["settings"] == []


def test_references_are_compared_one_by_one() -> None:
    boat = Reference(kind="image", path=Path("boat.png"))
    a = record("a", request={"references": (boat,)})
    b = record("b", request={"references": (boat, Reference(kind="audio", path=Path("bell.wav")))})
    rows = {r["name"]: (r["a"], r["b"]) for r in compare.compare(a, b)["settings"]}
    assert rows["reference 2.path"] == (None, "bell.wav")
    assert not any(name.startswith("reference 1") for name in rows)


def test_times_are_told_with_difference_and_ratio() -> None:
    found = compare.compare(record("a", seconds=2.0), record("b", seconds=1.5))
    row = next(t for t in found["times"] if t["name"] == "denoise")
    assert row == {"name": "denoise", "a": 2.0, "b": 1.5, "delta": -0.5, "ratio": 0.75}


def test_what_only_one_run_measured_has_no_difference() -> None:
    found = compare.compare(record("a", peak=5), record("b"))
    assert found["peak_memory"] == {"a": 5, "b": None, "delta": None, "ratio": None}


def test_latents_are_measured_as_defined(tmp_path: Path) -> None:
    a, b = random(0, 1, 3, 7, 5), random(1, 1, 3, 7, 5)
    sound = random(2, 1, 4, 9)
    write(tmp_path, "a", video=a, audio=sound)
    write(tmp_path, "b", video=b, audio=sound)
    found = compare.latents(tmp_path, "a", "b")
    error = a.astype(np.float64) - b
    video = found["video"]
    assert video["max_abs"] == pytest.approx(np.abs(error).max(), rel=1e-12)
    assert video["mean_abs"] == pytest.approx(np.abs(error).mean(), rel=1e-12)
    assert video["relative_l2"] == pytest.approx(
        np.sqrt((error**2).sum() / (a.astype(np.float64) ** 2).sum()), rel=1e-12
    )
    left, right = a.astype(np.float64), b.astype(np.float64)
    cosine = (left * right).sum() / np.sqrt((left**2).sum() * (right**2).sum())
    assert video["cosine"] == pytest.approx(cosine, rel=1e-12)
    peak = float(a.max()) - float(a.min())
    assert video["psnr"] == pytest.approx(10 * math.log10(peak**2 / (error**2).mean()), rel=1e-9)
    assert not video["equal"]
    assert found["audio"]["equal"] and found["audio"]["psnr"] is None


def test_the_sign_of_a_zero_is_no_bit_equality() -> None:
    found = latents.figures(np.zeros(3, np.float32), -np.zeros(3, np.float32))
    assert not found["equal"] and found["max_abs"] == 0 and found["relative_l2"] is None


def test_other_shapes_are_said(tmp_path: Path) -> None:
    sound = random(2, 4)
    write(tmp_path, "a", video=random(0, 2, 3), audio=sound)
    write(tmp_path, "b", video=random(0, 2, 4), audio=sound)
    found = compare.latents(tmp_path, "a", "b")
    assert found["video"]["reason"] == "their shapes differ: 2x3 and 2x4"
    assert found["video"]["max_abs"] is None and found["audio"]["equal"]


def test_values_that_are_not_finite_are_said() -> None:
    bad = np.array([1, math.nan], np.float32)
    assert latents.figures(bad, bad)["reason"] == "they hold values that are not finite"


def test_missing_latents_are_said(tmp_path: Path) -> None:
    write(tmp_path, "a", video=random(0, 2), audio=random(1, 2))
    (tmp_path / "b").mkdir()
    found = compare.latents(tmp_path, "a", "b")
    assert found == {"video": None, "audio": None, "reason": "no latents were kept of b"}


def test_damaged_latents_are_said_and_nothing_is_kept(tmp_path: Path) -> None:
    write(tmp_path, "a", video=random(0, 2), audio=random(1, 2))
    write(tmp_path, "b", video=random(0, 2), audio=random(1, 2))
    (tmp_path / "b" / records.LATENTS).write_bytes(b"nothing of the kind")
    found = compare.latents(tmp_path, "a", "b")
    assert "latents.safetensors is not a readable latents file" in found["reason"]
    assert not list(tmp_path.glob("*/compare_*"))


def test_figures_are_kept_until_the_latents_change(tmp_path: Path) -> None:
    sound = random(3, 2)
    write(tmp_path, "a", video=random(0, 8), audio=sound)
    write(tmp_path, "b", video=random(1, 8), audio=sound)
    first = compare.latents(tmp_path, "a", "b")
    kept = tmp_path / "b" / "compare_a.json"
    document = json.loads(kept.read_text())
    document["figures"]["video"]["max_abs"] = 77.0
    kept.write_text(json.dumps(document))
    assert compare.latents(tmp_path, "a", "b")["video"]["max_abs"] == 77.0
    write(tmp_path, "b", video=random(1, 8), audio=random(4, 3))
    assert compare.latents(tmp_path, "a", "b")["video"]["max_abs"] == first["video"]["max_abs"]


def test_the_child_needs_no_torch() -> None:
    code = "import sys, runtime.parity.latents; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
