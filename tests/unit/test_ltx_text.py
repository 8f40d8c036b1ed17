"""Text conditioning of LTX against diffusers' LTX2TextConnectors with the same random weights."""

from __future__ import annotations

import pytest
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from torch import Tensor, nn

from runtime.kernels.attention import AttentionOptions, load_attention
from runtime.ltx.config import LTXConfig
from runtime.ltx.forms import COMFY, MODEL, Form
from runtime.ltx.model import Contexts
from runtime.ltx.published import connectors as published_names
from runtime.ltx.text import Connectors, TextProjection, with_registers
from tests.ltx_parts import CPU, fill, tiny_config

STATES, TOKENS, ROWS = 3, 16, 24  # 8 registers: rows must be a multiple for diffusers


def ours(config: LTXConfig, form: Form = MODEL) -> tuple[TextProjection, Connectors]:
    attend = load_attention("sdpa", CPU, torch.float32, AttentionOptions())
    projection = TextProjection(config, STATES)
    connectors = Connectors(config, attend, form=form)
    fill(projection, 5)
    fill(connectors, 6)
    return projection.eval(), connectors.eval()


def theirs(config: LTXConfig, *parts: nn.Module) -> LTX2TextConnectors:
    (heads, width), (audio_heads, audio_width) = map(config.connector_heads, (False, True))
    layers, registers = config.connector_num_layers, config.connector_num_learnable_registers
    twin = LTX2TextConnectors(
        caption_channels=config.caption_channels,
        text_proj_in_factor=STATES,
        video_connector_num_attention_heads=heads,
        video_connector_attention_head_dim=width,
        video_connector_num_layers=layers,
        video_connector_num_learnable_registers=registers,
        video_gated_attn=True,
        audio_connector_num_attention_heads=audio_heads,
        audio_connector_attention_head_dim=audio_width,
        audio_connector_num_layers=layers,
        audio_connector_num_learnable_registers=registers,
        audio_gated_attn=True,
        rope_type="split",
        per_modality_projections=True,
        video_hidden_dim=config.video_dim,
        audio_hidden_dim=config.audio_dim,
        proj_bias=True,
    )
    renamed = {
        "video_aggregate_embed": "video_text_proj_in",
        "audio_aggregate_embed": "audio_text_proj_in",
        "video_embeddings_connector": "video_connector",
        "audio_embeddings_connector": "audio_connector",
        "transformer_1d_blocks": "transformer_blocks",
        "q_norm": "norm_q",
        "k_norm": "norm_k",
    }
    weights = {
        ".".join(renamed.get(word, word) for word in name.split(".")): value
        for part in parts
        for name, value in part.state_dict().items()
    }
    twin.load_state_dict(weights)
    return twin.eval()


def states(mask_BS: Tensor) -> Tensor:
    """Hidden states; noise where padding is, which must not show."""
    generator = torch.Generator().manual_seed(7)
    shape = (*mask_BS.shape, tiny_config().caption_channels, STATES)
    return torch.randn(shape, generator=generator)


def padded(*lengths: int, left: bool = True) -> Tensor:
    """[B, TOKENS] with so many ones a prompt."""
    rows = [[0] * (TOKENS - n) + [1] * n if left else [1] * n + [0] * (TOKENS - n) for n in lengths]
    return torch.tensor(rows)


@torch.inference_mode()
def contexts(form: Form, hidden: Tensor, mask: Tensor, rows: int = TOKENS) -> Contexts:
    projection, connectors = ours(tiny_config(), form)
    found: Contexts = connectors(*projection(hidden, mask), mask, rows)
    return found


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("lengths", [(5,), (16,), (1, 11)])
def test_contexts_have_the_bits_of_diffusers(
    lengths: tuple[int, ...], left: bool, cpu_paths: str
) -> None:
    mask = padded(*lengths, left=left)
    hidden = states(mask)
    twin = theirs(tiny_config(), *ours(tiny_config()))
    with torch.inference_mode():
        video, audio, _ = twin(hidden, mask)
    got = contexts(MODEL, hidden, mask)
    for ours_, want in ((got.video_BLD, video), (got.audio_BLD, audio)):
        if cpu_paths == "pinned":
            assert torch.equal(ours_, want)
        torch.testing.assert_close(ours_, want, rtol=1e-5, atol=1e-5)


def test_comfys_form_has_another_eps_in_the_connectors_too() -> None:
    mask = padded(5)
    own, comfy = (contexts(form, states(mask), mask).video_BLD for form in (MODEL, COMFY))
    off = float((own - comfy).abs().max() / own.abs().max())
    assert 1e-7 < off < 1e-4


def test_padding_and_its_side_do_not_show() -> None:
    """The same three tokens, to the left or the right of noise."""
    left, right = padded(3), padded(3, left=False)
    hidden = states(left)
    moved = torch.roll(hidden, 3, dims=1)
    at_the_right = torch.cat([moved[:, :3], torch.randn_like(moved[:, 3:])], dim=1)
    got = contexts(MODEL, hidden, left), contexts(MODEL, at_the_right, right)
    torch.testing.assert_close(got[0].audio_BLD, got[1].audio_BLD, rtol=1e-5, atol=1e-6)


def test_registers_stand_at_their_own_rows_behind_the_tokens() -> None:
    tokens = torch.arange(1.0, 7.0).reshape(2, 3, 1)
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    registers = -torch.arange(1.0, 5.0)[:, None]
    rows = with_registers(tokens, mask, registers, 6)[..., 0]
    assert rows.tolist() == [[2, 3, -3, -4, -1, -2], [6, -2, -3, -4, -1, -2]]


def test_a_context_may_be_longer_than_the_prompt_but_not_shorter() -> None:
    mask = padded(5)
    assert contexts(MODEL, states(mask), mask, rows=ROWS).video_BLD.shape == (1, ROWS, 32)
    with pytest.raises(ValueError, match="the prompt has 5 tokens, a context has 4; shorten it"):
        contexts(MODEL, states(mask), mask, rows=4)


def test_parameters_have_the_published_names_and_shapes() -> None:
    config = tiny_config()
    _, connectors = ours(config)
    found = {name: tuple(value.shape) for name, value in connectors.state_dict().items()}
    assert found == {spec.name: tuple(spec.shape) for spec in published_names(config)}
