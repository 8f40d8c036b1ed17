"""What preflight finds in the models of an LTX plan by config.json and headers alone."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from app import doctor, licences, models, preflight
from app.console import Console
from runtime.checkpoints.header import RANDOM_WEIGHTS, read_header
from runtime.ltx.folders import AUDIO_VAE, VIDEO_VAE, VOCODER
from runtime.ltx.published import CONNECTORS
from runtime.ltx.tiny_components import ComponentFolders
from runtime.messages import Plan
from tests.consoles import client, demo_plan, ltx_console
from tests.ltx_plans import CONFIG, component, denoiser, folder, plan_of, text_encoder, zeros

JOBS, PREFLIGHT = "/api/v1/jobs", "/api/v1/preflight"
SMALL = {"family": "ltx", "prompt": "a calm sea", "width": 64, "height": 64, "frames": 9}
CHANNELS = CONFIG.in_channels
Change = Callable[[Path], object]


@pytest.fixture
def ltx(tmp_path: Path) -> Plan:
    return plan_of(tmp_path / "models", RANDOM_WEIGHTS)


def another(of: object, **options: object) -> Change:
    return lambda path: component(path, of, **options)  # type: ignore[arg-type]


def tower(**table: object) -> Change:
    return lambda path: text_encoder(path, **table)


def write(name: str, text: str) -> Change:
    return lambda path: (path / name).write_text(text)


def edit(**changes: object) -> Change:
    """Of config.json."""

    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(config))

    return change


STAGES = {
    "patch_size": 4,
    "patch_size_t": 1,
    "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
    "spatio_temporal_scaling": [True] * 4,
    "upsample_type": ["spatiotemporal", "spatiotemporal", "temporal", "spatial"],
    "decoder_spatio_temporal_scaling": [True] * 4,
}
THREE = {"upsample_type": STAGES["upsample_type"][:3], "decoder_spatio_temporal_scaling": True}


@pytest.mark.parametrize(
    ("role", "change", "words"),
    [
        ("video_vae", another(VOCODER), "'LTX2VocoderWithBWE', but the video VAE must be a Auto"),
        (
            "vocoder",
            another(AUDIO_VAE),
            "'AutoencoderKLLTX2Audio', but the vocoder must be a LTX2V",
        ),
        ("upsampler", another(VIDEO_VAE), "but the latent upsampler must be a LTX2LatentUpsampler"),
        (
            "audio_vae",
            text_encoder,
            "of class None, but the audio VAE must be a AutoencoderKLLTX2A",
        ),
        ("text_encoder", another(VIDEO_VAE), "of class AutoencoderKLLTX2Video, but the text enc"),
        (
            "text_encoder",
            edit(architectures=["Gemma3"]),
            "of class Gemma3, but the text encoder of",
        ),
        ("text_encoder", edit(architectures="Gemma3"), "of class Gemma3, but the text encoder of"),
        ("text_encoder", edit(architectures=3), "is of class 3, but the text encoder of LTX-2.5"),
        (
            "video_vae",
            lambda at: (at / "more.safetensors").symlink_to("/nowhere"),
            "more.safetensors does not exist; give",
        ),
        ("text_encoder", tower(hidden_size=8), "has hidden states of 8 channels, but the denoiser"),
        (
            "text_encoder",
            tower(num_hidden_layers=2),
            "of [64, 128], but tower and denoiser need [64, 96]",
        ),
        ("text_encoder", tower(bos_token_id=[2]), "must name one bos_token_id, got [2]"),
        ("text_encoder", edit(text_config=3), "says nothing of its text model"),
        ("text_encoder", edit(gemma_version="x"), "gemma4-12b-ltx-v1, but this one is x"),
        (
            "text_encoder",
            lambda at: (
                edit(gemma_version="")(at),
                zeros(at / "a.safetensors", {}, gemma_source_checkpoint="[" * 100_000),
            ),
            "gemma_source_checkpoint must be a JSON object (maximum recursion depth",
        ),
        ("text_encoder", lambda at: (at / "tokenizer.json").unlink(), "no tokenizer.json in"),
        (
            "text_encoder",
            lambda at: zeros(at / "model.safetensors", {"x": ("F32", (1,))}),
            "the pro",
        ),
        (
            "video_vae",
            another(VIDEO_VAE, latent_channels=8),
            "video VAE says latent_channels 8, but",
        ),
        (
            "video_vae",
            another(VIDEO_VAE, scaling_factor=2),
            "says scaling_factor 2, but LTX-2.5 has",
        ),
        ("video_vae", edit(**STAGES | THREE), "a decoder of 3 stages, but LTX-2.5 has 4"),
        ("video_vae", edit(**STAGES | {"patch_size": 2}), "samples by 16 in space and 8 in time"),
        ("video_vae", edit(**STAGES | {"upsample_type": 3}), "stages that do not fit together"),
        ("video_vae", write("config.json", "{"), "config.json cannot be read as JSON"),
        ("video_vae", write("config.json", "3"), "config.json must hold an object, got int"),
        (
            "video_vae",
            write("model.safetensors", "x"),
            "model.safetensors is not a safetensors file",
        ),
        (
            "video_vae",
            lambda at: (at / "config.json").unlink(),
            "has no config.json, which plan mine",
        ),
        (
            "vocoder",
            lambda at: (at / "model.safetensors").unlink(),
            "has no .safetensors file, which",
        ),
        (
            "vocoder",
            edit(output_sampling_rate=24000),
            "vocoder says output_sampling_rate 24000, but",
        ),
        ("audio_vae", edit(mel_bins=80), "audio VAE says mel_bins 80, but LTX-2.5 has 64"),
        (
            "audio_vae",
            lambda at: folder(at, {"_class_name": AUDIO_VAE.class_name}, latents_mean=(64,)),
            "has 64 statistics of the latents, but a packed audio token has 128",
        ),
        (
            "audio_vae",
            lambda at: folder(at, {"_class_name": AUDIO_VAE.class_name}, x=(1,)),
            "does not fit the audio VAE: latents_mean is missing",
        ),
        ("upsampler", edit(temporal_upsample=True), "latent upsampler says temporal_upsample True"),
        (
            "upsampler",
            edit(use_rational_resampler=True, rational_spatial_scale=1.5),
            "says rational_spatial_scale 1.5, but LTX-2.5 has 2.0",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_found_before_anything_is_loaded(
    ltx: Plan, role: str, change: Change, words: str
) -> None:
    preflight.check_models(ltx)
    change(getattr(ltx.models, role))
    with pytest.raises(ValueError) as refused:
        preflight.check_models(ltx)
    told = str(refused.value)
    assert words in told and "\n" not in told
    assert "change [models] in" in told
    (found,) = (file for file in models.look(ltx).files if file.problem)
    assert (found.role, found.problem, found.resident_bytes) == (role, told, 0)
    (finding,) = (f for f in doctor._checkpoints(ltx) if f.status == "fatal")
    assert f"{finding.text}; {finding.todo}" == told


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        (
            CONNECTORS,
            "dit.safetensors has no connectors (video_embeddings_connector, audio_embeddings_conn",
        ),
        (CONNECTORS[1], "tensors missing: audio_embeddings_connector.learnable_registers, audio_"),
    ],
)
def test_a_denoiser_without_connectors_is_found_before_anything_is_loaded(
    ltx: Plan, left_out: str | tuple[str, ...], words: str
) -> None:
    header = read_header(ltx.models.dit)
    kept = {n: (i.dtype, i.shape) for n, i in header.tensors.items() if not n.startswith(left_out)}
    zeros(ltx.models.dit, kept, **header.metadata)
    with pytest.raises(ValueError) as refused:
        preflight.check_models(ltx)
    told = str(refused.value)
    assert words in told and "\n" not in told
    (finding,) = (f for f in doctor._checkpoints(ltx) if f.status == "fatal")
    assert finding.text == told


def lock(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What chmod 000 is to a user; tests may run as root, who may enter all the same."""

    def closed(real: Callable[..., object]) -> Callable[..., object]:
        def asked(path: Path, *args: object, **options: object) -> object:
            if folder in path.parents or (real is listed and path == folder):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *args, **options)

        return asked

    listed = Path.iterdir
    for name in ("stat", "open", "iterdir"):
        monkeypatch.setattr(Path, name, closed(getattr(Path, name)))


@pytest.mark.parametrize("role", ["dit", "video_vae", "text_encoder", "tokenizer"])
def test_a_folder_that_may_not_be_entered_is_a_sentence(
    ltx: Plan, role: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = shutil.move(getattr(ltx.models, role) or text_encoder(tmp_path / "x"), tmp_path / "in")
    plan = replace(ltx, models=replace(ltx.models, **{role: Path(path)}))
    preflight.check_models(plan)
    lock(monkeypatch, tmp_path / "in" if role != "dit" else tmp_path)
    with pytest.raises(ValueError) as refused:
        preflight.check_models(plan)
    told = str(refused.value)
    assert "cannot be read (permission denied); allow it" in told and "change [models] in" in told
    assert any(file.problem == told for file in models.look(plan).files)


def test_weights_that_may_not_be_listed_are_not_said_to_be_missing(
    ltx: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = ltx.models.vocoder, Path.iterdir

    def listed(path: Path) -> Iterator[Path]:
        if path == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", listed)
    with pytest.raises(ValueError, match=r"vocoder cannot be read \(permission denied\)"):
        preflight.check_models(ltx)


def test_what_make_demo_writes_is_found_to_be_right(
    ltx: Plan, ltx_components: ComponentFolders
) -> None:
    parts = {role: getattr(ltx_components, role) for role in ("text_encoder", "video_vae")}
    parts |= {role: getattr(ltx_components, role) for role in ("audio_vae", "vocoder", "upsampler")}
    preflight.check_models(replace(ltx, models=replace(ltx.models, **parts)))


def test_a_version_that_is_null_is_none_that_differs(ltx: Plan) -> None:
    folder = ltx.models.text_encoder
    edit(gemma_version=None)(folder)
    preflight.check_models(ltx)
    zeros(folder / "a.safetensors", {}, gemma_source_checkpoint='{"gemma_version": null}')
    preflight.check_models(ltx)


def test_a_folder_is_not_judged_by_a_denoiser_that_cannot_be_used(ltx: Plan) -> None:
    other = replace(ltx, models=replace(ltx.models, dit=demo_plan().models.dit))
    assert [bool(file.problem) for file in models.look(other).files] == [True] + [False] * 5


def test_folders_are_looked_at_without_torch_and_without_a_tokenizer() -> None:
    code = (
        "import sys, app.preflight; print([n for n in ('torch', 'tokenizers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- REST


@pytest.fixture
def console(tmp_path: Path, ltx: Plan) -> Iterator[Console]:
    """With a plan under a licence."""
    licensed = denoiser(tmp_path / "licensed.safetensors", "LTX-2.x Community License")
    mine = replace(ltx, models=replace(ltx.models, dit=licensed), name="mine")
    with ltx_console(tmp_path / "runs", mine) as console:
        yield console


@pytest.fixture
def web(console: Console) -> TestClient:
    return client(console)


def test_nobody_acknowledges_a_licence_for_a_file_that_cannot_be_used(
    console: Console, web: TestClient
) -> None:
    body = {"request": SMALL, "plans": ["mine"], "force": True}
    assert web.post(JOBS, json=body).status_code == 428
    plan = console.planning.plans.get("mine")
    shutil.copy(demo_plan().models.dit, plan.models.dit)
    told = "licensed.safetensors holds MiniMax H3 DiT, the plan names it as its dit"
    queued = web.post(JOBS, json=body)
    assert queued.status_code == 400 and told in queued.json()["detail"]
    asked = web.post("/api/v1/licences", json={"licence": "ltx-2.x", "plan": "mine"})
    assert asked.status_code == 400 and told in asked.json()["detail"]
    states = {one["plan"]: one["state"] for one in web.get("/api/v1/licences").json()["plans"]}
    assert states["mine"] == "unknown"
    assert not (console.root / licences.FILE).exists()
    assert told in web.post(PREFLIGHT, json={"request": SMALL, "plan": "mine"}).json()["blocked"]


def test_a_wrong_folder_is_refused_before_the_licence_is_asked_for(
    console: Console, web: TestClient
) -> None:
    plan = console.planning.plans.get("mine")
    component(plan.models.upsampler, VIDEO_VAE)  # type: ignore[arg-type]
    queued = web.post(JOBS, json={"request": SMALL, "plans": ["mine"], "force": True})
    assert queued.status_code == 400
    assert "but the latent upsampler must be a" in queued.json()["detail"]
    (entry,) = (p for p in web.get("/api/v1/plans").json()["plans"] if p["name"] == "mine")
    assert not entry["runs"]


def test_a_plan_whose_models_may_not_be_seen_hides_no_other(
    console: Console, web: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = [p["name"] for p in web.get("/api/v1/plans").json()["plans"]]
    lock(monkeypatch, tmp_path / "models")
    plans = {p["name"]: p for p in web.get("/api/v1/plans").json()["plans"]}
    assert list(plans) == before and not plans["mine"]["runs"]
    told = "cannot be read (permission denied); allow it"
    found = web.post(PREFLIGHT, json={"request": SMALL, "plan": "mine"}).json()
    assert told in found["blocked"]
    queued = web.post(JOBS, json={"request": SMALL, "plans": ["mine"], "force": True})
    assert queued.status_code == 400 and told in queued.json()["detail"]
