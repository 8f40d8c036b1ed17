"""The LTX goldens: met, and each kind of wrong replay found by name (goldens_ltx/README.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.ltx.forms import COMFY, MODEL, Form
from runtime.parity import ltx_files
from runtime.parity.golden import Golden
from runtime.parity.judge import replay_case
from runtime.parity.replay import KINDS, LTX_KINDS
from runtime.parity.report import CaseResult
from runtime.parity.setup import Setup

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], None]


def stored(folder: Path, *kinds: str) -> list[Path]:
    return [p for p in sorted(folder.glob("*.safetensors")) if Golden(p).kind in kinds]


def only(folder: Path, kind: str, holds: str = "") -> Path:
    """The first golden of that kind that stores a tensor of that name."""
    return next(p for p in stored(folder, kind) if not holds or holds in Golden(p))


def replayed(path: Path, folder: Path, setup: Setup | None = None) -> CaseResult:
    return replay_case(path, folder / "checkpoints", "here", setup or Setup())


def rewritten(
    source: Path, target: Path, change: Change, header: Callable[[Any], None] = lambda h: None
) -> Path:
    """A copy with other tensors or another header, under another name."""
    with safe_open(str(source), framework="pt") as file:
        document = json.loads(file.metadata()["golden"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(tensors)
    header(document)
    save_file(tensors, str(target), {"golden": json.dumps(document)})
    return target


def nothing(tensors: Tensors) -> None:
    """No tensor changes."""


# ---- met


def test_every_golden_is_met_and_those_of_the_model_to_the_bit(
    ltx_goldens: Path, cpu_paths: str
) -> None:
    found = stored(ltx_goldens, *LTX_KINDS)
    assert {"ltx_forward", "ltx_rope", "ltx_connectors"} <= {Golden(p).kind for p in found}
    for path in found:
        result = replayed(path, ltx_goldens)
        assert result.status in ("bit-equal", "pass"), f"{path.stem}: {result.first}"
        if cpu_paths == "pinned":
            off = [d for d in result.details if not d["equal"] and d["stage"] != "coefficients"]
            assert all("comfy_" in str(d["name"]) for d in off), off


def test_every_stored_program_and_arithmetic_is_compared(ltx_goldens: Path) -> None:
    path = only(ltx_goldens, "ltx_forward", "dequant_fp32.model_pre_a2v.video")
    names = {str(d["name"]) for d in replayed(path, ltx_goldens).details}
    assert {n for n in Golden(path).names if not n.startswith("in.")} <= names


def test_a_case_is_known_by_what_it_stores_not_by_its_name(
    ltx_goldens: Path, tmp_path: Path
) -> None:
    source = only(ltx_goldens, "ltx_forward", "model_pre_a2v.adaln.time_embed.mod")

    def renamed(header: Any) -> None:
        header["case"] = "schedule_values"

    path = rewritten(source, tmp_path / "stage1_rope.safetensors", nothing, renamed)
    result = replayed(path, ltx_goldens)
    assert result.status in ("bit-equal", "pass") and result.compared > 50


def test_two_clips_at_once_with_another_rate(ltx_goldens: Path, tmp_path: Path) -> None:
    """An unseen case: inputs twice, in a batch; outputs are those of the single one, twice."""
    source = only(ltx_goldens, "ltx_forward", "model_pre_a2v.adaln.time_embed.mod")

    def doubled(tensors: Tensors) -> None:
        for name, value in list(tensors.items()):
            tensors[name] = torch.cat([value, value])

    path = rewritten(source, tmp_path / "twice.safetensors", doubled)
    assert replayed(path, ltx_goldens).status in ("bit-equal", "pass")

    def faster(header: Any) -> None:
        header["params"]["fps"] = 25.0

    path = rewritten(source, tmp_path / "faster.safetensors", nothing, faster)
    assert replayed(path, ltx_goldens).status == "FAIL"


# ---- told apart


def test_the_two_forms_are_beyond_each_others_gate(
    ltx_goldens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """post_a2v replayed as pre_a2v fails, at the first tensor that sees it, and by far."""
    path = only(ltx_goldens, "ltx_forward", "comfy_post_a2v.block.0.video_to_audio_attn.out")
    wrong = replace(ltx_files.PROGRAMS["comfy_post_a2v"], v2a_source="pre_a2v")
    monkeypatch.setitem(ltx_files.PROGRAMS, "comfy_post_a2v", wrong)
    result = replayed(path, ltx_goldens)
    assert result.status == "FAIL"
    free = result.divergence["free"]
    assert free["name"] == "comfy_post_a2v.block.0.video_to_audio_attn.context_in"
    off = {d["name"]: d["relative_max"] for d in result.details if d["run"] == "free"}
    assert off["comfy_post_a2v.video"] > 1e-3 and off["comfy_post_a2v.audio"] > 1e-3
    assert off["comfy_pre_a2v.video"] < 2e-6


@pytest.mark.parametrize("program", ["comfy_post_a2v", UNHOOKED := "diffusers_unhooked"])
def test_a_golden_that_is_no_other_program_is_noticed(
    ltx_goldens: Path, tmp_path: Path, program: str
) -> None:
    source = only(ltx_goldens, "ltx_forward", f"{UNHOOKED}.video")

    def same(tensors: Tensors) -> None:
        for stream in ("video", "audio"):
            tensors[f"{program}.{stream}"] = tensors[f"model_pre_a2v.{stream}"].clone()

    result = replayed(rewritten(source, tmp_path / "x.safetensors", same), ltx_goldens)
    named = [d["name"] for d in result.details if not d["passed"]]
    assert result.status == "FAIL" and f"told apart: {program}.video" in named


@pytest.mark.parametrize(
    "form",
    [
        MODEL,
        replace(COMFY, qk_eps=MODEL.qk_eps),
        replace(COMFY, fused_sums=False),
        replace(COMFY, fused_rotation=True),
        replace(COMFY, rows_per_token=True),
    ],
)
def test_each_part_of_comfys_form_is_needed_for_its_bits(
    ltx_goldens: Path, monkeypatch: pytest.MonkeyPatch, cpu_paths: str, form: Form
) -> None:
    if cpu_paths != "pinned":
        pytest.skip(cpu_paths)
    path = only(ltx_goldens, "ltx_forward", "comfy_post_a2v.block.0.video_to_audio_attn.out")
    assert replayed(path, ltx_goldens).status == "bit-equal"
    wrong = replace(ltx_files.PROGRAMS["comfy_pre_a2v"], form=form)
    monkeypatch.setitem(ltx_files.PROGRAMS, "comfy_pre_a2v", wrong)
    after = replayed(path, ltx_goldens)
    off = [str(d["name"]) for d in after.details if not d["equal"]]
    assert off and all(name.startswith("comfy_pre_a2v") for name in off)
    # the eps alone is more than the last bits
    assert (after.status == "FAIL") == (form.qk_eps == MODEL.qk_eps)


# ---- the first wrong tensor


@pytest.mark.parametrize(
    ("tensor", "stage"),
    [
        ("model_pre_a2v.rope.rope.cos", "free rope"),
        ("model_pre_a2v.adaln.prompt_adaln.mod", "free adaln"),
        ("model_pre_a2v.block.2.audio", "staged block 2"),
        ("model_pre_a2v.video", "staged output"),
    ],
)
def test_a_wrong_tensor_is_named(
    ltx_goldens: Path, tmp_path: Path, tensor: str, stage: str
) -> None:
    source = only(ltx_goldens, "ltx_forward", "model_pre_a2v.adaln.time_embed.mod")

    def spoilt(tensors: Tensors) -> None:
        tensors[tensor] = tensors[tensor] * 1.001 + 1e-4

    result = replayed(rewritten(source, tmp_path / "x.safetensors", spoilt), ltx_goldens)
    assert result.status == "FAIL" and result.first == f"{stage}: {tensor}"


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("ltx_rope", "video_self.comfy_sin"),
        ("ltx_rope", "positions.axis0_seconds"),
        ("ltx_rope", "cross_audio.check_cos"),
        ("ltx_connectors", "projected.audio"),
        ("ltx_connectors", "comfy_first64.video"),
    ],
)
def test_a_wrong_table_or_context_is_named(
    ltx_goldens: Path, tmp_path: Path, kind: str, tensor: str
) -> None:
    def spoilt(tensors: Tensors) -> None:
        tensors[tensor] = tensors[tensor] * 1.001 + 1e-3

    path = rewritten(only(ltx_goldens, kind), tmp_path / "x.safetensors", spoilt)
    result = replayed(path, ltx_goldens)
    assert result.status == "FAIL" and tensor in str([d for d in result.details if not d["passed"]])


# ---- NVFP4, from a checkpoint of the checkout


def nvfp4_golden(folder: Path, path: Path, change: Change = nothing) -> Path:
    """Weights of the tiny packed file as comfy_kitchen reads them, and one W4A4 linear."""
    import hashlib

    import comfy_kitchen as ck

    from runtime.ltx.load import open_denoiser
    from runtime.ltx.orders import PUBLISHED

    file = folder / "checkpoints" / "t_nvfp4_official.safetensors"
    checkpoint = open_denoiser(file, PUBLISHED)
    layers = sorted(checkpoint.layers)[:3]
    tensors: Tensors = {}
    digests = {}
    for layer in layers:
        packed = checkpoint.packed(layer)
        rows, columns = packed.shape
        weight = ck.dequantize_nvfp4(
            packed.tensors["weight"],
            packed.tensors["weight_scale_2"],
            packed.tensors["weight_scale"],
            torch.float32,
        )[:rows, :columns].contiguous()
        tensors[f"dequant.{layer}"] = weight
        digests[layer] = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    change(tensors)
    header = {
        "case": "made here",
        "checkpoint": {
            "file": file.name,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        },
        "params": {"sha256_of_all_float32_dequants": digests},
    }
    save_file(tensors, str(path), {"golden": json.dumps(header)})
    return path


def test_weights_are_what_another_reader_makes_of_the_bytes(
    ltx_goldens: Path, tmp_path: Path
) -> None:
    path = nvfp4_golden(ltx_goldens, tmp_path / "x.safetensors")
    result = replayed(path, ltx_goldens)
    assert (result.status, result.compared) == ("bit-equal", 6)


def test_a_wrong_weight_is_named(ltx_goldens: Path, tmp_path: Path) -> None:
    def spoilt(tensors: Tensors) -> None:
        name = sorted(tensors)[1]
        tensors[name][0] *= 1.00001

    path = nvfp4_golden(ltx_goldens, tmp_path / "x.safetensors", spoilt)
    result = replayed(path, ltx_goldens)
    assert result.status == "FAIL" and result.first.startswith("free weight: dequant.")


# ---- refused


def test_another_checkpoint_of_that_name_is_refused(ltx_goldens: Path, tmp_path: Path) -> None:
    def other(header: Any) -> None:
        header["checkpoint"]["file"] = "t_nvfp4.safetensors"

    source = only(ltx_goldens, "ltx_forward", "model_pre_a2v.adaln.time_embed.mod")
    result = replayed(rewritten(source, tmp_path / "x.safetensors", nothing, other), ltx_goldens)
    assert result.status == "FAIL" and "is not the file that the golden was made" in result.reason


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("somebody_else.video", "tensor 'somebody_else.video'; known programs"),
        ("dequant_fp8.comfy_pre_a2v.video", "arithmetic 'dequant_fp8'"),
        ("model_pre_a2v.block.9.video", "stored but not compared: model_pre_a2v.block.9.video"),
    ],
)
def test_what_is_not_replayed_is_said(
    ltx_goldens: Path, tmp_path: Path, added: str, said: str
) -> None:
    def more(tensors: Tensors) -> None:
        tensors[added] = torch.ones(1)

    source = only(ltx_goldens, "ltx_forward", "model_pre_a2v.adaln.time_embed.mod")
    result = replayed(rewritten(source, tmp_path / "x.safetensors", more), ltx_goldens)
    assert result.status == "unsupported" and said in result.reason


def test_an_unknown_content_is_no_kind(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(1)}, str(path), {"golden": json.dumps({"case": "x", "params": {}})})
    assert Golden(path).kind not in KINDS
    assert "golden kind 'ltx'" in replayed(path, tmp_path).reason
