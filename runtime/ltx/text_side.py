"""Text tower and connectors: resident, or loaded for each new prompt and let go after it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.checkpoints.load import LoadReport
from runtime.ltx.attention import load_ltx_attention
from runtime.ltx.folders import component_folder
from runtime.ltx.forms import FORMS
from runtime.ltx.load import LTXCheckpoint, load_connectors
from runtime.ltx.model import Contexts
from runtime.ltx.text import Connectors
from runtime.ltx.text_folder import PART, check_gemma_versions, folder_gemma_version
from runtime.ltx.text_tower import TextTower, load_text_tower
from runtime.messages import Plan

ATTENTION = "sdpa"  # of the connectors: exact whatever the denoiser has; a prompt's takes moments


class TextSide:
    """What makes contexts of a prompt, on the device while it is needed.

    version_note: a sentence where tower or denoiser does not say which Gemma it belongs to, or "".
    """

    def __init__(
        self,
        plan: Plan,
        checkpoint: LTXCheckpoint,
        device: torch.device,
        dtype: torch.dtype,
        progress: Callable[[str, int, int], None],
    ) -> None:
        """CheckpointError if the tower is another than the denoiser was made for."""
        self._plan, self._checkpoint = plan, checkpoint
        self._device, self._dtype, self._progress = device, dtype, progress
        self._tower: TextTower | None = None
        self._connectors: Connectors | None = None
        self.reports: list[LoadReport] = []
        folder = component_folder(plan.models.text_encoder, PART)
        wanted = checkpoint.census.gemma_version
        self.version_note = check_gemma_versions(wanted, folder_gemma_version(folder)) or ""
        if plan.text_encoder == "resident":
            self.reports.append(self.tower(lambda: None).load)
            self._connectors = self._load_connectors()

    def tower(self, check: Callable[[], None]) -> TextTower:
        """On the device; check raises Cancelled, before a load begins."""
        if self._tower is None:
            check()
            self._progress("load text encoder", 0, 1)
            self._tower = load_text_tower(
                self._plan.models.text_encoder,
                self._checkpoint.census.config,
                tokenizer=self._plan.models.tokenizer,
                device=self._device,
                dtype=self._dtype,
            )
            self._progress("load text encoder", 1, 1)
        return self._tower

    def connect(self, video_BSD: Tensor, audio_BSD: Tensor, mask_BS: Tensor, /) -> Contexts:
        """Contexts of projected tokens, as text.Connectors."""
        if self._connectors is None:
            self._connectors = self._load_connectors()
        made: Contexts = self._connectors(video_BSD, audio_BSD, mask_BS)
        return made

    def release(self) -> None:
        """Lets go of what does not stay resident."""
        if self._plan.text_encoder != "resident":
            self._tower = self._connectors = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _load_connectors(self) -> Connectors:
        attend = load_ltx_attention(
            ATTENTION, self._checkpoint.census.config, self._device, self._dtype
        )
        return load_connectors(
            self._checkpoint,
            attend,
            device=self._device,
            dtype=self._dtype,
            form=FORMS[self._plan.ltx_rounding],
        )
