"""The ComfyUI capture node against a fake of the interfaces it uses (h3_contract.md 3.6).

The fake plays a stored golden back: its sampler, model and latents are ComfyUI's own tensors, so
what the nodes save must be that golden again.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from runtime.parity.comfy_node import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from runtime.parity.comfy_node.golden_file import digest
from runtime.parity.comfy_node.graph import finite, settings
from runtime.parity.comfy_node.nodes import H3GoldenRecord, H3GoldenSave
from runtime.parity.comfy_node.recorder import Recording, watch
from runtime.parity.golden import Golden

GOLDENS = Path(__file__).parents[1] / "goldens"


class Nested:
    """ComfyUI's container of two latents."""

    is_nested = True

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def unbind(self) -> list[Tensor]:
        return self.tensors


class Model:
    """The part of ComfyUI's ModelPatcher that a wrapper needs."""

    def __init__(self, network: Callable[..., Any]) -> None:
        self.network = network
        self.wrappers: dict[tuple[str, str], Callable[..., Any]] = {}

    def clone(self) -> Model:
        other = Model(self.network)
        other.wrappers = dict(self.wrappers)
        return other

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Callable[..., Any]) -> None:
        self.wrappers[kind, key] = wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.network
        for wrapper in self.wrappers.values():
            run = _bound(wrapper, run)
        return run(*args, **kwargs)


def _bound(wrapper: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: wrapper(inner, *args, **kwargs)


class Playback:
    """A SAMPLER whose every tensor comes from a golden, written into afterwards as ComfyUI does."""

    sampler_function = SimpleNamespace(__name__="sample_euler")
    other = "an attribute of the sampler"

    def __init__(self, golden: Golden, *, nested: bool = True) -> None:
        self.golden, self.nested = golden, nested

    def network(self, x: list[Tensor], timestep: Tensor, context: Tensor, **kwargs: Any) -> Any:
        side = ("pos", "neg")[kwargs["transformer_options"]["cond_or_uncond"][0]]
        prefix = f"step_{int(timestep):02d}/net_{side}"
        velocities = [self.golden.tensor(f"{prefix}/{v}") for v in ("v_video", "v_audio")]
        x[1].zero_()  # the network owns its inputs
        return velocities

    def pack(self, video: Tensor, audio: Tensor) -> Any:
        if self.nested:
            return Nested([video, audio])
        return torch.cat([video.reshape(1, 1, -1), audio.reshape(1, 1, -1)], dim=-1)

    def sample(
        self,
        model_wrap: Model,
        sigmas: Tensor,
        extra_args: dict[str, Any],
        callback: Callable[..., Any],
        noise: Any,
        latent_image: Any = None,
        denoise_mask: Any = None,
        disable_pbar: bool = False,
    ) -> Any:
        golden, sides = self.golden, ("pos", "neg")
        for step in range(len(sigmas) - 1):
            prefix = f"step_{step:02d}"
            pair = [golden.tensor(f"{prefix}/x_{n}") for n in ("video", "audio")]
            denoised = [golden.tensor(f"{prefix}/denoised_{n}") for n in ("video", "audio")]
            for index, side in enumerate(sides):
                if f"{prefix}/net_{side}/v_video" not in golden:
                    continue
                audio_in = golden.tensor(f"{prefix}/net_{side}/audio_in")
                model_wrap(
                    [pair[0].clone(), audio_in],
                    torch.tensor([float(step)]),
                    golden.tensor(f"layout/{side}/context_refined"),
                    transformer_options={"cond_or_uncond": [index]},
                    minimax_payload={"latent": torch.zeros(1, 24, 9, 9, 9)},
                )
            x = self.pack(*pair)
            callback(step, self.pack(*denoised), x, len(sigmas) - 1)
            for part in (*pair, *denoised):
                part.zero_()
        return self.pack(golden.tensor("final/video"), golden.tensor("final/audio"))


def conditioning(golden: Golden, side: str) -> list[Any]:
    """ComfyUI's CONDITIONING of a side."""
    extra: dict[str, Any] = {"minimax_token_tags": golden.tensor(f"cond/{side}/token_tags")}
    refs = golden.header["conditioning"][side]["refs"]
    extra["minimax_refs"] = [dict(block) for block in refs]
    for i, block in enumerate(extra["minimax_refs"]):
        for part in ("latent", "audio_latent"):
            if f"cond/{side}/ref_{i}/{part}" in golden:
                block[part] = golden.tensor(f"cond/{side}/ref_{i}/{part}")
    return [[golden.tensor(f"cond/{side}/context"), extra]]


@pytest.fixture
def comfy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ComfyUI's own module that knows the output folder."""
    paths = SimpleNamespace(get_output_directory=lambda: str(tmp_path))
    monkeypatch.setitem(sys.modules, "folder_paths", paths)
    return tmp_path


GRAPH = {
    "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "h3_tiny_pruned_bf16.safetensors"}},
    "2": {"class_type": "PrimitiveInt", "inputs": {"value": 2}},
    "3": {"class_type": "BasicScheduler", "inputs": {"scheduler": "simple", "steps": ["2", 0]}},
    "4": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
    "5": {"class_type": "MiniMaxH3ReferenceToVideo", "inputs": {"prompt": "A hat.", "seed": None}},
    "6": {
        "class_type": "SamplerCustomAdvanced",
        "inputs": {"model": ["1", 0], "sigmas": ["3", 0], "sampler": ["4", 0], "x": ["5", 0]},
    },
    "7": {"class_type": "H3GoldenSave", "inputs": {"latent": ["6", 0], "case": "mine"}},
    "8": {"class_type": "Other", "inputs": {"scheduler": "beta"}},
}


def record(golden: Golden, *, nested: bool = True) -> tuple[Recording, Any]:
    """Runs the fake sampler with both recorders in place; the recording and the samples."""
    playback = Playback(golden, nested=nested)
    model, sampler, recording = H3GoldenRecord().record(Model(playback.network), playback)
    noise = playback.pack(golden.tensor("noise/video"), golden.tensor("noise/audio"))
    seed = {"seed": golden.params["seed"]}
    samples = sampler.sample(model, golden.tensor("sigmas"), seed, None, noise)
    return recording, samples


def save(golden: Golden, recording: Recording, **more: Any) -> Golden:
    """The file that the save node writes, read back."""
    pair = Nested([golden.tensor("final/video"), golden.tensor("final/audio")])
    told = H3GoldenSave().save(
        recording, {"samples": pair}, conditioning(golden, "pos"), "mine", **more
    )
    return Golden(Path(told["result"][0]))


@pytest.fixture
def golden() -> Golden:
    return Golden(GOLDENS / "unit_pruned_fp32.safetensors")


@pytest.mark.parametrize("nested", [True, False], ids=["nested pairs", "flat packs"])
def test_what_a_run_showed_is_saved_bit_for_bit(golden: Golden, comfy: Path, nested: bool) -> None:
    saved = save(golden, record(golden, nested=nested)[0])
    steps = [f"step_{k:02d}/{n}" for k in range(2) for n in ("x_video", "denoised_audio")]
    nets = [f"step_{k:02d}/net_pos/{n}" for k in range(2) for n in ("audio_in", "v_video")]
    for name in (*steps, *nets, "noise/audio", "sigmas", "final/video", "cond/pos/ref_0/latent"):
        assert torch.equal(saved.tensor(name), golden.tensor(name)), name
    assert saved.names <= golden.names


def test_the_header_tells_how_to_run_it_again(golden: Golden, comfy: Path) -> None:
    picture = golden.tensor("in/ref_image_0").float() / 255
    sound = {"waveform": golden.tensor("in/ref_audio_0"), "sample_rate": 32000}
    media = {"ref_image_0": picture, "ref_audio_0": sound}
    saved = save(golden, record(golden)[0], graph=GRAPH, node="7", **media)
    params = saved.params
    assert (params["sampler"], params["scheduler"], params["steps"]) == ("euler", "simple", 2)
    assert (params["width"], params["height"], params["length"]) == (32, 64, 5)
    assert (params["mode"], params["compute"], params["prompt"]) == ("ref2va", "fp32", "A hat.")
    assert params["seed"] == golden.params["seed"] and params["from_prompt"] is True
    assert torch.equal(saved.tensor("in/ref_image_0"), golden.tensor("in/ref_image_0"))
    assert saved.header["environment"]["torch"] == torch.__version__
    assert (
        saved.header["conditioning"]["pos"]["refs"] == golden.header["conditioning"]["pos"]["refs"]
    )


def test_without_its_references_a_run_starts_from_the_conditioning(
    golden: Golden, comfy: Path
) -> None:
    saved = save(golden, record(golden)[0], graph=GRAPH, node="7")
    assert saved.params["from_prompt"] is False


def test_a_picture_between_8_bit_steps_is_refused(golden: Golden, comfy: Path) -> None:
    with pytest.raises(RuntimeError, match="ref_image_0 holds values between 8-bit steps"):
        save(golden, record(golden)[0], ref_image_0=torch.full((1, 8, 8, 3), 0.5))
    assert list(comfy.rglob("*")) == []


def test_sounds_and_sounding_videos_are_described_with_their_rate(
    golden: Golden, comfy: Path
) -> None:
    sound = {"waveform": torch.ones(1, 2, 640), "sample_rate": 48000}
    saved = save(
        golden,
        record(golden)[0],
        ref_video_0=torch.zeros(5, 32, 32, 3),
        ref_video_audio_0=sound,
        ref_audio_1=sound,
    )
    assert saved.params["ref_videos"][0]["audio"]["sr"] == 48000
    assert saved.params["ref_audios"] == [{"channels": 2, "samples": 640, "sr": 48000}]
    assert saved.tensor("in/ref_video_audio_0").shape == (1, 2, 640)


def test_the_negative_side_is_told_apart(comfy: Path) -> None:
    recording = Recording()
    pair = [torch.ones(1, 24, 1, 2, 2), torch.ones(1, 32, 2, 3)]
    model = watch(Model(lambda *args, **kwargs: [-pair[0], -pair[1]]), recording)
    for index in (0, 1):
        model(pair, torch.ones(1), torch.ones(1, 2, 8), {"cond_or_uncond": [index]})
    assert {n for n in recording.names if n.endswith("v_audio")} == {
        "step_00/net_pos/v_audio",
        "step_00/net_neg/v_audio",
    }


def test_a_second_run_starts_the_recording_afresh(golden: Golden) -> None:
    playback = Playback(golden)
    model, sampler, recording = H3GoldenRecord().record(Model(playback.network), playback)
    noise = playback.pack(golden.tensor("noise/video"), golden.tensor("noise/audio"))
    for seed in (1, 2):
        sampler.sample(model, golden.tensor("sigmas"), {"seed": seed}, None, noise)
    assert (recording.seed, recording.steps) == (2, 2)


def test_recording_changes_neither_the_samples_nor_the_model_nor_the_callback(
    golden: Golden,
) -> None:
    playback, seen = Playback(golden), []
    given = Model(playback.network)
    model, sampler, _ = H3GoldenRecord().record(given, playback)
    noise = playback.pack(golden.tensor("noise/video"), golden.tensor("noise/audio"))

    def callback(step: int, denoised: Any, x: Any, total: int) -> None:
        seen.append((step, total))

    samples = sampler.sample(model, golden.tensor("sigmas"), {}, callback, noise)
    assert torch.equal(samples.tensors[0], golden.tensor("final/video"))
    assert seen == [(0, 2), (1, 2)] and given.wrappers == {}
    assert sampler.other == "an attribute of the sampler"


def test_a_start_latent_is_kept_and_zeros_are_not(golden: Golden) -> None:
    recording = Recording()
    pair = [torch.zeros(1, 24, 1, 2, 2), torch.zeros(1, 32, 2, 3)]
    recording.start(torch.ones(2), Nested(pair), Nested(pair), None)
    recording.finish()
    assert set(recording.names) == {"sigmas", "noise/video", "noise/audio"}
    recording.start(torch.ones(2), Nested(pair), Nested([pair[0] + 1, pair[1]]), None)
    recording.finish()
    assert "init_latent/video" in recording.names


def test_another_model_is_refused_with_the_shapes_it_showed() -> None:
    model = watch(Model(lambda x, t: x), Recording())
    with pytest.raises(RuntimeError, match=r"no video latent .*\(1, 4, 8, 8\)"):
        model(torch.ones(1, 4, 8, 8), torch.ones(1))


def test_saving_before_anything_was_recorded_says_what_to_connect(comfy: Path) -> None:
    pair = Nested([torch.ones(1, 24, 1, 2, 2), torch.ones(1, 32, 2, 3)])
    with pytest.raises(RuntimeError, match="nothing was recorded; take model and sampler"):
        H3GoldenSave().save(Recording(), {"samples": pair}, [[torch.ones(1, 2, 8), {}]], "x")


def test_settings_come_from_upstream_nodes_only() -> None:
    told = settings(GRAPH, "7")
    assert told["scheduler"] == "simple" and told["steps"] == 2
    assert "seed" not in told
    assert settings(None, "7") == {}


def test_the_digest_covers_what_the_file_holds(golden: Golden, comfy: Path) -> None:
    saved = save(golden, record(golden)[0])
    with safe_open(str(saved.path), framework="pt") as file:
        header = json.loads(file.metadata()["header"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert header["content_sha256"] == digest(tensors)
    assert header["content_sha256"] != digest(tensors | {"sigmas": tensors["sigmas"] + 1})


def test_the_nodes_declare_what_comfyui_reads() -> None:
    assert set(NODE_CLASS_MAPPINGS) == set(NODE_DISPLAY_NAME_MAPPINGS)
    for node in NODE_CLASS_MAPPINGS.values():
        inputs = node.INPUT_TYPES()
        assert callable(getattr(node, node.FUNCTION))
        assert len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
        assert all(isinstance(kind[0], str) for kind in inputs["required"].values())
    given = H3GoldenSave.INPUT_TYPES()
    assert sum(name.startswith("ref_image_") for name in given["optional"]) == 9


def test_the_folder_stands_alone_where_comfyui_puts_it(tmp_path: Path) -> None:
    """ComfyUI loads a folder of custom_nodes under a name of its own, without our checkout."""
    folder = tmp_path / "custom_nodes" / "h3 golden-capture"
    shutil.copytree(
        Path(__file__).parents[2] / "runtime" / "parity" / "comfy_node",
        folder,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    load = (
        "import importlib.util as u,sys\n"
        f"s=u.spec_from_file_location('any_name', {str(folder / '__init__.py')!r},"
        f" submodule_search_locations=[{str(folder)!r}])\n"
        "m=u.module_from_spec(s); sys.modules['any_name']=m; s.loader.exec_module(m)\n"
        "print(sorted(m.NODE_CLASS_MAPPINGS), 'runtime' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", load], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.split("\n")[0] == "['H3GoldenRecord', 'H3GoldenSave'] False"


class Bare:
    """A container of latents that has nothing but unbind."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._held = tensors

    def unbind(self) -> tuple[Tensor, ...]:
        return tuple(self._held)


PAIR = (torch.ones(1, 24, 1, 2, 2), torch.ones(1, 32, 2, 3))


@pytest.mark.parametrize("pack", [list, tuple, Nested, Bare])
@pytest.mark.parametrize("named", [False, True], ids=["by place", "by name"])
def test_the_network_may_get_its_latents_in_any_container(pack: Any, named: bool) -> None:
    recording = Recording()

    def network(x: Any, *rest: Any, **more: Any) -> Any:
        for part in x if isinstance(x, list | tuple) else x.unbind():
            part.zero_()  # the network owns its inputs
        return pack([torch.full_like(part, -1) for part in PAIR])

    options = {"cond_or_uncond": [0], "held": torch.ones(1, 24, 3, 3, 3)}
    given: dict[str, Any] = {
        "x": pack([part.clone() for part in PAIR]),
        "timestep": torch.ones(1),
        "context": torch.ones(1, 2, 8),
        "transformer_options": options,
        "minimax_payload": {"refs": [torch.zeros(1, 24, 9, 9, 9)]},
    }
    model = watch(Model(network), recording)
    model(**given) if named else model(*given.values())
    assert torch.equal(recording.names["step_00/net_pos/audio_in"], PAIR[1])
    assert torch.equal(recording.names["step_00/net_pos/v_video"], -PAIR[0])
    assert recording.names["layout/pos/context_refined"].shape == (1, 2, 8)


def test_shifts_come_from_the_options_of_the_calls(golden: Golden, comfy: Path) -> None:
    """Of a sigma shift node whose numbers other nodes compute, the graph does not tell them."""
    recording = record(golden)[0]
    shifts = {"minimax_h3_sigma_shift_video": 7.0, "minimax_h3_sigma_shift_audio": 2.0}
    model = watch(Model(lambda *args: list(PAIR)), recording)
    names = dict(recording.names)
    model(list(PAIR), torch.ones(1), torch.ones(1, 2, 8), {"cond_or_uncond": [0], **shifts})
    recording.names = names
    graph = {**GRAPH, "9": {"inputs": {"shift_video": ["2", 0]}}}
    assert save(golden, recording, graph=graph, node="7").params["shift"] == [7.0, 2.0]


def test_a_lora_is_told_by_the_patches_of_the_model(golden: Golden, comfy: Path) -> None:
    model = Model(lambda *args: list(PAIR))
    recording = record(golden)[0]
    assert save(golden, recording).params["patched_weights"] == 0
    patched = Model.clone(model)
    patched.clone = lambda: patched  # type: ignore[method-assign]
    patched.patches = {"blocks.0.attn.q.weight": [1]}  # type: ignore[attr-defined]
    watch(patched, recording)
    assert save(golden, recording).params["patched_weights"] == 1


def test_keyframes_start_from_the_conditioning(golden: Golden, comfy: Path) -> None:
    frame = {"resolved_frame_index": 0, "latent": PAIR[0], "audio_latent": None}
    extra = {"minimax_token_tags": torch.ones(2), "minimax_keyframes": [frame]}
    told = H3GoldenSave().save(
        record(golden)[0],
        {"samples": Nested([golden.tensor("final/video"), golden.tensor("final/audio")])},
        [[torch.ones(1, 2, 8), extra]],
        "mine",
        graph=GRAPH,
        node="7",
    )
    saved = Golden(Path(told["result"][0]))
    assert saved.params["prompt"] == "A hat." and saved.params["from_prompt"] is False
    assert saved.header["conditioning"]["pos"]["keyframes"][0]["resolved_frame_index"] == 0


def test_references_are_counted_without_gaps(golden: Golden, comfy: Path) -> None:
    sound = {"waveform": torch.ones(1, 2, 640), "sample_rate": 48000}
    media = {
        "ref_image_1": torch.zeros(1, 32, 32, 4),
        "ref_video_0": None,
        "ref_video_audio_0": sound,
        "ref_video_2": torch.ones(5, 32, 32, 3),
        "ref_video_audio_2": sound,
        "ref_audio_2": sound,
    }
    saved = save(golden, record(golden)[0], **media)
    inputs = {name for name in saved.names if name.startswith("in/")}
    names = ("ref_image_0", "ref_video_0", "ref_video_audio_0", "ref_audio_0")
    assert inputs == {f"in/{name}" for name in names}
    assert saved.tensor("in/ref_image_0").shape == (1, 32, 32, 3)
    assert saved.params["ref_videos"][0]["audio"]["sr"] == 48000


def test_a_negative_side_must_be_connected_and_an_unused_one_is_left_out(
    golden: Golden, comfy: Path
) -> None:
    recording = record(golden)[0]
    unused = save(golden, recording, negative=conditioning(golden, "pos"))
    assert "cond/neg/context" not in unused.names
    recording.names["step_00/net_neg/v_audio"] = PAIR[1]
    with pytest.raises(RuntimeError, match="connect the guider's negative conditioning"):
        save(golden, recording)


def test_an_interrupted_sampling_is_not_saved(golden: Golden, comfy: Path) -> None:
    recording = Recording()
    recording.start(torch.ones(3), Nested(list(PAIR)), None, 1)
    recording.step(0, Nested(list(PAIR)), Nested(list(PAIR)))
    with pytest.raises(RuntimeError, match="ended after 1 steps without a result"):
        save(golden, recording)
    assert list(comfy.rglob("*")) == []


@pytest.mark.parametrize("carried", [True, False])
def test_the_sound_of_a_start_latent_is_kept_in_its_own_scale(carried: bool) -> None:
    """ComfyUI multiplies it by the ratio of the shifts before the sampler sees it."""
    recording, start, noise = Recording(), PAIR[1] * 0.5, PAIR[1] * 0.25
    given = start * 4 if carried else start
    recording.start(torch.tensor([0.5, 0.0]), Nested([PAIR[0], noise]), Nested([PAIR[0], given]), 1)
    recording.step(0, Nested(list(PAIR)), Nested([PAIR[0], 0.5 * noise + 0.5 * start * 4]))
    recording.finish()
    assert torch.equal(recording.names["init_latent/audio"], start)


def test_a_noise_mask_is_refused_and_one_that_masks_nothing_is_not(golden: Golden) -> None:
    playback = Playback(golden)
    model, sampler, _ = H3GoldenRecord().record(Model(playback.network), playback)
    noise = playback.pack(golden.tensor("noise/video"), golden.tensor("noise/audio"))
    sigmas = golden.tensor("sigmas")
    sampler.sample(model, sigmas, {}, None, noise, None, Nested(list(PAIR)))
    with pytest.raises(RuntimeError, match="has a noise mask"):
        sampler.sample(model, sigmas, {}, None, noise, None, denoise_mask=PAIR[0] * 0)


def test_the_guider_tells_its_cfg(golden: Golden, comfy: Path) -> None:
    playback = Playback(golden)
    model, sampler, recording = H3GoldenRecord().record(Model(playback.network), playback)
    model.cfg = 1
    noise = playback.pack(golden.tensor("noise/video"), golden.tensor("noise/audio"))
    sampler.sample(model, golden.tensor("sigmas"), {}, None, noise)
    graph = {**GRAPH, "7": {"inputs": {"cfg": 3.0}}}
    assert save(golden, recording, graph=graph, node="7").params["cfg"] == 1.0


def test_a_sampler_can_be_copied(golden: Golden) -> None:
    _, sampler, _ = H3GoldenRecord().record(Model(lambda: None), Playback(golden))
    assert copy.copy(sampler).other == "an attribute of the sampler"


def test_a_setting_that_the_nearest_node_gets_from_another_is_not_taken_from_a_third() -> None:
    graph = {
        "1": {"inputs": {"prompt": "Improve this.", "seed": 5}},
        "2": {"inputs": {"prompt": ["1", 0]}},
        "3": {"inputs": {"positive": ["2", 0]}},
    }
    assert settings(graph, "3") == {"seed": 5}


def test_what_comfyui_marks_as_changed_is_json() -> None:
    assert finite({"1": {"is_changed": [float("nan")], "x": 1.5}}) == {
        "1": {"is_changed": ["nan"], "x": 1.5}
    }
