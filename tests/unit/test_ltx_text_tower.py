"""The Gemma tower of LTX: tokens, hidden states, features, versions; what is no tower."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.checkpoints.header import CheckpointError
from runtime.ltx.demo import random_denoiser
from runtime.ltx.text_folder import check_gemma_versions, folder_gemma_version
from runtime.ltx.text_tower import TextTower, load_text_tower
from runtime.ltx.tiny_components import ComponentFolders

CPU, FP32 = torch.device("cpu"), torch.float32
DENOISER = random_denoiser("tiny", "bf16")
CONFIG = DENOISER.census.config
GEMMA = "gemma4-12b-ltx-v1"


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folders(ltx_components: ComponentFolders) -> ComponentFolders:
    return ltx_components


@pytest.fixture(scope="module")
def tower(folders: ComponentFolders) -> TextTower:
    return load_text_tower(folders.text_encoder, CONFIG, device=CPU, dtype=FP32)


def test_hidden_states_are_transformers_own_of_a_left_padded_prompt(
    folders: ComponentFolders, tower: TextTower
) -> None:
    from transformers import Gemma4UnifiedForConditionalGeneration

    states, mask = tower.hidden_states("  ab ")
    oracle = Gemma4UnifiedForConditionalGeneration.from_pretrained(
        folders.text_encoder, dtype=FP32, local_files_only=True
    )
    a = json.loads((folders.tokenizer / "tokenizer.json").read_text())["model"]["vocab"]["a"]
    ids = torch.tensor([[0] * 1021 + [2, a, a + 1]])
    assert torch.equal(mask, (ids > 0).long())
    out = oracle(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    assert len(out.hidden_states) == states.shape[-1] == 4
    for layer, state in enumerate(out.hidden_states):
        assert torch.equal(states[..., layer], state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_those_that_diffusers_hands_to_its_connectors(
    folders: ComponentFolders, dtype: torch.dtype
) -> None:
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    loaded = load_text_tower(folders.text_encoder, CONFIG, device=CPU, dtype=dtype)
    features = loaded.encode("a cat")
    connectors = LTX2TextConnectors.from_pretrained(
        folders.text_encoder.parent / "connectors", torch_dtype=dtype, low_cpu_mem_usage=False
    )
    seen: dict[str, Tensor] = {}
    for stream in ("video", "audio"):
        module = getattr(connectors, f"{stream}_text_proj_in")
        module.register_forward_hook(
            lambda m, args, out, stream=stream: seen.__setitem__(stream, out)
        )
    states, mask = loaded.hidden_states("a cat")
    connectors(states, mask)
    assert torch.equal(features.video_BSD, seen["video"])
    assert torch.equal(features.audio_BSD, seen["audio"])


def test_one_bos_leads_whether_or_not_the_tokenizer_adds_it(
    folders: ComponentFolders, tower: TextTower, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    table = tower.tokenizer.to_str()
    (tmp_path / "tokenizer.json").write_text(table)
    adding = type(tower.tokenizer).from_str(table)
    adding.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 2)]
    )
    (tmp_path / "tokenizer.json").write_text(adding.to_str())
    other = load_text_tower(
        folders.text_encoder, CONFIG, tokenizer=tmp_path, device=CPU, dtype=FP32
    )
    assert other.tokens("hi") == tower.tokens(" hi\n")
    assert tower.tokens("hi")[0] == 2 and 2 not in tower.tokens("hi")[1:]
    assert tower.tokens("") == [2]


def test_a_prompt_that_does_not_fit_is_refused(tower: TextTower) -> None:
    assert len(tower.tokens("x" * 1023)) == 1024
    with pytest.raises(ValueError, match="has 1025 tokens, at most 1024 fit; shorten it"):
        tower.tokens("x" * 1024)


def test_the_tower_stops_between_its_layers(tower: TextTower) -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(0)
        return len(asked) == 2

    with pytest.raises(Cancelled):
        tower.encode("x", cancelled=cancelled)
    assert len(asked) == 2
    assert tower.encode("x").video_BSD.shape == (1, 1024, CONFIG.video_dim)  # hooks are gone


def test_a_projection_under_lightricks_names_beside_the_tower_is_found(
    folders: ComponentFolders, tower: TextTower, tmp_path: Path
) -> None:
    folder = shutil.copytree(folders.text_encoder, tmp_path / "gemma")
    names = {
        f"text_embedding_projection.{name}": tensor
        for name, tensor in tower.projection.state_dict().items()
    }
    with pytest.raises(CheckpointError, match="needs the projection that was trained with it"):
        load_text_tower(folder, CONFIG, tokenizer=folders.tokenizer, device=CPU, dtype=FP32)
    save_file({name: t.clone() for name, t in names.items()}, folder / "projection.safetensors")
    loaded = load_text_tower(folder, CONFIG, tokenizer=folders.tokenizer, device=CPU, dtype=FP32)
    assert torch.equal(loaded.encode("a").audio_BSD, tower.encode("a").audio_BSD)


def test_another_gemma_than_the_denoisers_is_refused(folders: ComponentFolders) -> None:
    assert folder_gemma_version(folders.text_encoder) == GEMMA == DENOISER.census.gemma_version
    assert check_gemma_versions(GEMMA, GEMMA) is None
    with pytest.raises(CheckpointError, match=f"made for the text encoder {GEMMA}, but this one"):
        check_gemma_versions(GEMMA, "gemma-4-12b-it")
    assert "the text encoder does not say its version" in str(check_gemma_versions(GEMMA, ""))
    assert "the denoiser does not say" in str(check_gemma_versions("", GEMMA))
    assert "neither" in str(check_gemma_versions("", ""))


@pytest.mark.parametrize(
    ("metadata", "version"),
    [
        ({"gemma_version": "a"}, "a"),
        ({"gemma_source_checkpoint": '{"gemma_version": "b"}'}, "b"),
        ({"format": "pt"}, ""),
    ],
)
def test_the_version_may_stand_in_the_metadata(
    tmp_path: Path, metadata: dict[str, str], version: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata)
    assert folder_gemma_version(tmp_path) == version


def test_a_name_or_another_model_is_no_tower(folders: ComponentFolders, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no existing folder, but the text encoder"):
        load_text_tower(Path("Some/Hub-Name"), CONFIG, device=CPU, dtype=FP32)
    folder = shutil.copytree(folders.text_encoder, tmp_path / "text_encoder")
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"architectures": ["Gemma3Model"]}))
    with pytest.raises(CheckpointError, match="is of class Gemma3Model, but the text encoder"):
        load_text_tower(folder, CONFIG, device=CPU, dtype=FP32)
    (folder / "config.json").write_text(json.dumps(table))
    other = replace(CONFIG, caption_channels=48)
    with pytest.raises(CheckpointError, match="hidden states of 32 channels, but the denoiser was"):
        load_text_tower(folder, other, device=CPU, dtype=FP32)


def test_a_tower_that_lacks_a_tensor_or_fits_no_denoiser_is_refused(
    folders: ComponentFolders, tmp_path: Path
) -> None:
    root = shutil.copytree(folders.text_encoder.parent, tmp_path / "all")
    folder = root / "text_encoder"
    good = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    for tensors, told in (
        ({n: t for n, t in good.items() if n != name}, f"{name} is missing"),
        (good | {"model.more": torch.zeros(1)}, "model.more is left over"),
        (good | {name: torch.full_like(good[name], float("inf"))}, "holds NaN or infinity"),
        (good | {name: good[name][:3].clone()}, rf"{name} is \[3, 32\], expected \[64, 32\]"),
    ):
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=told):
            load_text_tower(folder, CONFIG, device=CPU, dtype=FP32)
    save_file(good, folder / "model.safetensors", {"format": "pt"})
    (root / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer.json in"):
        load_text_tower(folder, CONFIG, device=CPU, dtype=FP32)
