"""Single denoiser modules from their stored inputs: names the wrong linear, not only the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from runtime.h3.model import H3Model
from runtime.parity.golden import Golden
from runtime.parity.metrics import Comparison, compare

PREFIX = "mod/pos/"
_ISLANDS = (
    "video_patch_proj",
    "audio_patch_proj",
    "time_embedder",
    "final_layer.video_out",
    "final_layer.audio_out",
)


def staged_modules(golden: Golden, model: H3Model) -> Iterator[Comparison]:
    """Each module whose inputs and output are both stored; stage "module <path>"."""
    for path, inputs, output, run in _modules(model):
        names = [PREFIX + name for name in inputs]
        if PREFIX + output in golden and all(name in golden for name in names):
            got = run(*(golden.tensor(name) for name in names))
            want = golden.tensor(PREFIX + output)
            yield compare(PREFIX + output, got, want, run="staged", stage=f"module {path}")


_Module = tuple[str, tuple[str, ...], str, Callable[..., Tensor]]


def _modules(model: H3Model) -> Iterator[_Module]:
    for path in _ISLANDS:
        module = dict(model.named_modules()).get(path)
        if module is not None:
            yield path, (f"{path}.in",), f"{path}.out", module
    for i, block in enumerate(model.blocks):
        name = f"blocks.{i}"
        attn, mlp = block.get_submodule("attn"), block.get_submodule("mlp")
        qkv, out = attn.get_submodule("qkv_proj"), attn.get_submodule("out_proj")
        fc1, fc2 = mlp.get_submodule("fc1"), mlp.get_submodule("fc2")
        adaln = block.get_submodule("adaln_proj")
        for j in range(6):
            yield (
                f"{name}.adaln_proj",
                ("t_emb",),
                f"{name}.adaln_proj.out{j}",
                lambda t_emb, j=j, adaln=adaln: _lent(model, adaln, t_emb)[j],
            )
        yield f"{name}.attn.qkv_proj", (f"{name}.attn.in",), f"{name}.attn.qkv_proj.out", qkv
        yield (
            f"{name}.attn.attend",
            (f"{name}.attn.q", f"{name}.attn.k", f"{name}.attn.v"),
            f"{name}.attn.out_proj.in",
            lambda q, k, v, attn=attn: attn.attend(q, k, v)[0],
        )
        yield f"{name}.attn.out_proj", (f"{name}.attn.out_proj.in",), f"{name}.attn.out", out
        yield f"{name}.mlp.fc1", (f"{name}.mlp.in",), f"{name}.mlp.fc1.out", fc1
        yield (
            f"{name}.mlp.fc2",
            (f"{name}.mlp.fc1.out",),
            f"{name}.mlp.out",
            lambda hidden, fc2=fc2: fc2(_swiglu(hidden)),
        )


def _lent(model: H3Model, adaln: nn.Module, t_emb: Tensor) -> tuple[Tensor, ...]:
    with model.lend(adaln):
        tables: tuple[Tensor, ...] = adaln(t_emb)
    return tables


def _swiglu(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up
