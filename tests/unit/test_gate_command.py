"""launch.py gate: sentences for bad input, statuses, JSON, the page, a class for every backend."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import launch
from runtime.parity import gate_classes, gate_plans
from runtime.parity.gate_cases import golden_cases, random_denoiser
from runtime.parity.gate_classes import (
    BACKEND_FIELDS,
    EXACT,
    NO_BACKEND,
    OPTIONS,
    OUTSIDE,
    backends,
    class_of,
    classes,
    classes_of,
    differing,
)
from runtime.parity.gate_pages import markdown, slug
from runtime.parity.gate_report import fields_of, options_of
from tests.denoiser_parts import FILES, demo_plan

GOLDENS = Path(__file__).parents[1] / "goldens"
BASE = gate_plans.default_plan()
SMALL = 'width = 64\nheight = 64\nframes = 22\nsteps = 2\nprompt = ""\n'


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


def plan_file(folder: Path, **fields: str) -> Path:
    path = folder / f"{'_'.join(fields.values()) or 'plain'}.toml"
    values = {"device": "cpu", "dtype": "fp32"} | fields
    lines = [f'{name} = "{value}"' for name, value in values.items()]
    path.write_text("\n".join([*lines, "[models]", f'dit = "{FILES.dit}"']), encoding="utf-8")
    return path


def gate(*options: str | Path) -> int:
    return launch.main(["gate", *map(str, options)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--plan is missing; name a plan, or give --all"),
        (("--plan", "cpu"), "--against is missing; the correctness baseline of cpu here would be"),
        (("--all", "--against", "cpu"), "leave out --against"),
        (("--all", "--only", "sdpa"), "--only sdpa: the lossy backends are sage1"),
        (("--plan", "cpu", "--only", "sage2"), "give both"),
        (("--plan", "cpu", "--set", "colour=red"), "--set colour=red: give FIELD=VALUE"),
        (("--plan", "cpu", "--set", "sol_tau=red"), "sol_tau must be float"),
        (("--plan", "cpu", "--set", "dtype=fp5"), "dtype must be one of"),
        (("--plan", "cpu", "--against", "cpu", "--request", "demo"), "need --text-rows N"),
        (("--plan", "cpu", "--against", "cpu", "--text-rows", "0"), "text rows must be 1 to"),
        (("--plan", "cpu", "--against", "nowhere"), "there is no plan nowhere"),
        (("--plan", "h200x1_sdpa", "--against", "cpu"), "torch sees no CUDA device here"),
        (("--plan", "cpu", "--against", "cpu", "--steps", "-1"), "--steps is -1"),
        (("--plan", "cpu", "--against", "cpu", "--goldens", "/no"), "/no does not exist"),
        (("--plan", "cpu", "--against", "cpu", "--json", "/no/a.json"), "make it first"),
        (
            ("--plan", "cpu", "--against", "cpu", "--text-rows", "9", "--random", "fp5"),
            "--random must be one of pruned_nvfp4",
        ),
        (
            ("--plan", "cpu", "--against", "cpu", "--text-rows", "9", "--request", "nowhere"),
            "there is no request nowhere",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(*options) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert told.err.count("\n") == 1


def test_equal_plans_pass_with_figures_page_and_last_json_line(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out, page = plan_file(tmp_path), tmp_path / "gate.json", tmp_path / "gate.md"
    status = gate(
        *("--plan", plan, "--against", plan, "--request", small, "--text-rows", "7"),
        *("--json", out, "--markdown", page, "--runs", tmp_path / "runs"),
    )
    assert status == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["status"], last["worst"]) == ("passed", {"video": 0.0, "audio": 0.0})
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found["results"][0]["steps"]) == 2
    assert "says nothing about pictures" in page.read_text(encoding="utf-8")
    assert not (tmp_path / "runs").exists()  # plans that differ in no backend


def test_a_failing_gate_has_status_1_and_says_where(
    tmp_path: Path,
    small: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strict = {name: replace(one, bf16=1e-5) for name, one in classes().items()}
    monkeypatch.setattr(gate_classes, "classes", lambda: strict)
    p, q = plan_file(tmp_path, dtype="bf16"), plan_file(tmp_path)
    options = ("--request", small, "--text-rows", "7", "--runs", tmp_path / "runs")
    assert gate("--plan", p, "--against", q, *options) == 1
    told = capsys.readouterr().out
    assert told.count("BEYOND: video, audio") == 2
    assert json.loads(told.splitlines()[-1])["status"] == "failed"


def test_an_unavailable_backend_has_status_2_and_a_file_for_the_console(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    p, q = plan_file(tmp_path, attention="sdpa_cudnn"), plan_file(tmp_path)
    options = ("--request", small, "--text-rows", "7", "--runs", tmp_path / "runs")
    assert gate("--plan", p, "--against", q, *options) == 2
    assert "it needs a CUDA device" in capsys.readouterr().out
    kept = json.loads((tmp_path / "runs/gate/cpu_attention_sdpa_cudnn.json").read_bytes())
    assert kept["status"] == "unavailable"
    page = markdown([kept], "title")
    assert "| `sdpa_cudnn` | attention | plain | | 0 |" in page
    assert "it needs a CUDA device" in page


def test_a_backend_that_the_checkpoint_does_not_use_has_status_2_as_the_help_says(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    p, q = plan_file(tmp_path, nvfp4="nvfp4_native"), plan_file(tmp_path)
    options = ("--request", small, "--text-rows", "7", "--runs", tmp_path / "runs")
    assert gate("--plan", p, "--against", q, *options) == 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["status"] == "not exercised"
    with pytest.raises(SystemExit):
        gate("--help")
    assert "exit status: 0 passed; 1 failed; 2 bad input, or" in capsys.readouterr().out


def test_the_baseline_is_taken_only_when_it_is_asked_for(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    p = plan_file(tmp_path, attention="sage2", dtype="bf16")
    options = ("--request", small, "--text-rows", "7", "--runs", tmp_path / "runs")
    assert gate("--plan", p, *options) == 2
    assert (
        "attention sdpa (sage2 cannot run here: it is what is compared)" in capsys.readouterr().err
    )
    assert gate("--plan", p, "--against", "baseline", *options) in (0, 1)


def test_goldens_bring_their_ref2va_requests_with_both_sides(tiny_checkpoints: Path) -> None:
    cases = {case.name: case for case in golden_cases(GOLDENS, 0)}
    assert not any(name.startswith(("t2va", "fl2va", "guide")) for name in cases)
    guided = cases["ref2va_1img_22f_cfg4_textneg"]
    assert guided.negative is not None
    assert (guided.cfg, guided.num_steps) == (4.0, 5)
    assert cases["ref2va_1img_22f_res_beta_12_s440202_bf16"].num_steps == 12


def test_the_number_of_steps_can_be_given(tiny_checkpoints: Path) -> None:
    cases = golden_cases(GOLDENS / "ref2va_1img_22f_cfg4_textneg.safetensors", 3)
    assert [case.num_steps for case in cases] == [3]


def test_every_backend_that_a_plan_can_name_has_a_class() -> None:
    for field, names in gate_plans.by_field().items():
        for name in names:
            if name not in NO_BACKEND:
                assert class_of(field, name).name in classes(), name
    assert class_of("attention", "kj", "sageattn3").name == "fp4_attention"
    assert class_of("attention", "kj", "fp8_cuda").name == "int8_attention"


def test_every_lossy_backend_has_a_lossy_class_and_no_exact_one_has() -> None:
    for name, entry in backends().items():
        assert ("lossy" in entry) == (class_of("", name).name != EXACT), name


def test_every_limit_has_a_source_and_a_positive_number() -> None:
    for one in classes().values():
        assert len(one.source) > 20
        assert min(one.factor, one.bf16, one.fp32) > 0


def test_every_option_belongs_to_a_field_that_names_a_backend() -> None:
    plan = demo_plan()
    assert set(OPTIONS.values()) <= set(BACKEND_FIELDS)
    assert all(hasattr(plan, name) for name in (*OPTIONS, *BACKEND_FIELDS, *OUTSIDE))


def test_only_fields_that_the_checkpoint_uses_differ() -> None:
    p, q = demo_plan(nvfp4="nvfp4_native", video_vae_dtype="fp16"), demo_plan()
    assert differing(p, q, frozenset()) == ()
    assert differing(p, q, frozenset({"nvfp4"})) == ("nvfp4",)


def test_an_option_of_a_backend_counts_for_its_class() -> None:
    p, q = demo_plan(attention="sage2", sol_tau=0.5), demo_plan(attention="sage2")
    names = differing(p, q, frozenset())
    assert [one.name for one in classes_of(p, q, names)] == ["int8_attention"] * 2


def test_all_holds_attention_against_sage2_and_sage2_against_sdpa() -> None:
    found = {p.name: (p, q) for p, q in gate_plans.pairs(gate_plans.default_plan())}
    assert found["attention sage2"][1].attention == "sdpa"
    assert found["nvfp4 nvfp4_native"][1].attention == "sdpa"
    assert found["nvfp4 nvfp4_native"][1].nvfp4 == "nvfp4_dequant"
    others = [q.attention for p, q in found.values() if p.attention not in ("sdpa", "sage2")]
    assert set(others) <= {"sage2"}
    assert found["int8 int8_convrot"][1].int8 == "int8_dequant"
    assert gate_plans.alone() == []


def test_a_field_of_the_plan_can_be_set() -> None:
    plan = gate_plans.changed(demo_plan(), ["attention=sage2", "sol_tau=0.5", "cache_warmup=3"])
    assert (plan.attention, plan.sol_tau, plan.cache_warmup) == ("sage2", 0.5, 3)


def test_a_variant_is_named_by_its_option_though_the_reference_shares_it() -> None:
    found = [options_of(p, fields_of(p, q)) for p, q in gate_plans.pairs(BASE, ["kj", "sol"])]
    assert ["kj_mode sageattn3"] in found
    assert ["sol_sinks none"] in found
    assert len({tuple(options) for options in found}) == len(found) - 1  # two have none


def test_only_the_named_backends_are_taken() -> None:
    found = gate_plans.pairs(gate_plans.default_plan(), ["sage2", "fp8_native"])
    assert [p.name for p, _ in found] == ["attention sage2", "fp8 fp8_native"]


def test_random_weights_of_full_size_are_not_read_before_they_are_asked_for() -> None:
    checkpoint = random_denoiser("pruned_bf16")()
    assert checkpoint.shape("condition_proj.weight") == (5376, 5120)


def test_a_device_makes_a_file_name() -> None:
    assert slug("NVIDIA H200") == "nvidia_h200"


def test_runs_that_cannot_be_written_are_refused_before_anything_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    options = ["--plan", "cpu", "--against", "cpu", "--runs", str(tmp_path / "file")]
    assert launch.main(["gate", *options]) == 2
    assert capsys.readouterr().out == ""
