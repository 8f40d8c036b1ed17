"""The first step whose bits a batch of tiles changes: `python -m tests.gpu.vae_bits`.

Full-size random weights. A tile is decoded alone and as the first of a batch; the outputs of every
step are compared in the order in which they were computed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from runtime.h3.video_vae import VideoVAE
from runtime.kernels.elementwise import VaeElementwise
from tests.gpu.vae_parts import exact, random_vae, relative_l2, set_up

TOKENS, SIDE = 7, 16


class Recorder:
    """The first tile of what each step gives, in order."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Tensor]] = []

    def keep(self, name: str, x: Tensor) -> None:
        self.found.append((name, x[:1].clone()))

    def wrapped(self, name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recorded(*operands: Tensor) -> Tensor:
            result = call(*operands)
            self.keep(name, result)
            return result

        return recorded


class RecordedSteps:
    """The decoder's elementwise steps; those in place record what they wrote."""

    def __init__(self, ops: VaeElementwise, recorder: Recorder, block: str) -> None:
        self._ops, self._recorder, self._block = ops, recorder, block

    def _keep(self, step: str, x: Tensor) -> Tensor:
        self._recorder.keep(f"{self._block}.{step}", x)
        return x

    def norm(self, norm: nn.RMSNorm, x_BNC: Tensor) -> Tensor:
        return self._keep("norm", self._ops.norm(norm, x_BNC))

    def rms_rope(self, q_BNHd: Tensor, k_BNHd: Tensor, table_1N1R22: Tensor, eps: float) -> None:
        self._ops.rms_rope(q_BNHd, k_BNHd, table_1N1R22, eps)
        self._keep("rms_rope q", q_BNHd)
        self._keep("rms_rope k", k_BNHd)

    def nan_to_zero(self, x: Tensor) -> Tensor:
        return self._ops.nan_to_zero(x)

    def swiglu(self, gate_up_BN2F: Tensor) -> Tensor:
        return self._keep("swiglu", self._ops.swiglu(gate_up_BN2F))

    def scaled_add(self, x_BNC: Tensor, o_BNC: Tensor, scale_C: Tensor) -> None:
        self._ops.scaled_add(x_BNC, o_BNC, scale_C)
        self._keep("scaled_add", x_BNC)


@contextmanager
def recording(vae: VideoVAE, recorder: Recorder) -> Iterator[None]:
    """Records the linears, the attention and the steps of every block."""
    hooks = []
    changed = []
    for name, module in vae.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm) and name.startswith("decoder."):
            hooks.append(
                module.register_forward_hook(
                    lambda module, operands, result, name=name: recorder.keep(name, result)
                )
            )
    for i, block in enumerate(vae.decoder.transformer_blocks):
        changed.append((block, block.ops, block.attn.attend))
        block.attn.attend = recorder.wrapped(f"block {i}.attention", block.attn.attend)
        block.ops = block.attn.ops = block.ff.ops = RecordedSteps(block.ops, recorder, f"block {i}")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for block, ops, attend in changed:
            block.ops = block.attn.ops = block.ff.ops = ops
            block.attn.attend = attend


def decoded(vae: VideoVAE, z: Tensor) -> tuple[list[tuple[str, Tensor]], Tensor]:
    """Steps of the first tile, and all raw pixels."""
    recorder = Recorder()
    with torch.inference_mode(), recording(vae, recorder):
        raw = vae._decode_tiles(z, None)
    return recorder.found, raw


def compare(vae: VideoVAE, tiles: int) -> dict[str, object]:
    """The first step that differs, its error, and what is left of it in the pixels."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(tiles, 24, TOKENS, SIDE, SIDE, generator=generator).to(vae.device, vae.dtype)
    one, one_raw = decoded(vae, z[:1])
    many, raw = decoded(vae, z)
    many_raw = raw[:1]
    with torch.inference_mode():  # 105 tiles hold more than 2**31 values
        last = relative_l2(raw[-1:], vae._decode_tiles(z[-1:], None))
    # x_embedder runs tile by tile: of a batch only its first call is the first tile's
    skipped = "decoder.x_embedder"
    one = [step for step in one if step[0] != skipped]
    many = [step for step in many if step[0] != skipped]
    assert [name for name, _ in one] == [name for name, _ in many]
    told: dict[str, object] = {
        "tiles": tiles,
        "equal": torch.equal(one_raw, many_raw),
        "pixels_rel_l2": relative_l2(many_raw, one_raw),
        "last_tile_rel_l2": last,
        "pixels_max_abs": float((many_raw.float() - one_raw.float()).abs().max()),
    }
    for (name, a), (_, b) in zip(one, many, strict=True):
        if not torch.equal(a, b):
            moved = float((a != b).float().mean())
            told |= {"first": name, "first_rel_l2": relative_l2(b, a), "first_share": moved}
            break
    return told


def main() -> None:
    """Every batch size asked for, one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", type=int, nargs="+", default=[5, 15, 35, 105])
    parser.add_argument("--dtype", choices=("fp16", "fp32"), default="fp16")
    parser.add_argument("--attention", default="sdpa_cudnn")
    parser.add_argument("--elementwise", nargs="+", default=["eager", "triton"])
    options = parser.parse_args()
    exact()
    vae = random_vae(options.dtype)
    rows = []
    for elementwise in options.elementwise:
        set_up(vae, attention=options.attention, elementwise=elementwise, tiles=1)
        for tiles in options.tiles:
            rows.append({"elementwise": elementwise, **compare(vae, tiles)})
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
