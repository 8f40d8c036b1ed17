"""Reading what ComfyUI hands over: NestedTensors, sequences and options, copied to the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def copied(value: Any) -> Any:
    """The latents and the context copied; all else (payload, options) as it is."""
    if isinstance(value, Tensor):
        return copy(value)
    if isinstance(value, list | tuple):
        return tuple(copied(part) for part in value)
    return copies(value) if _is_nested(value) else value


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors of arguments, in order; not those inside a payload or the options."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple) or _is_nested(value):
        for part in parts(value):
            if not isinstance(part, dict):
                yield from leaves(part)


def _is_nested(value: Any) -> bool:
    """Whether it is ComfyUI's container of latents, which is no torch.Tensor."""
    return not isinstance(value, Tensor) and (hasattr(value, "tensors") or hasattr(value, "unbind"))


def parts(value: Any) -> list[Any]:
    """The tensors of a NestedTensor or a sequence; a plain tensor alone."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Tensor):
        return [value]
    return list(value.tensors if hasattr(value, "tensors") else value.unbind())


def copies(value: Any) -> list[Tensor]:
    return [copy(part) for part in parts(value)]


def copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True).contiguous()


def options_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """ComfyUI's transformer options, wherever the call has them."""
    given = [kwargs.get("transformer_options"), *args, *kwargs.values()]
    dicts = [value for value in given if isinstance(value, dict)]
    return next((value for value in dicts if value.get("cond_or_uncond")), {})
