"""A run recorded by the ComfyUI node is replayed with a plan's checkpoints: bit-equal, or named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.h3.schedule import sigmas_for
from runtime.messages import ModelFiles, Plan
from runtime.parity.golden import Golden
from runtime.parity.judge import replay_case
from runtime.parity.report import CaseResult
from runtime.parity.setup import Setup
from tests.unit.test_capture_node import GRAPH, comfy, record, save

__all__ = ["comfy"]  # a fixture

SOURCE = Path(__file__).parents[1] / "goldens" / "unit_pruned_fp32.safetensors"


@pytest.fixture
def plan(tiny_checkpoints: Path) -> Plan:
    """The twin of the golden's own run."""
    names = {
        "dit": "h3_tiny_pruned_bf16",
        "text_encoder": "qwen3vl_tiny_bf16",
        "video_vae": "h3_tiny_video_vae_fp16",
        "audio_vae": "h3_tiny_audio_vae_fp32",
    }
    files = {k: tiny_checkpoints / f"{v}.safetensors" for k, v in names.items()}
    models = ModelFiles(**files, deepstack_layers=(0, 1, 2))  # type: ignore[arg-type]
    return Plan(name="twin", models=models, device="cpu", dtype="fp32", video_vae_dtype="fp32")


def captured(with_media: bool) -> Golden:
    golden = Golden(SOURCE)
    graph = {**GRAPH, "5": {"class_type": "H3", "inputs": {"prompt": golden.params["prompt"]}}}
    media = {
        "ref_image_0": golden.tensor("in/ref_image_0").float() / 255,
        "ref_audio_0": {"waveform": golden.tensor("in/ref_audio_0"), "sample_rate": 32000},
    }
    more = media if with_media else {}
    return save(golden, record(golden)[0], graph=graph, node="7", **more)


def played(path: Path, plan: Plan | None) -> CaseResult:
    return replay_case(path, Path("none"), "pinned", Setup(plan=plan))


@pytest.mark.parametrize("with_media", [True, False], ids=["from prompt", "from conditioning"])
def test_a_capture_is_bit_equal_with_the_same_checkpoints(
    comfy: Path, plan: Plan, cpu_paths: str, with_media: bool
) -> None:
    result = played(captured(with_media).path, plan)
    names = {str(detail["name"]) for detail in result.details}
    assert ("cond/pos/context" in names) is with_media
    assert {"noise/video", "sigmas", "step_01/net_pos/v_audio", "final/audio"} <= names
    assert result.reason == ""
    assert result.status == ("bit-equal" if cpu_paths == "pinned" else "pass")


def test_a_run_without_a_named_schedule_is_replayed_on_the_recorded_one(
    comfy: Path, plan: Plan, cpu_paths: str
) -> None:
    golden = Golden(SOURCE)
    result = played(save(golden, record(golden)[0]).path, plan)
    assert result.status == ("bit-equal" if cpu_paths == "pinned" else "pass"), result.reason


def test_the_first_wrong_step_of_a_capture_is_named(comfy: Path, plan: Plan) -> None:
    path = captured(with_media=False).path
    tensors = load_file(path)
    tensors["step_01/denoised_audio"] = tensors["step_01/denoised_audio"] * 1.01
    header = Golden(path).header
    save_file(tensors, path, metadata={"header": json.dumps(header)})
    result = played(path, plan)
    assert result.status == "FAIL"
    assert result.first == "staged step_01: step_01/denoised_audio"


def test_a_capture_needs_a_plan_with_checkpoints(comfy: Path) -> None:
    result = played(captured(with_media=False).path, None)
    assert result.status == "unsupported" and "choose a plan" in result.reason


def test_a_capture_in_another_dtype_is_refused(comfy: Path, plan: Plan) -> None:
    result = played(captured(with_media=False).path, replace(plan, dtype="bf16"))
    assert result.status == "unsupported"
    assert "captured in fp32 and plan twin computes in bf16" in result.reason


def test_decoded_frames_of_a_capture_are_compared(comfy: Path, plan: Plan, cpu_paths: str) -> None:
    golden = Golden(SOURCE)
    frames = torch.zeros(5, 64, 32, 3)
    result = played(save(golden, record(golden)[0], frames=frames).path, plan)
    assert result.status == "FAIL" and "decode/video" in result.first


def test_a_capture_with_a_lora_is_refused(comfy: Path, plan: Plan) -> None:
    golden = Golden(SOURCE)
    recording = record(golden)[0]
    recording.patched = 3
    result = played(save(golden, recording).path, plan)
    assert result.status == "unsupported" and "3 patched weights (a LoRA)" in result.reason


def test_references_in_other_slots_are_replayed(comfy: Path, plan: Plan, cpu_paths: str) -> None:
    golden = Golden(SOURCE)
    graph = {**GRAPH, "5": {"class_type": "H3", "inputs": {"prompt": golden.params["prompt"]}}}
    media = {
        "ref_image_3": golden.tensor("in/ref_image_0").float() / 255,
        "ref_audio_1": {"waveform": golden.tensor("in/ref_audio_0"), "sample_rate": 32000},
    }
    result = played(save(golden, record(golden)[0], graph=graph, node="7", **media).path, plan)
    assert result.status == ("bit-equal" if cpu_paths == "pinned" else "pass"), result.reason
    assert "cond/pos/context" in {str(detail["name"]) for detail in result.details}


def test_an_int8_video_vae_has_the_limit_of_int8(
    comfy: Path, plan: Plan, tiny_checkpoints: Path
) -> None:
    golden = Golden(SOURCE)
    saved = save(golden, record(golden)[0], frames=torch.zeros(5, 64, 32, 3))
    int8 = tiny_checkpoints / "h3_tiny_video_vae_int8_convrot.safetensors"
    for vae, limit in ((plan.models.video_vae, "video VAE fp32, pixels"), (int8, "INT8")):
        result = played(saved.path, replace(plan, models=replace(plan.models, video_vae=vae)))
        limits = {d["run"]: d["limit"] for d in result.details if d["name"] == "decode/video"}
        assert limits["staged"] == limit


@pytest.mark.parametrize("changed", [{"scheduler": "exotic"}, {"steps": 5}], ids=str)
def test_a_schedule_that_the_sampler_did_not_get_by_name_is_the_recorded_one(
    comfy: Path, plan: Plan, cpu_paths: str, changed: dict[str, object]
) -> None:
    golden = Golden(SOURCE)
    inputs = {"scheduler": "simple", "steps": 2, **changed}
    graph = {**GRAPH, "3": {"class_type": "BasicScheduler", "inputs": inputs}}
    saved = save(golden, record(golden)[0], graph=graph, node="7")
    result = played(saved.path, plan)
    assert result.status == ("bit-equal" if cpu_paths == "pinned" else "pass"), result.reason
    assert saved.params["steps"] == inputs["steps"]


def test_a_schedule_that_drops_duplicates_is_computed_from_the_steps_of_the_graph(
    comfy: Path, plan: Plan
) -> None:
    named = sigmas_for("beta", 300, 12.0, 1.0)
    golden = Golden(SOURCE)
    recording = record(golden)[0]
    recording.names["sigmas"] = named
    inputs = {"scheduler": "beta", "steps": 300}
    graph = {**GRAPH, "3": {"class_type": "BasicScheduler", "inputs": inputs}}
    saved = save(golden, recording, graph=graph, node="7")
    assert saved.params["steps"] == 300 > len(named) - 1
    computed = sigmas_for("beta", saved.params["steps"], 12.0, 1.0)
    assert torch.equal(computed, saved.tensor("sigmas"))
