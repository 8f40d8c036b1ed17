"""Prompt and references to conditioning: token layout, modality tags and the Qwen3-VL encoder.

Axes: F frames, H W pixels, L tokens, C residual width, M tokens of one vision block.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime.cancel import Cancelled
from runtime.checkpoints.base import Checkpoint, CheckpointError
from runtime.checkpoints.load import LoadProgress, LoadReport, load_into
from runtime.h3.text_layers import HEAD_DIM, NUM_LAYERS, LanguageConfig, LanguageModel, rope_tables
from runtime.h3.text_linear import build_packed
from runtime.h3.text_vision import MERGE, VisionConfig, VisionTower, patchify
from runtime.h3.tokenizer import Tokenizer

VISION_START, VISION_END, EMPTY = 151652, 151653, 151643
TAG_VISION, TAG_TEXT = 0, 1

Grid = tuple[int, int]
Tap = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextImage:
    """A picture reference: float32 [H,W,3] in [0,1], its sides already the reference's."""

    pixels: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TextVideo:
    """Sampled frames of a video reference, float32 [F,H,W,3] in [0,1], and their seconds."""

    frames: Tensor
    timestamps: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.timestamps or len(self.timestamps) != self.frames.shape[0]:
            raise ValueError(
                f"a video needs one timestamp per frame and at least one frame, got "
                f"{self.frames.shape[0]} frames and {len(self.timestamps)} timestamps"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAudio:
    """A sound reference or soundtrack: only its label reaches the text encoder."""


TextItem = TextImage | TextVideo | TextAudio


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionBlock:
    """The pictures of one vision span: one frame of an image or two of a video, [F,H,W,3]."""

    frames: Tensor
    is_video: bool


PresentationToken = int | VisionBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class TextContext:
    """context: float32 [1,L,C] on the CPU; token_tags: int64 [L], 0 vision and 1 text (5.6)."""

    context: Tensor
    token_tags: Tensor
    tokens: tuple[PresentationToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """Where everything stands; vision block k covers spans[k] = (start, length)."""

    ids: Tensor  # int64, text tokens only
    is_text: Tensor  # [L]
    spans: tuple[tuple[int, int], ...]
    positions: Tensor  # [3,L] float (t, h, w)
    tags: Tensor  # [L]


def presentation_tokens(
    items: tuple[TextItem, ...], prompt: str, tokenizer: Tokenizer
) -> tuple[PresentationToken, ...]:
    """Labels, vision blocks and prompt in order; an empty presentation is one token (5.2).

    Each label and the prompt are tokenised on their own; labels count from 1 per kind, and
    soundtracks and sounds share the `<Audio j>` counter.
    """
    tokens: list[PresentationToken] = []
    counts = {"Picture": 0, "Video": 0, "Audio": 0}
    for item in items:
        kind = _KINDS[type(item)]
        counts[kind] += 1
        tokens += tokenizer.encode(f"<{kind} {counts[kind]}>: ")
        if isinstance(item, TextImage):
            tokens += _vision(item.pixels[None], is_video=False)
        elif isinstance(item, TextVideo):
            tokens += _video(item, tokenizer)
    tokens += tokenizer.encode(prompt)
    return tuple(tokens) or (EMPTY,)


_KINDS: Mapping[type, str] = {TextImage: "Picture", TextVideo: "Video", TextAudio: "Audio"}


def _vision(frames_FHWC: Tensor, *, is_video: bool) -> list[PresentationToken]:
    return [VISION_START, VisionBlock(frames=frames_FHWC, is_video=is_video), VISION_END]


def _video(item: TextVideo, tokenizer: Tokenizer) -> list[PresentationToken]:
    """Frame pairs, each labelled with its mean time; an odd count repeats the last frame (5.2)."""
    order = [*range(len(item.timestamps))]
    order += order[-1:] * (len(order) % 2)
    tokens: list[PresentationToken] = []
    for first, second in zip(order[::2], order[1::2], strict=True):
        seconds = (item.timestamps[first] + item.timestamps[second]) / 2
        tokens += tokenizer.encode(f"<{seconds:.1f} seconds>")
        tokens += _vision(item.frames[[first, second]], is_video=True)
    return tokens


def lay_out(
    tokens: tuple[PresentationToken, ...], grids: list[Grid], device: torch.device
) -> Sequence:
    """Lay tokens out: an explicit text mask, since a typed `<|image_pad|>` is text (5.5, 5.6).

    grids: (rows, columns) of each vision block's patches; a token covers 2x2 of them.
    """
    ids: list[int] = []
    is_text: list[bool] = []
    spans: list[tuple[int, int]] = []
    positions: list[tuple[int, int, int]] = []
    tags: list[int] = []
    now = 0
    for token in tokens:
        if isinstance(token, int):
            ids.append(token)
            is_text.append(True)
            positions.append((now, now, now))
            tags.append(TAG_TEXT)
            now += 1
            continue
        rows, columns = (side // MERGE for side in grids[len(spans)])
        spans.append((len(is_text), rows * columns))
        is_text += [False] * (rows * columns)
        positions += [(now, now + y, now + x) for y in range(rows) for x in range(columns)]
        tags += [TAG_VISION] * (rows * columns)
        now += max(rows, columns)
    for start, length in spans:  # the tokens around a block count as vision
        tags[start - 1] = tags[start + length] = TAG_VISION
    return Sequence(
        ids=torch.tensor(ids, dtype=torch.long, device=device),
        is_text=torch.tensor(is_text, device=device),
        spans=tuple(spans),
        positions=torch.tensor(positions, dtype=torch.float32, device=device).t().contiguous(),
        tags=torch.tensor(tags, dtype=torch.long),
    )


class TextEncoder:
    """Qwen3-VL cut after 50 layers; weights stay as stored on `device`, arithmetic is fp32 (5.7).

    checkpoint: role text_encoder. deepstack_layers: vision blocks with a DeepStack merger, 8, 16
    and 24 in the real tower; shapes do not show them. Raises CheckpointError when the file does not
    fit.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str,
        deepstack_layers: tuple[int, int, int],
        progress: LoadProgress | None = None,
    ) -> None:
        self.device = torch.device(device)
        with torch.device("meta"):
            self.modules = _Model(checkpoint, deepstack_layers)
        self.load: LoadReport = self._load(checkpoint, progress)

    def _load(self, checkpoint: Checkpoint, progress: LoadProgress | None) -> LoadReport:
        return load_into(
            self.modules,
            checkpoint,
            device=self.device,
            dtype_of=compute_dtype,
            build_linear=build_packed,
            ignore=frozenset(checkpoint.names()) - frozenset(used_names(checkpoint)),
            progress=progress,
        )

    @torch.no_grad()
    def encode(
        self,
        tokens: tuple[PresentationToken, ...],
        *,
        on_layer: Tap | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> TextContext:
        """The residual after layer index 49, not normalised, with its modality tags.

        on_layer receives copies by golden name: embeds, mrope_position_ids (with vision only),
        vision_k/{patches,grid_thw,merged,deepstack_j}, layer_NN before the DeepStack add.
        Raises Cancelled between vision blocks or layers.
        """
        tap = _copying(on_layer)
        grids: list[Grid] = []
        merged: list[Tensor] = []
        features: list[list[Tensor]] = []
        for k, block in enumerate(t for t in tokens if isinstance(t, VisionBlock)):
            _stop_if(cancelled)
            patches_PE, grid = patchify(block.frames.to(self.device))
            merged_MC, levels = self.look(patches_PE, grid)
            tap(f"vision_{k}/patches", patches_PE)
            tap(f"vision_{k}/grid_thw", torch.tensor([[1, *grid]]))
            tap(f"vision_{k}/merged", merged_MC)
            for j, level in enumerate(levels):
                tap(f"vision_{k}/deepstack_{j}", level)
            grids.append(grid)
            merged.append(merged_MC)
            features.append(levels)
        sequence = lay_out(tokens, grids, self.device)
        x = self.embed(sequence, merged)
        tap("embeds", x)
        if merged:
            tap("mrope_position_ids", sequence.positions)
        added = [torch.cat(level) for level in zip(*features, strict=True)]
        x = self.run_layers(x, sequence, added, tap=tap, cancelled=cancelled)
        return TextContext(context=x.cpu(), token_tags=sequence.tags, tokens=tokens)

    @torch.no_grad()
    def look(self, patches_PE: Tensor, grid: Grid) -> tuple[Tensor, list[Tensor]]:
        """Patches of one vision block to its tokens [M,C] and DeepStack features (5.4)."""
        return self.modules.visual(patches_PE, grid)

    @torch.no_grad()
    def embed(self, sequence: Sequence, merged: list[Tensor]) -> Tensor:
        """Embeddings [1,L,C] with the tokens of each vision block spliced in."""
        rows = self.modules.model.embed_tokens(sequence.ids)
        x_LC = rows.new_empty(len(sequence.is_text), rows.shape[1])
        x_LC[sequence.is_text] = rows
        for (start, length), merged_MC in zip(sequence.spans, merged, strict=True):
            x_LC[start : start + length] = merged_MC
        return x_LC[None]

    @torch.no_grad()
    def run_layers(
        self,
        x: Tensor,
        sequence: Sequence,
        features: list[Tensor],
        *,
        tap: Tap,
        layers: range = range(NUM_LAYERS),
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """[1,L,C] through `layers`; features[j] is added to the vision tokens after layer j (5.5).

        tap sees the residual itself, before that addition.
        """
        cos, sin = rope_tables(sequence.positions)
        with closing(self._ready(layers)) as ready:
            for index in ready:
                _stop_if(cancelled)
                x = self.modules.model.layers[index](x, cos, sin)
                tap(f"layer_{index:02d}", x)
                if index < len(features):
                    x = add_features(x, sequence, features[index])
        return x

    def _ready(self, layers: range) -> Generator[int]:
        """The indices in order, each once its layer can run."""
        yield from layers


def add_features(x: Tensor, sequence: Sequence, feature: Tensor) -> Tensor:
    """DeepStack: one row of `feature` is added to each vision token of [1,L,C]."""
    x = x.clone()
    x[:, ~sequence.is_text] += feature
    return x


class _Model(nn.Module):
    """Parameter names are the checkpoint's: model.* and visual.* (contract 5.1)."""

    def __init__(self, checkpoint: Checkpoint, deepstack_layers: tuple[int, int, int]) -> None:
        super().__init__()
        language = _language_config(checkpoint)
        self.model = LanguageModel(language)
        self.visual = VisionTower(_vision_config(checkpoint, language.width, deepstack_layers))


def _language_config(checkpoint: Checkpoint) -> LanguageConfig:
    vocabulary, width = checkpoint.shape("model.embed_tokens.weight")
    attention = "model.layers.0.self_attn"
    num_heads, num_kv_heads = (
        checkpoint.shape(f"{attention}.{name}_proj.weight")[0] // HEAD_DIM for name in "qk"
    )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise CheckpointError(
            f"{attention} has {num_heads} query and {num_kv_heads} key heads of {HEAD_DIM}; the "
            f"query heads must be a multiple of the key heads"
        )
    return LanguageConfig(
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn=checkpoint.shape("model.layers.0.mlp.gate_proj.weight")[0],
        vocabulary=vocabulary,
    )


def _vision_config(checkpoint: Checkpoint, out: int, taps: tuple[int, int, int]) -> VisionConfig:
    prefix = "visual.blocks."
    blocks = {n.split(".")[2] for n in checkpoint.names() if n.startswith(prefix)}
    if not (0 <= taps[0] < taps[1] < taps[2] < len(blocks)):
        raise CheckpointError(
            f"DeepStack layers must be three rising vision blocks below {len(blocks)}, got "
            f"{', '.join(map(str, taps))}; the real tower has 8, 16, 24 and a tiny one 0, 1, 2"
        )
    return VisionConfig(
        width=checkpoint.shape("visual.patch_embed.proj.weight")[0],
        depth=len(blocks),
        ffn=checkpoint.shape(f"{prefix}0.mlp.linear_fc1.weight")[0],
        out=out,
        taps=taps,
    )


def used_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """All but the tensors of a full 64-layer file that conditioning leaves out (contract 5.1)."""
    return tuple(name for name in checkpoint.names() if not _beyond(name))


def _beyond(name: str) -> bool:
    if name in ("model.norm.weight", "lm_head.weight"):
        return True
    parts = name.split(".")
    return name.startswith("model.layers.") and parts[2].isdigit() and int(parts[2]) >= NUM_LAYERS


def compute_dtype(name: str, stored: torch.dtype) -> torch.dtype:
    """The vision tower is widened once; its position table rounds in the stored dtype (5.4)."""
    widen = name.startswith("visual.") and name != "visual.pos_embed.weight"
    return torch.float32 if widen else stored


def _copying(on_layer: Tap | None) -> Tap:
    """A tap that hands out copies: the residual is updated in place after it (contract 10.29)."""
    if on_layer is None:
        return lambda name, tensor: None
    return lambda name, tensor: on_layer(name, tensor.detach().clone())


def _stop_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise Cancelled
