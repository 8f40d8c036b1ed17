"""Hooks that capture a denoiser's internals under the goldens' names; every capture clones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from runtime.h3.graphed import eagerly
from runtime.h3.model import Attention, H3Model, PackedInputs, StepRows

Captured = dict[str, Tensor]

# module path -> which sides are captured, as `mod/<side>/<path>.<in|out>`
_IN_OUT = (
    "video_patch_proj",
    "audio_patch_proj",
    "time_embedder",
    "final_layer.video_out",
    "final_layer.audio_out",
)
_BLOCK_IN = ("attn", "attn.out_proj", "mlp")
_BLOCK_OUT = ("attn", "attn.qkv_proj", "mlp", "mlp.fc1", "norm1")


@contextmanager
def module_taps(model: H3Model) -> Iterator[Captured]:
    """Captures one forward: module inputs and outputs, q/k/v after rotation, t_emb, packed rows.

    The forward builds its own AdaLN tables and is no CUDA graph: kept tables and replays would
    leave nothing to see.
    """
    model.tables.forget()
    with eagerly(model), _hooks(model) as captured:
        yield captured


@contextmanager
def _hooks(model: H3Model) -> Iterator[Captured]:
    captured: Captured = {}
    handles: list[torch.utils.hooks.RemovableHandle] = []
    unwrap: list[Callable[[], None]] = []

    def before(name: str, module: nn.Module) -> None:
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args: captured.__setitem__(name, args[0].clone())
            )
        )

    def after(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> None:
            if isinstance(out, Tensor):
                captured[f"{name}.out"] = out.clone()
            else:
                for j, part in enumerate(out):
                    captured[f"{name}.out{j}"] = part.clone()

        handles.append(module.register_forward_hook(hook))

    def packed(_: nn.Module, args: tuple[Tensor, Tensor, PackedInputs, StepRows]) -> None:
        captured["rope_table"] = args[2].rope.clone()
        captured["mod_segments"] = torch.tensor(args[3].spans)

    handles.append(model.register_forward_pre_hook(packed))
    modules = dict(model.named_modules())
    for path in _IN_OUT:
        if path in modules:
            before(f"{path}.in", modules[path])
            after(path, modules[path])
    for i, block in enumerate(model.blocks):
        after(f"blocks.{i}", block)
        after(f"blocks.{i}.adaln_proj", block.get_submodule("adaln_proj"))
        for path in _BLOCK_IN:
            before(f"blocks.{i}.{path}.in", block.get_submodule(path))
        for path in _BLOCK_OUT:
            after(f"blocks.{i}.{path}", block.get_submodule(path))
        unwrap.append(_tap_attention(f"blocks.{i}.attn", block.get_submodule("attn"), captured))
    after("final_layer.adaln_proj", model.final_layer.adaln_proj)
    before("packed_embed", model.blocks[0])
    before("t_emb", model.final_layer.adaln_proj)
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
        for undo in unwrap:
            undo()


def _tap_attention(name: str, module: nn.Module, captured: Captured) -> Callable[[], None]:
    assert isinstance(module, Attention)
    attend = module.attend

    def tapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for axis, value in (("q", q), ("k", k), ("v", v)):
            captured[f"{name}.{axis}"] = value.clone()
        return attend(q, k, v)

    module.attend = tapped

    def undo() -> None:
        module.attend = attend

    return undo


@contextmanager
def refiner_taps(model: H3Model) -> Iterator[Captured]:
    """Captures `refine/<side>/...`: the projection, each block and its attention, the norm."""
    captured: Captured = {}
    named: list[tuple[str, nn.Module]] = [
        ("condition_proj", model.condition_proj),
        ("final_norm", model.token_refiner.final_norm),
    ]
    for i, block in enumerate(model.token_refiner.blocks):
        named += [(f"block_{i}", block), (f"block_{i}.attn", block.get_submodule("attn"))]
    handles = [
        module.register_forward_hook(
            lambda _, args, out, name=name: captured.__setitem__(name, out.clone())
        )
        for name, module in named
    ]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
