"""The planner's verdicts: what fits, what is tight, what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app import models, needs, presets
from app.estimate import Estimate, ReferencePlan
from app.history import Typical
from app.machine import Gpu, Machine, machine_of
from app.measuring import Measured, Measurer
from app.needs import Past
from app.planner import estimate
from runtime.messages import ModelFiles, Plan, Ref2VARequest, Reference
from tests.unit.full_size import write_set

GIB = 1 << 30
REQUEST = Ref2VARequest(id="r", prompt="a lighthouse")
MEASURED = Measured(text=552, total=20_342, most_vision=510)
RAM = {"ram_total": 128 * GIB, "ram_used": 8 * GIB}


def gpu(gib: float, *, used: float = 0, unified: bool = False) -> Machine:
    one = Gpu(
        name="NVIDIA Test",
        compute="12.0",
        total=int(gib * GIB),
        used=int(used * GIB),
        unified=unified,
    )
    return Machine(gpus=(one,), **RAM)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """NVFP4 dequantised, everything resident, over files of the published sizes."""
    files = ModelFiles(**write_set(tmp_path_factory.mktemp("full")))
    return Plan(name="full", models=files, text_encoder="resident")


@pytest.fixture
def ask(full: Plan) -> Callable[..., Estimate]:
    """The estimate of the reference request, with anything changed."""

    def asked(
        machine: Machine,
        *,
        plan: Plan = full,
        request: Ref2VARequest = REQUEST,
        measured: Measured = MEASURED,
        past: Past = Past(),  # noqa: B008  # frozen
        disk_free: int = 100 * GIB,
        loaded: bool = False,
        unavailable: tuple[str, ...] = (),
    ) -> Estimate:
        return estimate(
            request,
            plan,
            machine,
            models.look(plan),
            measured,
            past,
            disk_free=disk_free,
            loaded=loaded,
            unavailable=unavailable,
        )

    return asked


@pytest.mark.parametrize(
    ("gib", "verdict"), [(141, "fits"), (48, "fits"), (38, "tight"), (32, "no"), (24, "no")]
)
def test_memory_is_judged_by_the_size_of_the_gpu(
    ask: Callable[..., Estimate], gib: float, verdict: str
) -> None:
    found = ask(gpu(gib))
    assert found.vram.verdict == verdict
    assert (found.needs_force != "") == (verdict == "no")
    assert found.blocked == ""
    assert "37.1 GiB" in found.vram.reason and "NVIDIA Test" in found.vram.reason


def test_a_streamed_text_encoder_needs_less(ask: Callable[..., Estimate], full: Plan) -> None:
    resident = ask(gpu(141)).vram
    streamed = ask(gpu(141), plan=replace(full, text_encoder="stream")).vram
    assert resident.needed is not None and streamed.needed is not None
    assert streamed.needed < resident.needed - 1.9 * GIB


def test_what_other_programs_hold_is_taken_off(ask: Callable[..., Estimate]) -> None:
    found = ask(gpu(48, used=20))
    assert found.vram.verdict == "no"
    assert "of which 20.0 GiB are taken" in found.vram.reason


def test_what_our_own_engine_holds_is_not_taken_off(ask: Callable[..., Estimate]) -> None:
    machine = replace(gpu(48, used=36), engine_loaded=True)
    assert ask(machine).vram.verdict == "fits"


def test_unified_memory_is_counted_once_for_both(ask: Callable[..., Estimate]) -> None:
    machine = replace(gpu(64, unified=True), ram_total=40 * GIB, ram_used=2 * GIB)
    found = ask(machine)
    assert "shared with the RAM" in found.vram.reason
    assert found.ram.verdict == "no"
    assert "the GPU's memory is part of it" in found.ram.source


def test_a_measured_peak_goes_before_the_formula(ask: Callable[..., Estimate]) -> None:
    found = ask(gpu(48), past=Past(peak_bytes=20 * GIB, peak_runs=3))
    assert found.vram.needed == pytest.approx(20 * GIB, rel=0.05)
    assert "measured here in 3 runs" in found.vram.source


def test_without_a_gpu_a_plan_for_one_is_refused(ask: Callable[..., Estimate]) -> None:
    found = ask(Machine(reason="no NVIDIA driver", **RAM))
    assert found.vram.verdict == "no"
    assert found.needs_force == "This plan needs a CUDA GPU: no NVIDIA driver."


def test_a_layout_needs_a_gpu_for_each_rank(ask: Callable[..., Estimate], full: Plan) -> None:
    found = ask(gpu(141), plan=replace(full, layout="U4"))
    assert found.vram.verdict == "no"
    assert found.needs_force == "Layout U4 needs 4 GPUs: this machine has 1."


def test_tensor_parallel_ranks_need_less_each(ask: Callable[..., Estimate], full: Plan) -> None:
    one = gpu(141)
    two = replace(one, gpus=one.gpus * 2)
    alone, shared = ask(one).vram, ask(two, plan=replace(full, layout="TP2")).vram
    assert alone.needed is not None and shared.needed is not None
    assert alone.needed - shared.needed > 4 * GIB  # half of the blocks' NVFP4 weights
    assert shared.verdict == "fits"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_not_measured_is_never_said_to_fit(
    ask: Callable[..., Estimate], full: Plan, device: str
) -> None:
    found = ask(
        gpu(141),
        plan=replace(full, device=device),
        measured=Measured(problem="measuring this request took too long"),
        past=Past(peak_bytes=20 * GIB, peak_runs=3),
    )
    assert found.verdict == found.ram.verdict == "unknown"
    assert found.rows.total is None and found.blocked == ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scheduler": "beta", "steps": 900}, "783 of 900 steps will run"),
        ({"frames": 379}, "379 frames are more than H3 was trained on (about 124 to 362)"),
        ({"cfg": -1.0}, "CFG -1 is below 0 and steers away from the prompt"),
    ],
)
def test_what_is_hardly_meant_is_a_warning_that_stops_nothing(
    ask: Callable[..., Estimate], change: dict[str, Any], told: str
) -> None:
    found = ask(gpu(141), request=replace(REQUEST, **change))
    (warning,) = found.warnings
    assert told in warning
    assert (found.verdict, found.blocked, found.needs_force) == ("fits", "", "")


def test_a_usual_request_has_no_warning(ask: Callable[..., Estimate]) -> None:
    usual = replace(REQUEST, frames=362, scheduler="simple", steps=900)
    assert ask(gpu(141), request=usual).warnings == ()


def test_memory_that_is_not_reported_is_unknown_and_not_a_guess(
    ask: Callable[..., Estimate],
) -> None:
    machine = Machine(gpus=(Gpu(name="Odd", compute="", total=None, used=None),), **RAM)
    found = ask(machine)
    assert found.vram.verdict == found.verdict == "unknown"
    assert "not reported" in found.vram.reason


def test_a_missing_file_blocks_and_is_named(ask: Callable[..., Estimate], full: Plan) -> None:
    gone = replace(full.models, video_vae=Path("/nowhere/vae.safetensors"))
    found = ask(gpu(141), plan=replace(full, models=gone))
    assert found.verdict == "no"
    assert found.blocked.startswith("/nowhere/vae.safetensors is not there")
    assert found.vram.verdict == "unknown" and found.vram.needed is None


def test_a_file_of_another_model_is_named_as_what_it_is(
    ask: Callable[..., Estimate], full: Plan
) -> None:
    swapped = replace(full.models, dit=full.models.audio_vae)
    found = ask(gpu(141), plan=replace(full, models=swapped))
    assert "holds H3 audio VAE, the plan names it as its dit" in found.blocked


def test_files_say_family_size_and_stored_format(ask: Callable[..., Estimate]) -> None:
    dit = ask(gpu(141)).files[0]
    assert (dit.family, dit.bytes) == ("MiniMax H3 DiT", 12_528_636_800)
    assert dit.stored.startswith("nvfp4 in 200 layers, the rest")


def test_an_unreadable_reference_blocks_and_leaves_the_rows_unknown(
    ask: Callable[..., Estimate],
) -> None:
    bad = ReferencePlan(index=0, label="", kind="image", name="a.png", problem="a.png is broken")
    found = ask(gpu(141), measured=replace(MEASURED, references=(bad,)))
    assert found.blocked == "a.png is broken"
    assert found.rows.total is None
    assert (found.rows.video, found.rows.audio) == (37 * 30 * 17, 414)


def test_a_full_disk_blocks(ask: Callable[..., Estimate]) -> None:
    found = ask(gpu(141), disk_free=1 << 20)
    assert found.disk.verdict == "no" and found.blocked == found.disk.reason


def test_a_backend_that_cannot_run_here_needs_force(ask: Callable[..., Estimate]) -> None:
    found = ask(gpu(141), unavailable=("sage2 cannot run here: it is not built.",))
    assert found.needs_force == found.warnings[0] == "sage2 cannot run here: it is not built."


def test_time_is_told_by_history_alone(ask: Callable[..., Estimate]) -> None:
    assert ask(gpu(141)).time.needed is None
    past = Past(typical=Typical(before=2.0, denoise=30.0, after=5.0, load=6.0))
    assert ask(gpu(141), past=past).time.needed == 43.0
    assert ask(gpu(141), past=past, loaded=True).time.needed == 37.0


def test_a_plan_of_the_cpu_takes_ram_and_no_vram(ask: Callable[..., Estimate], full: Plan) -> None:
    machine = Machine(ram_total=48 * GIB, ram_used=20 * GIB)
    found = ask(machine, plan=replace(full, device="cpu"))
    assert found.vram.verdict == "fits"
    assert found.ram.verdict == "no" and found.needs_force == found.ram.reason


def test_the_machine_is_what_cuda_sees_of_the_telemetry() -> None:
    facts = {"name": "A", "compute": "9.0"}
    info = {
        "gpus": [facts | {"cuda": None}, facts | {"cuda": 1, "name": "B"}, facts | {"cuda": 0}],
        "reason": "",
        "driver": "580",
    }
    row = {"mem_total": 10, "mem_used": 1, "unified": False, "lost": False}
    sample = {"gpus": [row, row | {"mem_total": None}, row], "ram_total": 5, "ram_used": 2}
    machine = machine_of(info, sample, engine_loaded=False)
    assert [(g.name, g.total) for g in machine.gpus] == [("A", 10), ("B", None)]
    assert machine.name == "A, B 580"


def test_a_lost_gpu_is_no_gpu() -> None:
    info = {"gpus": [{"name": "A", "compute": "", "cuda": 0}], "reason": "", "driver": ""}
    sample = {"gpus": [{"lost": True}], "ram_total": 5, "ram_used": 2}
    assert machine_of(info, sample, engine_loaded=False).gpus == ()


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "boat.png"
    pixels = np.random.default_rng(0).integers(0, 256, (1080, 1920, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_a_child_measures_what_a_run_will_pack(picture: Path) -> None:
    request = replace(REQUEST, references=(Reference(kind="image", path=picture),))
    found = Measurer().measure(request, None)
    (one,) = found.references
    assert (one.width, one.height, one.label) == (960, 544, "Picture 1")
    assert one.notes == ("1920x1080 -> 960x544 pixels",)
    assert one.rows == 30 * 17
    assert found.total == found.text + one.rows + 414 + 37 * 30 * 17


def test_a_measured_request_is_remembered_until_its_file_changes(picture: Path) -> None:
    measurer = Measurer()
    request = replace(REQUEST, references=(Reference(kind="image", path=picture),))
    first = measurer.measure(request, None)
    assert measurer.measure(replace(request, seed=1, steps=3), None) is first
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(picture)
    assert measurer.measure(request, None).references[0].width == 64


def test_a_file_that_is_no_picture_is_a_problem_of_that_reference(tmp_path: Path) -> None:
    path = tmp_path / "words.png"
    path.write_text("no picture")
    request = replace(REQUEST, references=(Reference(kind="image", path=path),))
    assert "words.png" in Measurer().measure(request, None).references[0].problem


def test_the_demo_plan_fits_everywhere(ask: Callable[..., Estimate]) -> None:
    plan = presets.load_plan(presets.find("plans", "cpu"))
    machine = Machine(ram_total=4 * GIB, ram_used=GIB)
    found = ask(machine, plan=plan, request=replace(REQUEST, width=96, height=64, frames=22))
    assert found.verdict == "fits"


def test_bytes_are_written_as_a_person_reads_them() -> None:
    assert needs.gib(36.25 * GIB) == "36.2 GiB"
    assert needs.gib(5 * (1 << 20)) == "5 MiB"
