"""The examples of docs/extending.md are the code that a reader would copy: each is run here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from app import presets
from runtime.checkpoints import FORMATS, open_checkpoint
from runtime.checkpoints.base import PackedWeight
from runtime.checkpoints.demo import random_checkpoint
from runtime.kernels.attention import AttentionOptions
from runtime.kernels.linear import linear_backend

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def example(path: str) -> str:
    """The block that follows "File `path`"."""
    found = re.search(rf"File `{re.escape(path)}`.*?```\w+\n(.*?)```", TEXT, re.DOTALL)
    assert found, path
    return found[1]


def module(path: str) -> dict[str, Any]:
    """The names that the example defines."""
    names: dict[str, Any] = {"__name__": Path(path).stem}
    exec(compile(example(path), path, "exec"), names)
    return names


def test_the_attention_backend_agrees_with_sdpa() -> None:
    backend = module("runtime/kernels/attention/plain.py")["BACKEND"]
    q, k, v = torch.randn(3, 1, 4, 7, 64, generator=torch.Generator().manual_seed(0))
    want = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    got = backend.load(torch.device("cpu"), AttentionOptions())(q, k, v)
    assert backend.name == "plain"
    assert backend.route(torch.device("cpu"), AttentionOptions()) == "matmul and softmax"
    torch.testing.assert_close(got, want)


def test_the_linear_backend_multiplies_the_dequantised_weight() -> None:
    backend = module("runtime/kernels/linear/nvfp4_double.py")["BACKEND"]
    packed = an_nvfp4_layer()
    x = torch.randn(5, packed.shape[1], generator=torch.Generator().manual_seed(0))
    want = linear_backend("nvfp4_dequant").build(packed)(x)
    assert backend.name == "nvfp4_double" and backend.reason(torch.device("cpu")) == ""
    torch.testing.assert_close(backend.build(packed)(x), want)


def an_nvfp4_layer() -> PackedWeight:
    checkpoint = random_checkpoint("dit", size="tiny", format="pruned_nvfp4")
    return checkpoint.packed(next(iter(checkpoint.layers)))


def test_the_checkpoint_format_is_read_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    format = module("runtime/checkpoints/bf16_scaled.py")["FORMAT"]
    known: Mapping[str, Any] = {**FORMATS, **dict.fromkeys(format.markers, format)}
    for place in ("runtime.checkpoints.index.FORMATS", "runtime.checkpoints.file.FORMATS"):
        monkeypatch.setattr(place, known)
    layer, file = "blocks.0.mlp.fc1", tmp_path / "scaled.safetensors"
    tensors = load_file(presets.DEMO / "h3_tiny_pruned_bf16.safetensors")
    marker = json.dumps({"format": "bf16_scaled"}).encode()
    tensors[f"{layer}.comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"bf16_scaled layer {layer} has no weight_scale"):
        open_checkpoint(file, "dit")
    tensors[f"{layer}.weight_scale"] = torch.tensor(2.0)
    save_file(tensors, file)
    packed = open_checkpoint(file, "dit").packed(layer)
    assert packed.quant.format == "bf16_scaled" and packed.shape == (768, 128)


def test_the_preset_loads(tmp_path: Path) -> None:
    file = tmp_path / "square_64_22f.toml"
    file.write_text(example("presets/requests/square_64_22f.toml"))
    request = presets.load_request(file, id="x")
    assert (request.width, request.height, request.frames) == (64, 64, 22)


def test_the_panel_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gradio as gr

    from panels import widgets

    script = example("panels/web/engine.js")
    (tmp_path / "engine.js").write_text(script)
    monkeypatch.setattr(widgets, "WEB", tmp_path)
    panel = module("panels/engine.py")
    with gr.Blocks() as page:
        panel["build"](None, gr.HTML())
    assert panel["TITLE"] == "Engine"
    drawn = [block for block in page.blocks.values() if isinstance(block, gr.HTML)]
    assert drawn[-1].js_on_load == script
