"""The parity command cannot lie: spoilt goldens, unknown names and missing folders are reported."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.parity import command
from runtime.parity.cpu import ENVIRONMENT
from runtime.parity.judge import replay_case
from runtime.parity.metrics import compare
from runtime.parity.report import CaseResult, finish

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
Spoil = Callable[[dict[str, Any], dict[str, Tensor]], None]


def spoilt(case: str, folder: Path, spoil: Spoil) -> Path:
    """A copy of a golden after `spoil(header, tensors)`."""
    file = safe_open(str(GOLDENS / f"{case}.safetensors"), framework="pt")
    tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    header = json.loads(file.metadata()["header"])
    spoil(header, tensors)
    path = folder / f"{case}.safetensors"
    save_file(tensors, str(path), {"header": json.dumps(header)})
    return path


def flip(x: Tensor, byte: int, bit: int) -> None:
    """Turn over one bit of a stored tensor."""
    x.view(-1).view(torch.uint8)[byte] ^= 1 << bit


def flip_exponent(x: Tensor) -> None:
    """The exponent's highest bit of the smallest element: it becomes 2 or more."""
    size = x.element_size()
    flip(x, int(x.abs().argmin()) * size + size - 1, 6)


def parity(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own, without the pins of this one."""
    line = [sys.executable, "launch.py", "parity", *map(str, words)]
    env = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


# ---- spoilt tensors


@pytest.mark.parametrize(
    ("case", "tensor", "stage"),
    [
        ("vae_decode_tlat9_32x48", "join_0/blended", "staged video VAE decode"),
        ("unit_int8_convrot_bf16", "mod/pos/blocks.0.mlp.out", "staged module blocks.0.mlp.fc2"),
        ("unit_nvfp4_mixed_native_bf16", "mod/pos/blocks.0.attn.out", "staged module blocks.0"),
        ("t2va_22f_shift_7_2", "final/video", "free final"),
        ("te_nvfp4_awq", "cond/0/context", "staged text layers"),
        ("layout_real_sizes", "layout_1/position_ids", "free layout"),
        ("quant_primitives", "0/nvfp4/dequant_bf16", "staged nvfp4"),
        ("schedules", "sigmas/12_3/beta/4", "free schedule"),
    ],
)
def test_a_flipped_high_bit_fails_and_names_the_tensor_and_its_stage(
    case: str, tensor: str, stage: str, tmp_path: Path, tiny_checkpoints: Path, cpu_paths: str
) -> None:
    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        flip_exponent(tensors[tensor])

    result = replay_case(spoilt(case, tmp_path, spoil), tiny_checkpoints, cpu_paths)
    assert result.status == "FAIL"
    assert result.first.startswith(stage)
    assert tensor in result.first
    assert result.max_abs > 0


def test_one_flipped_low_bit_ends_bit_equality_and_is_named(
    tmp_path: Path, tiny_checkpoints: Path, cpu_paths: str
) -> None:
    if cpu_paths != "pinned":
        pytest.skip(cpu_paths)

    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        flip(tensors["decode/audio_raw"], 4000, 0)

    case = "ref2va_1img_22f_res_beta_12_s440202_bf16"
    result = replay_case(spoilt(case, tmp_path, spoil), tiny_checkpoints, cpu_paths)
    assert (result.status, result.compared - result.equal) == ("pass", 2)
    assert result.first == "staged audio VAE decode: decode/audio_raw"


def test_a_flipped_sign_of_zero_is_not_bit_equal(
    tmp_path: Path, tiny_checkpoints: Path, cpu_paths: str
) -> None:
    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        assert tensors["sigmas/12_3/beta/4"][-1] == 0
        tensors["sigmas/12_3/beta/4"][-1] = -0.0

    result = replay_case(spoilt("schedules", tmp_path, spoil), tiny_checkpoints, cpu_paths)
    assert result.first == "free schedule: sigmas/12_3/beta/4"
    assert result.equal < result.compared


def test_a_nan_in_a_golden_fails_even_where_nothing_is_gated(
    tmp_path: Path, tiny_checkpoints: Path, cpu_paths: str
) -> None:
    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["final/audio"].view(-1)[3] = torch.nan

    case = "unit_nvfp4_mixed_native_bf16"
    result = replay_case(spoilt(case, tmp_path, spoil), tiny_checkpoints, cpu_paths)
    assert result.status == "FAIL"
    assert "final/audio (non-finite values)" in result.first


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["decode/video", "step_00/x_video"])
def test_a_golden_that_is_not_finite_is_compared_and_named(name: str, value: float) -> None:
    want = torch.ones(2, 3)
    want[0, 1] = value
    found = compare(name, torch.ones(2, 3), want, run="free", stage="x")
    assert found.problem == "non-finite values" and not found.equal
    assert found.psnr == -float("inf") and found.max_abs == float("inf")


def test_another_shape_or_dtype_fails_and_is_said(
    tmp_path: Path, tiny_checkpoints: Path, cpu_paths: str
) -> None:
    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["out/video"] = tensors["out/video"][:, :, :16].contiguous()

    case = "vae_decode_tlat1_32x48"
    result = replay_case(spoilt(case, tmp_path, spoil), tiny_checkpoints, cpu_paths)
    assert result.status == "FAIL"
    assert "shape (1, 1, 32, 48, 3) for (1, 1, 16, 48, 3)" in result.first


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("t2va_22f_img2img_denoise05", "step_00/net_pos/attention_entropy"),
        ("t2va_22f_img2img_denoise05", "in/ref_depth_0"),
        ("te_bf16", "cond/0/pooled"),
        ("audio_vae_decode", "out/latent_0/spectrum"),
        ("vae_decode_tlat1_32x48", "out/alpha"),
        ("vae_encode_odd_tiled", "out/0/logvar"),
        ("schedules", "sigmas_text/12_3/beta/4"),
        ("quant_primitives", "0/nvfp4/outliers_fp32"),
        ("layout_real_sizes", "layout_1/window_ids"),
    ],
)
def test_a_stored_tensor_that_nothing_compares_is_reported_by_name(
    case: str, name: str, tmp_path: Path, tiny_checkpoints: Path, cpu_paths: str
) -> None:
    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.zeros(3)

    result = replay_case(spoilt(case, tmp_path, spoil), tiny_checkpoints, cpu_paths)
    assert (result.status, result.reason) == ("unsupported", f"stored but not compared: {name}")
    assert result.compared > 0


# ---- names we do not have


@pytest.mark.parametrize(
    ("case", "key", "value", "said"),
    [
        ("t2va_22f_shift_7_2", "sampler", "dpmpp_2m", "sampler 'dpmpp_2m'"),
        ("t2va_22f_shift_7_2", "scheduler", "kl_optimal", "scheduler 'kl_optimal'"),
        ("t2va_22f_shift_7_2", "mode", "v2v", "mode 'v2v'"),
    ],
)
def test_an_unknown_sampler_scheduler_or_mode_is_unsupported_by_name(
    case: str,
    key: str,
    value: str,
    said: str,
    tmp_path: Path,
    tiny_checkpoints: Path,
    cpu_paths: str,
) -> None:
    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        header["params"][key] = value

    result = replay_case(spoilt(case, tmp_path, spoil), tiny_checkpoints, cpu_paths)
    assert result.status == "unsupported"
    assert result.reason.startswith(said)


def test_unknown_names_in_a_schedules_golden_are_unsupported_by_name(
    tmp_path: Path, tiny_checkpoints: Path, cpu_paths: str
) -> None:
    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["sigmas/12_3/karras/4"] = torch.zeros(5)

    result = replay_case(spoilt("schedules", tmp_path, spoil), tiny_checkpoints, cpu_paths)
    assert (result.status, result.reason) == ("unsupported", "scheduler 'karras'")


def test_an_unknown_kind_is_unsupported_by_name(
    tmp_path: Path, tiny_checkpoints: Path, cpu_paths: str
) -> None:
    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        header["kind"] = "lora"

    result = replay_case(spoilt("schedules", tmp_path, spoil), tiny_checkpoints, cpu_paths)
    assert result.status == "unsupported"
    assert result.reason.startswith("golden kind 'lora'; known: e2e")


@pytest.mark.parametrize("key", ["case", "kind", "params"])
def test_a_header_without_its_keys_fails_in_one_sentence(
    key: str, tmp_path: Path, tiny_checkpoints: Path, cpu_paths: str
) -> None:
    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del header[key]

    result = replay_case(spoilt("schedules", tmp_path, spoil), tiny_checkpoints, cpu_paths)
    assert result.status == "FAIL"
    assert f"is not a golden: its header has no '{key}'" in result.reason


def test_a_golden_without_tensors_is_a_failure(
    tmp_path: Path, tiny_checkpoints: Path, cpu_paths: str
) -> None:
    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors.clear()

    result = replay_case(spoilt("schedules", tmp_path, spoil), tiny_checkpoints, cpu_paths)
    assert result.status == "FAIL"
    assert "nothing was compared" in result.reason


# ---- the command


def options(*paths: Path, **changed: object) -> argparse.Namespace:
    """Parsed options of the command."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args([str(p) for p in paths])
    for name, value in changed.items():
        setattr(args, name, value)
    return args


def test_a_folder_without_goldens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="there is no golden"):
        command.run(options(tmp_path))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"checkpoints": Path("/nowhere")}, "/nowhere is not a folder"),
        ({"jobs": 0}, "--jobs is 0"),
        ({"threads": 2}, "give --unpinned with it"),
        ({"out": Path("/nowhere/out.json")}, "its folder does not exist"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        command.run(options(GOLDENS, **changed))


def test_missing_checkpoints_are_one_sentence_of_the_case(tmp_path: Path, cpu_paths: str) -> None:
    path = spoilt("vae_decode_tlat1_32x48", tmp_path, lambda header, tensors: None)
    result = replay_case(path, tmp_path / "checkpoints", cpu_paths)
    assert result.status == "FAIL"
    assert f"there is no folder {tmp_path}/checkpoints; name the folder" in result.reason


def test_the_command_judges_each_file_says_so_in_json_and_exits_with_1(
    tmp_path: Path, tiny_checkpoints: Path
) -> None:
    def spoil(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["out/video"] = tensors["out/video"][..., :2].contiguous()

    for case in ("layout_real_sizes", "schedules"):
        spoilt(case, tmp_path, lambda header, tensors: None)
    spoilt("vae_decode_tlat1_32x48", tmp_path, spoil)
    (tmp_path / "broken.safetensors").write_bytes(b"not a golden")
    out = tmp_path / "out.json"
    done = parity(tmp_path, "--checkpoints", tiny_checkpoints, "--json", out, "--jobs", "1")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert (summary["cases"], summary["passed"]) == (4, 2)
    assert summary["failed"] == ["broken", "vae_decode_tlat1_32x48"]
    document = json.loads(out.read_text())
    results = {r["case"]: r for r in document["results"]}
    assert document["cases"] == len(results) == 4
    assert results["schedules"]["compared"] == len(results["schedules"]["details"])
    (wrong,) = [d for d in results["vae_decode_tlat1_32x48"]["details"] if d["problem"]]
    assert (wrong["name"], wrong["max_abs"]) == ("out/video", None)


@pytest.mark.parametrize(("words", "status"), [((), 0), (("--at-least", "2"), 1)])
def test_the_command_exits_with_0_only_if_enough_cases_are_bit_equal(
    words: tuple[str, ...], status: int, cpu_paths: str
) -> None:
    if cpu_paths != "pinned":
        pytest.skip(cpu_paths)
    done = parity(GOLDENS / "layout_real_sizes.safetensors", *words)
    assert done.returncode == status
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["bit_equal"], summary["cpu"]) == (1, "pinned")


def test_the_command_passes_within_the_tolerances_on_this_processors_own_paths(
    tiny_checkpoints: Path,
) -> None:
    paths = [GOLDENS / f"{name}.safetensors" for name in ("unit_pruned_bf16", "schedules")]
    done = parity(*paths, "--unpinned", "--threads", "2", "--jobs", "1")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0
    assert (summary["passed"], summary["cpu"]) == (2, "unpinned: --unpinned")


def test_a_path_that_does_not_exist_exits_with_2_and_one_sentence() -> None:
    done = parity("nowhere")
    assert done.returncode == 2
    assert done.stderr == (
        "launch.py parity: nowhere does not exist; give golden files or folders of them\n"
    )


@pytest.mark.parametrize("status", ["FAIL", "unsupported"])
def test_a_failed_or_unsupported_case_is_exit_status_1(status: str) -> None:
    good = CaseResult(case="a", path="a", status="bit-equal")
    bad = CaseResult(case="b", path="b", status=status)
    assert finish([good], at_least=0) == 0
    assert finish([good, bad], at_least=0) == 1
