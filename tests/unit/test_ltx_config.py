"""An LTX config comes from the header alone, and what cannot be run is one sentence."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from runtime.checkpoints.header import CheckpointError
from runtime.ltx.config import ADALN_HEADS, LTXConfig
from runtime.ltx.published import CONFIG, metadata_of


def read(**changes: Any) -> LTXConfig:
    return LTXConfig.from_header(metadata_of({**CONFIG, **changes}))


def without(name: str) -> dict[str, str]:
    return metadata_of({key: value for key, value in CONFIG.items() if key != name})


def test_the_published_config_gives_the_published_widths() -> None:
    config = read()
    assert (config.video_dim, config.audio_dim) == (4096, 2048)
    assert (config.video_ff_dim, config.audio_ff_dim) == (16384, 8192)
    assert config.connector_heads(audio=False) == (32, 128)
    assert config.connector_heads(audio=True) == (32, 64)
    assert (config.ff_bias, config.audio_ff_bias) == (False, True)
    assert config.cross_max_pos == 20
    assert config.av_ca_timestep_scale_multiplier == 1000.0


def test_the_eight_heads_have_32_rows_together() -> None:
    assert len(ADALN_HEADS) == 8
    assert sum(rows for _, rows in ADALN_HEADS.values()) == 32


def test_two_keys_that_the_published_file_may_lack_have_their_defaults() -> None:
    config = LTXConfig.from_header(without("audio_ff_bias"))
    assert (config.audio_ff_bias, config.audio_in_channels) == (True, 128)


def test_the_cross_rope_spans_the_longer_of_both_streams() -> None:
    assert read(audio_positional_embedding_max_pos=[30]).cross_max_pos == 30
    assert read(positional_embedding_max_pos=[40, 2048, 2048]).cross_max_pos == 40


def test_keys_that_are_not_known_are_left_alone() -> None:
    assert read(a_key_of_a_later_build=3) == read()


def test_without_a_config_the_file_is_refused() -> None:
    metadata = {key: value for key, value in metadata_of(CONFIG).items() if key != "config"}
    with pytest.raises(CheckpointError, match=r"no config, and the shapes cannot tell"):
        LTXConfig.from_header(metadata)


@pytest.mark.parametrize("text", ["{", "[]", '{"transformer": 3}', "{}", "9" * 5000])
def test_a_config_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"^the header's config"):
        LTXConfig.from_header({**metadata_of(CONFIG), "config": text})


@pytest.mark.parametrize("version", ["2.0.0", "2.3.1", "2.50.0", "3.0", "", "two"])
def test_another_version_is_refused(version: str) -> None:
    with pytest.raises(CheckpointError, match=r"model_version .*2\.5\.x is supported"):
        LTXConfig.from_header({**metadata_of(CONFIG), "model_version": version})


def test_a_file_without_version_is_refused() -> None:
    metadata = metadata_of(CONFIG)
    del metadata["model_version"]
    with pytest.raises(CheckpointError, match="has no model_version"):
        LTXConfig.from_header(metadata)


@pytest.mark.parametrize("version", ["2.5", "2.5.0", "2.5.7"])
def test_every_build_of_the_release_is_read(version: str) -> None:
    assert LTXConfig.from_header({**metadata_of(CONFIG), "model_version": version}) == read()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_class_name", "Transformer3DModel"),
        ("rope_type", "interleaved"),
        ("frequencies_precision", "float32"),
        ("qk_norm", "layer_norm"),
        ("apply_gated_attention", False),
        ("cross_attention_adaln", False),
        ("use_prompt_adaln_single", False),
        ("use_middle_indices_grid", 1),
        ("causal_temporal_positioning", None),
        ("caption_proj_before_connector", False),
        ("text_encoder_norm_type", "masked_mean"),
        ("connector_apply_gated_attention", False),
    ],
)
def test_another_computation_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"config has {name} .* is supported"):
        read(**{name: value})


# What no shape shows, and what the weights are laid out by: nothing of it is guessed
@pytest.mark.parametrize(
    "name",
    [
        *("rope_type", "frequencies_precision", "use_middle_indices_grid"),
        *("causal_temporal_positioning", "apply_gated_attention", "use_prompt_adaln_single"),
        *(
            field.name
            for field in fields(LTXConfig)
            if field.name not in ("audio_in_channels", "audio_ff_bias")
        ),
    ],
)
def test_a_key_that_the_model_needs_is_missed_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config has no {name}"):
        LTXConfig.from_header(without(name))


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("num_layers", 0, "whole number of at least 1"),
        ("num_layers", 2.5, "whole number of at least 1"),
        ("num_layers", True, "whole number of at least 1"),
        ("num_attention_heads", "32", "whole number of at least 1"),
        ("norm_eps", 0, "number above 0"),
        ("norm_eps", float("nan"), "number above 0"),
        ("ff_bias", 0, "true or false"),
        ("positional_embedding_max_pos", [], "list of whole numbers"),
        ("positional_embedding_max_pos", 20, "list of whole numbers"),
        ("positional_embedding_max_pos", [20, 2048], "must have 3 numbers"),
        ("audio_positional_embedding_max_pos", [20, 20], "must have 1 number$"),
        ("attention_head_dim", 127, r"must be equal|even number"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(name: str, value: object, wanted: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config has .*{wanted}"):
        read(**{name: value})


@pytest.mark.parametrize(
    "name", ["cross_attention_dim", "audio_cross_attention_dim", "connector_attention_head_dim"]
)
def test_widths_that_contradict_each_other_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="the two must be equal"):
        read(**{name: 2 * CONFIG[name]})


def test_a_refusal_is_one_short_sentence_whatever_the_header_says() -> None:
    with pytest.raises(CheckpointError) as refused:
        read(rope_type=json.dumps("x" * 9999))
    assert len(str(refused.value)) < 300
