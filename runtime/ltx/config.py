"""What an LTX-2.5 denoiser is, read from its header's `config.transformer` (ltx25.md 1.2).

Free of torch. The config is required: no shape tells the rope's precision and theta, the maximal
positions or the factor of the AV gates' timestep, and the defaults of other programs differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from runtime.checkpoints.header import CheckpointError

CLASS_NAME = "AVTransformer3DModel"
VERSIONS = ("2.5",)  # major.minor of `model_version`
FREQUENCIES = 256  # of the timestep embedding that enters every AdaLN head: 128 cosines, 128 sines
FF_FACTOR = 4
BLOCK_ROWS = 9  # shift, scale, gate of self-attention | of the feed-forward | of the text query
PROMPT_ROWS = 2  # shift, scale of the text's keys and values
AV_ROWS = 5  # scale, shift for A2V | scale, shift for V2A | gate

# AdaLN head -> (is it of the audio stream's width, rows that its linear gives)
ADALN_HEADS: Mapping[str, tuple[bool, int]] = {
    "adaln_single": (False, BLOCK_ROWS),
    "audio_adaln_single": (True, BLOCK_ROWS),
    "prompt_adaln_single": (False, PROMPT_ROWS),
    "audio_prompt_adaln_single": (True, PROMPT_ROWS),
    "av_ca_video_scale_shift_adaln_single": (False, AV_ROWS - 1),
    "av_ca_audio_scale_shift_adaln_single": (True, AV_ROWS - 1),
    "av_ca_a2v_gate_adaln_single": (False, 1),
    "av_ca_v2a_gate_adaln_single": (True, 1),
}
# Keys that choose another computation: what the header may say; required unless in _MAY_LACK.
_FIXED: Mapping[str, Any] = {
    "qk_norm": "rms_norm",
    "standardization_norm": "rms_norm",
    "rope_type": "split",
    "frequencies_precision": "float64",
    "use_middle_indices_grid": True,
    "causal_temporal_positioning": True,
    "cross_attention_adaln": True,
    "apply_gated_attention": True,
    "use_prompt_adaln_single": True,
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "caption_projection_second_linear": False,
    "caption_proj_input_norm": False,
    "text_encoder_norm_type": "per_token_rms",
    "connector_apply_gated_attention": True,
    "connector_norm_output": True,
    "_class_name": CLASS_NAME,
}
# The published key list may lack these (12.3); every program has the same default
_DEFAULTS: Mapping[str, Any] = {"audio_ff_bias": True, "audio_in_channels": 128}
# Tensors show these, or they belong to the text side; the published key list is not certain (12.3)
_MAY_LACK = frozenset(
    {
        "_class_name",
        "qk_norm",
        "standardization_norm",
        "caption_proj_before_connector",
        "caption_projection_first_linear",
        "caption_projection_second_linear",
        "caption_proj_input_norm",
        "text_encoder_norm_type",
        "connector_norm_output",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LTXConfig:
    """Fields are named as in the JSON; those of a fixed value (`_FIXED`) are checked, not kept."""

    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    cross_attention_dim: int  # of the text context; the video stream is as wide
    in_channels: int
    out_channels: int
    audio_num_attention_heads: int
    audio_attention_head_dim: int
    audio_cross_attention_dim: int
    audio_in_channels: int
    audio_out_channels: int
    caption_channels: int  # of one hidden state of the text tower
    norm_eps: float
    positional_embedding_theta: float
    positional_embedding_max_pos: tuple[int, ...]  # seconds, rows and columns in pixels
    audio_positional_embedding_max_pos: tuple[int, ...]  # seconds
    timestep_scale_multiplier: float
    av_ca_timestep_scale_multiplier: float  # of the sigma that enters the two AV gates
    ff_bias: bool
    audio_ff_bias: bool
    connector_num_layers: int
    connector_num_attention_heads: int
    connector_attention_head_dim: int
    audio_connector_num_attention_heads: int
    audio_connector_attention_head_dim: int
    connector_num_learnable_registers: int
    connector_positional_embedding_max_pos: tuple[int, ...]

    @property
    def video_dim(self) -> int:
        """Width of the video stream (published: 4,096)."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def audio_dim(self) -> int:
        """Width of the audio stream, and inner width of both AV attentions (published: 2,048)."""
        return self.audio_num_attention_heads * self.audio_attention_head_dim

    @property
    def video_ff_dim(self) -> int:
        return FF_FACTOR * self.video_dim

    @property
    def audio_ff_dim(self) -> int:
        return FF_FACTOR * self.audio_dim

    @property
    def cross_max_pos(self) -> int:
        """Seconds that stand for 1 in the rope of the AV attentions (ltx25.md 3.4)."""
        return max(self.positional_embedding_max_pos[0], self.audio_positional_embedding_max_pos[0])

    def stream_dim(self, audio: bool) -> int:
        return self.audio_dim if audio else self.video_dim

    @classmethod
    def from_header(cls, metadata: Mapping[str, str]) -> LTXConfig:
        """From a file's `__metadata__`; CheckpointError in one sentence for what cannot be run."""
        check_version(metadata)
        table = _table(metadata)
        for name, value in _FIXED.items():
            _check_fixed(table, name, value)
        given = {**_DEFAULTS, **table}
        kinds = {field.name: str(field.type) for field in fields(cls)}
        config = cls(**{name: _value(given, name, kind) for name, kind in kinds.items()})
        config._check_widths()
        return config

    def _check_widths(self) -> None:
        """The text context, the connectors and the streams share a width per modality."""
        for audio, stream in ((False, self.video_dim), (True, self.audio_dim)):
            lead = "audio_" if audio else ""
            heads = f"{lead}num_attention_heads x {lead}attention_head_dim"
            context = self.audio_cross_attention_dim if audio else self.cross_attention_dim
            if context != stream:
                raise CheckpointError(
                    f"the header's config has {lead}cross_attention_dim {context} and {heads} "
                    f"{stream}; the two must be equal"
                )
            connector = self.connector_dim(audio)
            if connector != stream:
                raise CheckpointError(
                    f"the header's config has {lead}connector heads of {connector} values "
                    f"together and {heads} {stream}; the two must be equal"
                )
        for name, length in (
            ("positional_embedding_max_pos", 3),
            ("audio_positional_embedding_max_pos", 1),
            ("connector_positional_embedding_max_pos", 1),
        ):
            found = getattr(self, name)
            if len(found) != length:
                raise CheckpointError(
                    f"the header's config has {name} {list(found)}; it must have {length} "
                    f"{'number' if length == 1 else 'numbers'}"
                )
        for name in ("attention_head_dim", "audio_attention_head_dim"):
            if getattr(self, name) % 2:
                raise CheckpointError(
                    f"the header's config has {name} {getattr(self, name)}; split rope needs an "
                    "even number"
                )

    def connector_heads(self, audio: bool) -> tuple[int, int]:
        """(heads, head dim) of one connector."""
        if audio:
            return (
                self.audio_connector_num_attention_heads,
                self.audio_connector_attention_head_dim,
            )
        return self.connector_num_attention_heads, self.connector_attention_head_dim

    def connector_dim(self, audio: bool) -> int:
        heads, head_dim = self.connector_heads(audio)
        return heads * head_dim


def check_version(metadata: Mapping[str, str]) -> str:
    """`model_version` of the header; CheckpointError when it is absent or not one we run."""
    version = metadata.get("model_version")
    known = " and ".join(f"{name}.x" for name in VERSIONS)
    if version is None:
        raise CheckpointError(
            f"the header has no model_version; {known} is supported: use the official file"
        )
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise CheckpointError(
            f"the header has model_version {version:.20}; {known} is supported (2.0 and 2.3 have "
            "another text tower, other biases and another sampler)"
        )
    return version


def _table(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    text = metadata.get("config")
    if text is None:
        raise CheckpointError(
            "the header has no config, and the shapes cannot tell rope precision, theta, maximal "
            "positions and timestep factors; use a file that keeps config.transformer"
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header's config is not JSON: {text:.60}") from error
    table = config.get("transformer") if isinstance(config, dict) else None
    if not isinstance(table, dict):
        raise CheckpointError(
            f"the header's config must be an object with an object 'transformer', got {text:.60}"
        )
    return table


def _check_fixed(table: Mapping[str, Any], name: str, value: Any) -> None:
    if name not in table:
        if name not in _MAY_LACK:
            raise CheckpointError(f"the header's config has no {name}; it must be {_show(value)}")
        return
    found = table[name]
    if type(found) is not type(value) or found != value:
        raise CheckpointError(
            f"the header's config has {name} {_show(found)}; {_show(value)} is supported"
        )


def _value(table: Mapping[str, Any], name: str, kind: str) -> Any:
    """The entry `name` checked to be of the field type `kind`, which is the annotation's text."""
    found = table.get(name)
    if found is None:
        raise CheckpointError(f"the header's config has no {name}, which the model needs")
    if kind == "bool" and type(found) is bool:
        return found
    if kind == "int" and _whole(found):
        return int(found)
    if kind == "float" and _positive(found):
        return float(found)
    if kind == "tuple[int, ...]" and isinstance(found, list) and found and all(map(_whole, found)):
        return tuple(map(int, found))
    wanted = {"bool": "true or false", "int": "a whole number of at least 1"}
    wanted |= {"float": "a number above 0", "tuple[int, ...]": "a list of whole numbers"}
    raise CheckpointError(
        f"the header's config has {name} {_show(found)}; it must be {wanted[kind]}"
    )


def _whole(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 1 and value % 1 == 0


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _show(value: Any) -> str:
    return f"{json.dumps(value):.60}"
