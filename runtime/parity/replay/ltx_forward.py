"""Replay of LTX forwards: every program and arithmetic that the golden stores, free and staged.

Names are <arithmetic.>PROGRAM.TENSOR (goldens_ltx/README.md); what is stored decides what is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime.ltx.model import Contexts, LTXModel
from runtime.ltx.modulation import TokenTimes
from runtime.ltx.packing import RopeTables, audio_tokens, keyframe_mask, video_tokens
from runtime.parity.golden import Golden
from runtime.parity.ltx_apart import apart_by, nearer, nearer_overall
from runtime.parity.ltx_files import (
    PROGRAMS,
    Arithmetic,
    Denoisers,
    Program,
    arithmetic_of,
    fps_of,
    shape_of,
)
from runtime.parity.ltx_taps import AV_ATTENTIONS, Captured, forward_taps
from runtime.parity.metrics import Comparison, Unsupported, compare
from runtime.parity.setup import Setup

STREAMS = ("video", "audio")
UNHOOKED = "diffusers_unhooked"  # a program that modulates frozen tokens otherwise
_NAME = re.compile(
    rf"(?:(\w+)\.)?({'|'.join(PROGRAMS)}|{UNHOOKED})(_fp32)?\."
    r"(?:video|audio|(?:block|adaln|rope)\..+)"
)
_ROPE = {
    "rope": "video",
    "audio_rope": "audio",
    "cross_attn_rope": "video_cross",
    "cross_attn_audio_rope": "audio_cross",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """One program in one arithmetic; `prefix` begins the names of its tensors."""

    prefix: str
    program: Program
    arithmetic: Arithmetic


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """Each oracle free, then (on the CPU) block by block from what it stores, then told apart."""
    return list(_Forward(golden, checkpoints, setup).comparisons())


class _Forward:
    """One golden with its denoisers and inputs."""

    def __init__(self, golden: Golden, checkpoints: Path, setup: Setup) -> None:
        self.golden, self.setup = golden, setup
        self.shape, self.fps = shape_of(golden), fps_of(golden)
        self.denoisers = Denoisers(golden, checkpoints, setup)

    def comparisons(self) -> Iterator[Comparison]:
        oracles = list(self._oracles())
        for oracle in oracles:
            yield from self._free(oracle)
        if self.setup.staged:
            for oracle in oracles:
                yield from self._staged(oracle)
        for oracle in oracles:
            yield from self._told_apart(oracle)

    def _oracles(self) -> Iterator[Oracle]:
        found: dict[str, Oracle] = {}
        for name in sorted(self.golden.names):
            if name.startswith("in."):
                continue
            match = _NAME.fullmatch(name)
            if match is None:
                raise Unsupported(f"tensor {name!r}; known programs: {', '.join(PROGRAMS)}")
            lead, program, fp32 = match[1] or "", match[2], match[3] or ""
            if program == UNHOOKED:
                continue
            prefix = f"{lead}.{program}" if lead else f"{program}{fp32}"
            arithmetic = arithmetic_of(self.golden, "dequant_fp32" if fp32 else lead)
            found[prefix] = Oracle(prefix=prefix, program=PROGRAMS[program], arithmetic=arithmetic)
        yield from found.values()

    # ---- one forward

    def _given(self, name: str) -> Tensor:
        return self.golden.tensor(f"in.{name}").to(self.setup.device)

    def _arguments(self, oracle: Oracle) -> dict[str, Any]:
        sigma_B = self._given("sigma")
        times: dict[str, Tensor | TokenTimes] = {
            "video_timestep_BN": self._given("denoise_mask") * sigma_B[:, None],
            "audio_timestep_BA": sigma_B[:, None].expand(-1, self.shape.audio).contiguous(),
        }
        if any(name.startswith(f"{oracle.prefix}.adaln.") for name in self.golden.names):
            times = {k: _row_per_token(v) for k, v in times.items()}
        return {
            "video_BNC": video_tokens(self._given("video_latent")),
            "audio_BAC": audio_tokens(self._given("audio_latent")),
            "context_video": self._given("video_context"),
            "context_audio": self._given("audio_context"),
            **times,
            "video_sigma_B": sigma_B,
            "audio_sigma_B": sigma_B,
            "rope": self._rope(oracle),
            "keyframe_mask": keyframe_mask(self.shape, self.setup.device),
        }

    def _model(self, oracle: Oracle) -> LTXModel:
        return self.denoisers.get(oracle.arithmetic, oracle.program.form)

    def _rope(self, oracle: Oracle) -> RopeTables:
        return self.denoisers.rope(self.shape, self.fps, oracle.program, oracle.arithmetic.dtype)

    def _run(self, oracle: Oracle, **changes: Any) -> Captured:
        model = self._model(oracle)
        arguments = {"v2a_source": oracle.program.v2a_source, **self._arguments(oracle), **changes}
        with forward_taps(model) as captured:
            video, audio = model(**arguments)
        return {**captured, "video": video, "audio": audio}

    # ---- free

    def _free(self, oracle: Oracle) -> Iterator[Comparison]:
        captured = self._run(oracle)
        yield from self._rope_tables(oracle)
        for name, value in captured.items():
            yield from self._compare(oracle, name, value, "free", _stage(name))

    def _rope_tables(self, oracle: Oracle) -> Iterator[Comparison]:
        rope, batch = self._rope(oracle), len(self.golden.tensor("in.sigma"))
        for theirs, ours in _ROPE.items():
            rotation = getattr(rope, ours)
            for part, value in (("cos", rotation.cos_BHTr), ("sin", rotation.sin_BHTr)):
                value = value.expand(batch, -1, -1, -1)
                yield from self._compare(oracle, f"rope.{theirs}.{part}", value, "free", "rope")

    def _compare(
        self, oracle: Oracle, name: str, got: Tensor, run: str, stage: str
    ) -> Iterator[Comparison]:
        stored = f"{oracle.prefix}.{name}"
        if stored in self.golden:
            yield compare(stored, got, self.golden.tensor(stored), run=run, stage=stage)

    # ---- staged

    def _staged(self, oracle: Oracle) -> Iterator[Comparison]:
        model, arguments = self._model(oracle), self._arguments(oracle)
        modulation = model.modulate(
            arguments["video_timestep_BN"],
            arguments["audio_timestep_BA"],
            arguments["video_sigma_B"],
            arguments["audio_sigma_B"],
        )
        contexts = Contexts(
            video_BLD=arguments["context_video"].to(model.dtype),
            audio_BLD=arguments["context_audio"].to(model.dtype),
        )
        rope, source = arguments["rope"], oracle.program.v2a_source
        for i, block in enumerate(model.transformer_blocks):
            yield from self._attentions(oracle, i, block.get_submodule, rope)
            streams = self._streams(oracle, i - 1)
            if streams is not None:
                found = block(*streams, contexts, *modulation, rope, source)
                for stream, value in zip(STREAMS, found, strict=True):
                    name = f"block.{i}.{stream}"
                    yield from self._compare(oracle, name, value, "staged", _stage(name))
        streams = self._streams(oracle, len(model.transformer_blocks) - 1)
        if streams is not None:
            found = model.finish(*streams, *modulation)
            for stream, value in zip(STREAMS, found, strict=True):
                yield from self._compare(oracle, stream, value, "staged", "output")

    def _streams(self, oracle: Oracle, block: int) -> tuple[Tensor, Tensor] | None:
        names = [f"{oracle.prefix}.block.{block}.{stream}" for stream in STREAMS]
        if not all(name in self.golden for name in names):
            return None
        video, audio = (self.golden.tensor(name) for name in names)
        return video, audio

    def _attentions(
        self, oracle: Oracle, block: int, submodule: Any, rope: RopeTables
    ) -> Iterator[Comparison]:
        sides = {
            "audio_to_video_attn": (rope.video_cross, rope.audio_cross),
            "video_to_audio_attn": (rope.audio_cross, rope.video_cross),
        }
        for attention in AV_ATTENTIONS:
            name = f"block.{block}.{attention}"
            inputs = [f"{oracle.prefix}.{name}.{part}" for part in ("query_in", "context_in")]
            if all(stored in self.golden for stored in inputs):
                given = [self.golden.tensor(stored) for stored in inputs]
                value = submodule(attention)(*given, *sides[attention])
                stage = f"module transformer_blocks.{block}.{attention}"
                yield from self._compare(oracle, f"{name}.out", value, "staged", stage)

    # ---- told apart

    def _told_apart(self, oracle: Oracle) -> Iterator[Comparison]:
        """A golden of one form must not fit the other one.

        In half types rounding hides it on video: there audio has to be nearer to its own form. In
        W4A4 one flipped code costs more than the form; there W4A16 must not fit.
        """
        weight_only = oracle.arithmetic.nvfp4 == "nvfp4_dequant"
        if not weight_only:
            wide = replace(oracle, arithmetic=Arithmetic(dtype=oracle.arithmetic.dtype))
            got, other = self._run(oracle), self._run(wide)
            for stream in STREAMS:
                name = f"{oracle.prefix}.{stream}"
                yield nearer_overall(name, got[stream], other[stream], self.golden.tensor(name))
        if oracle.program.v2a_source == "post_a2v" and weight_only:
            got, other = self._run(oracle), self._run(oracle, v2a_source="pre_a2v")
            half = oracle.arithmetic.dtype.itemsize < 4
            for stream in STREAMS[half:]:
                name = f"{oracle.prefix}.{stream}"
                want = self.golden.tensor(name)
                if half:
                    yield nearer(name, got[stream], other[stream], want)
                else:
                    yield apart_by(name, other[stream], want)
        if oracle.prefix == "model_pre_a2v" and f"{UNHOOKED}.video" in self.golden:
            got = self._run(oracle)
            for stream in STREAMS:
                name = f"{UNHOOKED}.{stream}"
                yield apart_by(name, got[stream], self.golden.tensor(name))


def _row_per_token(time_BT: Tensor | TokenTimes) -> TokenTimes:
    return time_BT if isinstance(time_BT, TokenTimes) else TokenTimes(values_BU=time_BT)


def _stage(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "block":
        attention = f" {parts[2]}" if parts[2] in AV_ATTENTIONS else ""
        return f"block {parts[1]}{attention}"
    return parts[0] if parts[0] == "adaln" else "output"
