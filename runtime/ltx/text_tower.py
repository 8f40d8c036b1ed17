"""The Gemma tower of LTX-2.5, as transformers computes it: a prompt to features of both streams.

Section 5 of the contract; B batch (1), S = 1,024 tokens, E hidden width, L hidden states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from runtime.cancel import Cancelled
from runtime.checkpoints.header import CheckpointError
from runtime.checkpoints.load import LoadReport
from runtime.ltx.components import library, refuse, said
from runtime.ltx.config import LTXConfig
from runtime.ltx.folders import CONFIG, shapes_of, tensor_files
from runtime.ltx.sizes import CONTEXT_ROWS
from runtime.ltx.text import TextProjection
from runtime.ltx.text_files import read_projection
from runtime.ltx.text_folder import (
    CLASS_NAME,
    check_table,
    check_tokens,
    folder_gemma_version,
    open_tokenizer,
    prompt_ids,
    tower_config,
    tower_files,
)
from runtime.ltx.video_vae import never
from runtime.nonfinite import require_finite

STAGE = "text encode"
# Tensors that may lie beside the tower's: its projection, its tokenizer, its other inputs
_BESIDE = ("text_embedding_projection.", "tokenizer_json", "hf_asset__")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFeatures:
    """Projected tokens, padded on the left: what text.Connectors takes."""

    video_BSD: Tensor
    audio_BSD: Tensor
    mask_BS: Tensor  # int64, 1 where a token is no padding


class TextTower:
    """Tower, tokenizer and projection, on one device in one dtype."""

    def __init__(
        self,
        module: Any,
        tokenizer: Tokenizer,
        projection: TextProjection,
        *,
        bos: int,
        pad: int,
        version: str,
        report: LoadReport,
    ) -> None:
        """module: of the class CLASS_NAME; version: what the folder says of it, "" for nothing."""
        self.module, self.tokenizer, self.projection = module, tokenizer, projection
        self.bos, self.pad, self.version, self.load = bos, pad, version, report

    def tokens(self, prompt: str) -> list[int]:
        """Ids as text_folder.prompt_ids; ValueError for more than fit."""
        ids = prompt_ids(self.tokenizer, self.bos, prompt)
        check_tokens(len(ids))
        return ids

    def hidden_states(
        self, prompt: str, *, cancelled: Callable[[], bool] = never
    ) -> tuple[Tensor, Tensor]:
        """(states [1, S, E, L] in the tower's dtype, mask [1, S] int64), padded on the left."""
        ids = self.tokens(prompt)
        missing = CONTEXT_ROWS - len(ids)
        device = self.module.device
        ids_BS = torch.tensor([[self.pad] * missing + ids], device=device)
        mask_BS = torch.tensor([[0] * missing + [1] * len(ids)], device=device)
        with _stopping_between(self.module.model.language_model.layers, cancelled):
            out = self.module.model(
                input_ids=ids_BS, attention_mask=mask_BS, output_hidden_states=True, use_cache=False
            )
        return torch.stack(out.hidden_states, dim=-1), mask_BS

    def encode(self, prompt: str, *, cancelled: Callable[[], bool] = never) -> TextFeatures:
        """Features of one prompt; NonFinite if the tower gave NaN or infinity."""
        hidden_BSEL, mask_BS = self.hidden_states(prompt, cancelled=cancelled)
        video, audio = self.projection(hidden_BSEL, mask_BS)
        require_finite(video, stage=STAGE, tensor="the video features")
        require_finite(audio, stage=STAGE, tensor="the audio features")
        return TextFeatures(video_BSD=video, audio_BSD=audio, mask_BS=mask_BS)


def load_text_tower(
    folder: Path,
    config: LTXConfig,
    *,
    tokenizer: Path | None = None,
    device: torch.device,
    dtype: torch.dtype,
) -> TextTower:
    """The tower of a folder for a denoiser of this config.

    tokenizer: the folder of tokenizer.json; None: the tower's own, or `tokenizer` beside it.
    CheckpointError: another model, tensors that do not fit, no tokenizer or no projection.
    """
    began = time.perf_counter()
    table = _text_config(folder, config)
    words = open_tokenizer(folder, tokenizer)
    projection = read_projection(folder, config, table["num_hidden_layers"] + 1)
    module = _tower(folder, dtype).to(device)
    projection = projection.to(device, dtype).eval().requires_grad_(False)
    parameters = {**dict(module.named_parameters()), **dict(projection.named_parameters())}
    for name, parameter in parameters.items():
        if not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(f"{folder}: {name} holds NaN or infinity")
    report = LoadReport(
        bytes=sum(p.numel() * p.element_size() for p in parameters.values()),
        seconds=time.perf_counter() - began,
    )
    return TextTower(
        module,
        words,
        projection,
        bos=table["bos_token_id"],
        pad=table["pad_token_id"],
        version=folder_gemma_version(folder),
        report=report,
    )


def _text_config(folder: Path, config: LTXConfig) -> dict[str, Any]:
    """The text part of the tower's config.json, with what transformers takes by default."""
    tower_config(folder)
    table: dict[str, Any] = _config(folder).text_config.to_dict()
    check_table(folder, table, config)
    return table


def _config(folder: Path) -> Any:
    """config.json as transformers reads it."""
    cls = getattr(library("transformers"), CLASS_NAME)
    try:
        return cls.config_class.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # its checks of fields raise an error of no common kind
        raise CheckpointError(
            f"{folder / CONFIG} is not understood by transformers: {said(error)}"
        ) from error


def check_tower(folder: Path) -> None:
    """CheckpointError as load_text_tower, for tensors that the tower lacks or has no use for.

    config.json and headers alone are read: transformers loads zeros that take no memory, as names
    of a file may not be those of its class.
    """
    cls: Any = getattr(library("transformers"), CLASS_NAME)

    class Unfilled(cls):  # type: ignore[misc]
        def initialize_weights(self) -> None:
            """What is missing stays memory that nobody touches."""

    read = tower_files(folder)
    files = {name: path for name, path in tensor_files(folder).items() if path in read}
    zero = torch.zeros((), dtype=torch.bfloat16)
    zeros = {name: zero.expand(shape) for name, shape in shapes_of(files, files).items()}
    options = {"config": _config(folder), "state_dict": zeros}
    _loaded(Unfilled, None, folder, torch.bfloat16, **options)


def _tower(folder: Path, dtype: torch.dtype) -> Any:
    """On the CPU; transformers ties the output embedding, which is not used here."""
    cls = getattr(library("transformers"), CLASS_NAME)
    options = {"local_files_only": True, "use_safetensors": True}
    return _loaded(cls, folder, folder, dtype, **options).eval().requires_grad_(False)


def _loaded(
    cls: Any, source: Path | None, folder: Path, dtype: torch.dtype, **options: object
) -> Any:
    """What transformers makes of `source` and options; CheckpointError about `folder`."""
    library("transformers").utils.logging.disable_progress_bar()
    try:
        module, info = cls.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below, with the others
            **options,
        )
    except Exception as error:  # of whatever kind: a quantised config asks for other packages
        raise CheckpointError(
            f"{folder} cannot be loaded by transformers: {said(error)}"
        ) from error
    misshapen = {name: (got, want) for name, got, want in info["mismatched_keys"]}
    problems = [f"{name} is missing" for name in sorted(set(info["missing_keys"]) - set(misshapen))]
    problems += [
        f"{name} is {list(got)}, expected {list(want)}"
        for name, (got, want) in sorted(misshapen.items())
    ]
    problems += [
        f"{name} is left over"
        for name in sorted(info["unexpected_keys"])
        if not name.startswith(_BESIDE)
    ]
    refuse(problems, CLASS_NAME, tensor_files(folder), folder)
    return module


@contextmanager
def _stopping_between(layers: nn.ModuleList, cancelled: Callable[[], bool]) -> Iterator[None]:
    def before(module: nn.Module, args: Any) -> None:
        del module, args
        if cancelled():
            raise Cancelled

    handles = [layer.register_forward_pre_hook(before) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
