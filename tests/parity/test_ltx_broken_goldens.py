"""LTX goldens whose header or tensors cannot be replayed, or are another arithmetic's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.parity.golden import Golden
from runtime.parity.judge import replay_case
from runtime.parity.limits import LTX_BF16, LTX_SAMPLER, limit_of
from runtime.parity.metrics import compare
from runtime.parity.report import CaseResult

Tensors = dict[str, Tensor]
W4A16, W4A4 = "comfy_loader_w4a16_bf16", "comfy_loader_w4a4_bf16"


def changed(
    source: Path,
    target: Path,
    tensors: Callable[[Tensors], Tensors] = lambda t: t,
    header: Callable[[Any], None] = lambda h: None,
) -> CaseResult:
    """What the replay says of a changed copy."""
    with safe_open(str(source), framework="pt") as file:
        document = json.loads(file.metadata()["golden"])
        stored = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    header(document)
    save_file(tensors(stored), str(target), {"golden": json.dumps(document)})
    return replay_case(target, source.parent / "checkpoints", "here")


def of_kind(folder: Path, kind: str, holds: str = "") -> Path:
    paths = sorted(folder.glob("*.safetensors"))
    return next(
        p for p in paths if Golden(p).kind == kind and any(holds in n for n in Golden(p).names)
    )


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("F", None, "must have F, H, W and A, whole numbers of at least 1"),
        ("W", 4.5, "must have F, H, W and A, whole numbers of at least 1"),
        ("A", 0, "must have F, H, W and A, whole numbers of at least 1"),
        ("fps", 0, "must have fps, a number above 0, got 0"),
        ("fps", "24", "must have fps, a number above 0, got '24'"),
    ],
)
def test_params_that_are_no_sizes_are_refused(
    ltx_goldens: Path, tmp_path: Path, field: str, value: Any, sentence: str
) -> None:
    def spoilt(header: Any) -> None:
        header["params"][field] = value

    source = of_kind(ltx_goldens, "ltx_forward")
    result = changed(source, tmp_path / "x.safetensors", header=spoilt)
    assert result.status == "FAIL"
    assert sentence in result.reason


@pytest.mark.parametrize(
    "named",
    [None, "t_bf16.safetensors", {"file": None, "sha256": None}, {"file": "../x", "sha256": "0"}],
)
def test_a_checkpoint_that_is_not_named_is_refused(
    ltx_goldens: Path, tmp_path: Path, named: Any
) -> None:
    def spoilt(header: Any) -> None:
        header["checkpoint"] = named

    source = of_kind(ltx_goldens, "ltx_forward")
    result = changed(source, tmp_path / "x.safetensors", header=spoilt)
    assert result.status == "FAIL"
    assert "must have checkpoint with a file's name and its sha256" in result.reason


def test_a_partial_strength_is_unsupported(ltx_goldens: Path, tmp_path: Path) -> None:
    def partial(tensors: Tensors) -> Tensors:
        tensors["in.denoise_mask"][:, :3] = 0.5
        return tensors

    source = of_kind(ltx_goldens, "ltx_sampler")
    result = changed(source, tmp_path / "x.safetensors", partial)
    assert result.status == "unsupported"
    assert "other values than 0 and 1" in result.reason


def test_weight_only_numbers_do_not_pass_for_w4a4(ltx_goldens: Path, tmp_path: Path) -> None:
    """The gate of W4A4 alone would let them: flipped codes cost as much (README, tolerances)."""

    def renamed(tensors: Tensors) -> Tensors:
        return {n.replace(W4A16, W4A4): t for n, t in tensors.items() if W4A4 not in n}

    source = of_kind(ltx_goldens, "ltx_forward", W4A4)
    assert changed(source, tmp_path / "same.safetensors").status in ("bit-equal", "pass")
    result = changed(source, tmp_path / "x.safetensors", renamed)
    assert result.status == "FAIL"
    assert f"told apart: {W4A4}" in result.first


def test_a_trajectory_in_bf16_has_the_gate_of_bf16(ltx_goldens: Path, tmp_path: Path) -> None:
    def half(header: Any) -> None:
        header["params"]["dtype"] = "bfloat16"

    source = of_kind(ltx_goldens, "ltx_sampler")
    target = tmp_path / "x.safetensors"
    changed(source, target, header=half)
    for path, limit in ((source, LTX_SAMPLER), (target, LTX_BF16)):
        golden = Golden(path)
        name = "model_pre_a2v.final.video"
        stored = golden.tensor(name)
        found = compare(name, stored, stored, run="free", stage="final")
        assert limit_of(golden, found) is limit


@pytest.mark.parametrize(
    ("kind", "spoilt", "named"),
    [
        (
            "ltx_sampler",
            "model_pre_a2v.step.2.noise.video",
            "staged noise: model_pre_a2v.step.2.noise.video",
        ),
        ("ltx_sampler", "in.noise.audio", "staged noise: in.noise.audio"),
        ("ltx_connectors", "projected.video", "staged projection: projected.video"),
    ],
)
def test_what_is_wrong_is_named_before_what_it_spoils(
    ltx_goldens: Path, tmp_path: Path, kind: str, spoilt: str, named: str
) -> None:
    def nudged(tensors: Tensors) -> Tensors:
        tensors[spoilt].flatten()[5] += 1e-2
        return tensors

    source = of_kind(ltx_goldens, kind, spoilt)
    result = changed(source, tmp_path / "x.safetensors", nudged)
    assert (result.status, result.first) == ("FAIL", named)
