"""The planner's memory formulas against the model itself, and against the run on an H200."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from app import memory, models
from app.memory import Shape
from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.classify import Part, classify
from runtime.checkpoints.demo import write_random
from runtime.checkpoints.header import read_header
from runtime.h3 import lifetime
from runtime.h3.audio_vae import build_audio_vae
from runtime.h3.config import H3Config
from runtime.h3.gathered import GatheredQKV, PackedOut, gather_rows
from runtime.h3.load import DTYPES, load_denoiser
from runtime.h3.model import Block, RowSpan
from runtime.h3.modulation import KEPT_BYTES
from runtime.h3.sizes import latent_frames
from runtime.h3.text import VisionBlock
from runtime.h3.text_layers import LanguageConfig, Layer
from runtime.h3.text_linear import DequantisedLinear
from runtime.h3.text_streamed import LayeredTextEncoder
from runtime.h3.text_vision import VisionConfig, VisionTower
from runtime.h3.video_tiles import num_chunks, split
from runtime.h3.video_vae import VideoVAE, VideoVaeConfig
from runtime.kernels.attention.own_v import with_own_v
from runtime.kernels.elementwise.eager import Eager
from runtime.kernels.elementwise.vae_eager import VaeEager
from runtime.kernels.linear.nvfp4_native import NVFP4NativeLinear, NVFP4Rows
from runtime.messages import ModelFiles, Plan, Ref2VARequest
from runtime.parallel.mesh import Exchange, Group, Landing, Mesh
from runtime.parallel.packed_rows import PackedGather, PackedReturn
from runtime.parallel.shares import RowShares, head_shares, row_shares
from runtime.parallel.turns import EDGES, HALVES
from runtime.parallel.ulysses import Ulysses
from tests.checkpoint_files import tiny
from tests.unit.full_size import write_set
from tests.unit.live_bytes import peak_bytes

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs/benchmarks/h200x1_nvfp4_dequant_ref2va_960x544_124f_202611.json"
DEMO = ROOT / "presets" / "demo"
META = torch.device("meta")
ROLES = ("dit", "text_encoder", "video_vae", "audio_vae")
REQUEST = Ref2VARequest(id="r", prompt="")
SHAPE = Shape(
    rows=20_342,
    text_rows=552,
    vision_tokens=510,
    images=True,
    video_pixels=0,
    sound_latents=0,
    audio_latents=207,
)


def plan_of(files: Mapping[str, Path], **fields: str) -> Plan:
    return Plan(name="full", models=ModelFiles(**files), text_encoder="resident", **fields)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Mapping[str, Part]]:
    """The plan of the benchmark over files of the published sizes."""
    plan = plan_of(write_set(tmp_path_factory.mktemp("full")))
    found = models.look(plan)
    assert [file.problem for file in found.files] == [""] * 4
    return plan, found.parts


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q).transpose(1, 2).flatten(2)


def test_the_measured_peak_of_the_h200_is_met_within_one_percent(
    full: tuple[Plan, Mapping[str, Part]],
) -> None:
    plan, parts = full
    measured = json.loads(RECORD.read_text())["runs"][0]["peak_memory_bytes"]
    # The run kept the tables of one step at a time; those of a schedule are kept since.
    found = memory.phases(parts, plan, Ref2VARequest(id="r", prompt="", steps=1), SHAPE)
    most = max(found, key=lambda phase: phase.bytes)
    assert most.name == "denoise"
    assert most.bytes - memory.CONTEXT_BYTES == pytest.approx(measured, rel=0.01)


def test_the_rank_with_most_heads_is_planned_for(full: tuple[Plan, Mapping[str, Part]]) -> None:
    """56 heads on 6 ranks are 10 for the first, not 9.33; 112 tiles of the MLP 19, not 18.67."""
    plan, parts = full
    blocks = {"attn": 0, "mlp": 0}
    for tensor, size in memory._sizes(parts["dit"], plan):
        if memory.SHARED.match(tensor.name):
            blocks["attn" if ".attn." in tensor.name else "mlp"] += size
    whole, most = (
        memory.resident(parts["dit"], replace(plan, layout=n)) for n in ("single", "TP6")
    )
    saved = blocks["attn"] * (1 - 10 / 56) + blocks["mlp"] * (1 - 19 / 112)
    assert whole - most == pytest.approx(saved, rel=1e-4)


@pytest.mark.parametrize("rows", [2_000, 20_342])
def test_denoising_is_what_a_block_holds_at_once(
    full: tuple[Plan, Mapping[str, Part]], rows: int
) -> None:
    plan, parts = full
    block = _block()
    x = torch.empty(rows, 5376, dtype=torch.bfloat16, device=META)
    rope = torch.empty(1, rows, 1, 48, 2, 2, dtype=torch.bfloat16, device=META)
    tables = [torch.empty(12, 5376, device=META) for _ in range(6)]
    spans = [RowSpan(0, rows, 0)]
    held = x.nbytes + rope.nbytes  # alive over all blocks
    counted = held + peak_bytes(
        lambda: block(x, tables, spans, rope), x, rope, *tables, *block.parameters()
    )
    assert memory.denoise(parts["dit"], plan, rows) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("rows", [2_000, 20_342])
def test_low_memory_is_what_its_block_holds_at_once(
    full: tuple[Plan, Mapping[str, Part]], rows: int
) -> None:
    """The NVFP4 file without widened weights: those are the loader's, not the block's."""
    plan, parts = full
    low = replace(plan, memory="low", weights="cached")
    block = _block()
    x = torch.empty(rows, 5376, dtype=torch.bfloat16, device=META)
    rope = torch.empty(1, rows, 1, 48, 2, 2, dtype=torch.bfloat16, device=META)
    tables = [torch.empty(12, 5376, device=META) for _ in range(6)]
    spans = [RowSpan(0, rows, 0)]
    held = x.nbytes + rope.nbytes
    counted = held + peak_bytes(
        lambda: lifetime.forward(block, x, tables, spans, rope),
        x,
        rope,
        *tables,
        *block.parameters(),
    )
    assert memory.denoise(parts["dit"], low, rows) == pytest.approx(counted, rel=0.03)
    assert memory.LOW_GROUP_ROWS == lifetime.GROUP_ROWS


def test_low_memory_takes_under_60_percent_at_the_reference_shape(
    full: tuple[Plan, Mapping[str, Part]],
) -> None:
    plan, parts = full
    plain = memory.denoise(parts["dit"], plan, 20_342)
    assert memory.denoise(parts["dit"], replace(plan, memory="low"), 20_342) < 0.6 * plain
    cached = replace(plan, memory="low", weights="cached")
    assert memory.denoise(parts["dit"], cached, 20_342) < 0.55 * plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Far(Group):
    """Ranks that are not there: what they send is of the right size."""

    def exchange(
        self, sent_N: Tensor, to: Sequence[int], of: Sequence[int], place: int = 0
    ) -> Exchange:
        """As a group's."""
        return Exchange(sent_N.new_empty(sum(of)), sent_N)


class FarCopies:
    """As a group's by copy engines, received in windows that are there before."""

    def __init__(self) -> None:
        self.windows: dict[tuple[object, ...], Tensor] = {}

    def exchange(self, sent_N: Tensor, to: Sequence[int], of: Sequence[int], place: int) -> Tensor:
        """Of the right size."""
        raise AssertionError("a block sends heads by `put`")

    def put(self, pieces: Sequence[Tensor], landings: Sequence[Landing], place: int) -> Tensor:
        """The window of the first rank."""
        shape = landings[0].shape
        if (shape, place) not in self.windows:
            self.windows[shape, place] = pieces[0].new_empty(shape)
        return self.windows[shape, place].view(shape)

    @property
    def num_bytes(self) -> int:
        """Of the windows."""
        return sum(window.nbytes for window in self.windows.values())


class Native(NVFP4NativeLinear):
    """The forms of its operands and its result, without its kernels."""

    def __init__(self, out_features: int, in_features: int) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = out_features, in_features

    def packed_rows(self, x: Tensor, columns: slice = slice(None)) -> NVFP4Rows:
        torch.amax(x.abs())
        codes = torch.empty(-(-len(x) // 16) * 16, x.shape[1] // 2, dtype=torch.uint8, device=META)
        tiles = torch.empty(-(-len(x) // 128) * 128, x.shape[1] // 16, device=META)
        return NVFP4Rows(codes, tiles.to(torch.float8_e4m3fn), tiles[0, 0], len(x), x.dtype)

    def multiplied(self, x: NVFP4Rows) -> Tensor:
        return torch.empty(x.num_rows, self.out_features, dtype=x.dtype, device=META)


def of_first_rank(ranks: int, rows: int, gather: str, copies: FarCopies | None) -> int:
    """Bytes that its block holds at once, of `rows` in all."""
    counts = row_shares(rows, ranks)
    own = counts[0]
    group = Far(size=ranks, members=object(), copies=copies)  # type: ignore[arg-type]
    block = _block()
    attn, shared = block.attn, RowShares(counts)
    attended = with_own_v(attend, strided_v=False, copy=Tensor.copy_)
    if gather == "packed_nvfp4":
        heads = head_shares(56, ranks)
        qkv, out = Native(3 * heads[0] * 128, 5376), Native(5376, 56 * 128)
        attn.qkv_proj, attn.out_proj = GatheredQKV(qkv), PackedOut(out, heads, 0)  # type: ignore[assignment]
        there, back = PackedGather(group, shared), PackedReturn(group, shared)
        assert gather_rows(attn, attended, there, back, Mesh(rows=group))
    else:
        parts = HALVES if copies is None else EDGES
        attn.attend = Ulysses(attended, group, shared, Exchange.wait, parts)
    x = torch.empty(own, 5376, dtype=torch.bfloat16, device=META)
    turned = rows if gather == "packed_nvfp4" else own
    rope = torch.empty(1, turned, 1, 48, 2, 2, dtype=torch.bfloat16, device=META)
    tables = [torch.empty(12, 5376, device=META) for _ in range(6)]
    # the gathered rows are let go before the rest, so attention alone tells whether they are less
    normed = torch.empty_like(x)
    with torch.inference_mode():
        attn(normed, rope)
    there = () if copies is None else tuple(copies.windows.values())
    attention = peak_bytes(lambda: attn(normed, rope), normed, rope, *there, *block.parameters())
    whole = peak_bytes(
        lambda: block(x, tables, [RowSpan(0, own, 0)], rope),
        *(x, rope, *tables, *there, *block.parameters()),
    )
    assert attention + normed.nbytes <= whole
    stays = sum(window.nbytes for window in there) + rows * 192 * 2  # rotation of all rows
    return whole + x.nbytes + stays


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize(
    ("gather", "transport"),
    [
        ("heads", "collective"),
        ("packed_nvfp4", "collective"),
        ("heads", "copy_engine"),  # whose windows stay beside what blocks hold
    ],
)
def test_ranks_that_share_rows_hold_what_their_blocks_do(
    full: tuple[Plan, Mapping[str, Part]], gather: str, transport: str, ranks: int
) -> None:
    plan, parts = full
    shared = replace(plan, layout=f"U{ranks}", device="cuda", nvfp4="nvfp4_native")
    shared = replace(shared, gather=gather, transport=transport)
    copies = FarCopies() if transport == "copy_engine" else None
    counted = of_first_rank(ranks, 20_511, gather, copies)
    assert memory.denoise(parts["dit"], shared, 20_511) == pytest.approx(counted, rel=0.01)
    split = replace(shared, row_split=":".join(["1.5", *["1"] * (ranks - 1)]))
    assert memory.denoise(parts["dit"], split, 20_511) > 1.1 * counted


def test_windows_of_both_sides_stay_while_other_stages_run(
    full: tuple[Plan, Mapping[str, Part]],
) -> None:
    plan, parts = full
    plan = replace(plan, layout="U2", device="cuda")
    copied = replace(plan, transport="copy_engine")
    once = memory.windows(parts["dit"], copied, SHAPE.rows)
    assert memory.windows(parts["dit"], plan, SHAPE.rows) == 0 < once
    for cfg, sides in ((1.0, 1), (5.0, 2)):
        asked = replace(REQUEST, cfg=cfg)
        before, after = (
            {phase.name: phase.bytes for phase in memory.phases(parts, one, asked, SHAPE)}
            for one in (plan, copied)
        )
        for name in ("text encode", "video VAE decode"):
            assert after[name] - before[name] == sides * once
        windows = memory.denoise(parts["dit"], copied, SHAPE.rows) + (sides - 1) * once
        own = memory.denoise(parts["dit"], plan, SHAPE.rows)
        assert after["denoise"] - before["denoise"] == windows - own
        assert after["weights"] == before["weights"]


def test_gathered_rows_take_less_than_exchanged_heads_and_a_part_of_the_weights(
    full: tuple[Plan, Mapping[str, Part]],
) -> None:
    """QKV of a rank's heads alone: 10 of 56 on six ranks."""
    plan, parts = full
    heads = replace(plan, layout="U6", nvfp4="nvfp4_native")
    packed = replace(heads, gather="packed_nvfp4")
    held = {
        name: memory.denoise(parts["dit"], one, 20_511)
        for name, one in (("heads", heads), ("packed", packed))
    }
    assert held["packed"] < 0.75 * held["heads"]
    qkv = sum(s for t, s in memory._sizes(parts["dit"], heads) if t.name in _qkv(parts["dit"]))
    saved = memory.resident(parts["dit"], heads) - memory.resident(parts["dit"], packed)
    assert saved == pytest.approx(qkv * (1 - 10 / 56), rel=1e-4)


def _qkv(dit: Part) -> set[str]:
    """Of the blocks, not of the text refiner."""
    found = {t.name for t in dit.tensors if re.match(r"blocks\.\d+\.attn\.qkv_proj\.", t.name)}
    assert len(found) >= 50
    return found


def _block() -> Block:
    config = H3Config(
        hidden=5376,
        num_layers=50,
        num_refiner_layers=2,
        num_heads=56,
        head_dim=128,
        ffn=14336,
        text_dim=5120,
        video_channels=24,
        audio_channels=32,
        num_inv_freq=16,
        time_dim=8,
        curve_grid=1025,
        time_hidden=0,
        frequency_dim=0,
    )
    with META:
        return Block(config, attend, Eager()).to(torch.bfloat16)


@pytest.mark.parametrize("rows", [500, 20_000])
def test_text_is_what_a_layer_holds_at_once(
    full: tuple[Plan, Mapping[str, Part]], rows: int
) -> None:
    config = LanguageConfig(width=5120, num_heads=64, num_kv_heads=8, ffn=25600, vocabulary=9)
    with META:
        layer = Layer(config).to(torch.bfloat16)
        x, turn = torch.empty(1, rows, 5120), torch.empty(rows, 128)
    counted = x.nbytes + peak_bytes(lambda: layer(x, turn, turn), x, turn, *layer.parameters())
    shape = replace(SHAPE, text_rows=rows, vision_tokens=0)
    assert memory.text_encode(full[1]["text_encoder"], shape) == pytest.approx(counted, rel=0.02)


def test_the_vision_tower_of_a_large_picture_is_covered(
    full: tuple[Plan, Mapping[str, Part]],
) -> None:
    rows, columns = 128, 228
    config = VisionConfig(width=1152, depth=27, ffn=4304, out=5120, taps=(8, 16, 24))
    with META:
        tower, patches = VisionTower(config), torch.empty(rows * columns, 1536)
    counted = patches.nbytes + peak_bytes(
        lambda: tower(patches, (rows, columns)), patches, *tower.parameters()
    )
    shape = replace(SHAPE, text_rows=1, vision_tokens=rows * columns // 4)
    assert memory.text_encode(full[1]["text_encoder"], shape) == pytest.approx(counted, rel=0.1)


@pytest.fixture(scope="module", params=["fp16", "fp32"])
def vae(request: pytest.FixtureRequest) -> tuple[str, VideoVAE]:
    config = VideoVaeConfig(
        channels=(128, 256, 256, 512, 512, 1024),
        moments=48,
        latent_channels=24,
        hidden=2048,
        inner=8192,
        depth=36,
    )
    model = VideoVAE(config, attend, VaeEager()).to(META, DTYPES[request.param])
    return request.param, model


@pytest.mark.parametrize("frames", [1, 17])
def test_a_tile_of_the_video_encoder_is_covered(vae: tuple[str, VideoVAE], frames: int) -> None:
    dtype, model = vae
    pixels = torch.empty(1, 3, frames, 256, 256, dtype=DTYPES[dtype], device=META)
    counted = peak_bytes(
        lambda: model.quant_conv(model.encoder(pixels)), pixels, *model.parameters()
    )
    shape = replace(SHAPE, images=frames == 1, video_pixels=256 * 256 if frames > 1 else 0)
    plan = _vae_plan(dtype)
    assert counted * 0.98 <= memory.reference_encode(plan, shape) <= counted * 1.1 + 2e7


@pytest.mark.parametrize("tiles", [1, 4])
def test_a_decoded_clip_is_covered(vae: tuple[str, VideoVAE], tiles: int) -> None:
    """A batch, the raw tiles of the one before; raw clip, tail, faded head, frames in fp32."""
    dtype, model = vae
    request = replace(REQUEST, width=448, height=448)
    batch = torch.empty(tiles, 24, 7, 16, 16, dtype=DTYPES[dtype], device=META)
    decoder = peak_bytes(
        lambda: model._decode_tiles(batch, None),
        batch,
        *model.parameters(),
        *model.buffers(),
    )
    raw = 28 * 3 * 448 * 448 * batch.itemsize
    before = (tiles - 1) * 28 * 3 * 256 * 256 * batch.itemsize
    found = memory.video_decode(replace(_vae_plan(dtype), vae_tiles=tiles), request)
    assert decoder + raw + before <= found <= 1.6 * (decoder + raw + before) + 1.5e8


@pytest.mark.parametrize(
    ("width", "height", "frames", "tiles"),
    [(960, 544, 124, 105), (256, 256, 5, 1), (288, 32, 22, 2), (448, 448, 39, 8)],
)
def test_tiles_are_counted_as_the_vae_counts_them(
    width: int, height: int, frames: int, tiles: int
) -> None:
    request = replace(REQUEST, width=width, height=height, frames=frames)
    chunks = num_chunks(latent_frames(frames))
    assert memory.decoder_tiles(request) == chunks * len(split(height)) * len(split(width)) == tiles


def test_no_more_tiles_take_memory_than_a_decode_has() -> None:
    plan = replace(_vae_plan("fp16"), vae_tiles=1024)
    request = replace(REQUEST, width=288, height=32, frames=22)
    want = memory.video_decode(replace(plan, vae_tiles=2), request)
    assert memory.video_decode(plan, request) == want


def _vae_plan(dtype: str) -> Plan:
    file = Path("none")
    files = ModelFiles(dit=file, text_encoder=file, video_vae=file, audio_vae=file)
    return Plan(name="vae", models=files, video_vae_dtype=dtype)


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_sound_takes_what_the_audio_vae_holds_at_once(way: str, tmp_path: Path) -> None:
    file = write_set(tmp_path)["audio_vae"]
    with META:
        model = build_audio_vae(open_checkpoint(file, "audio_vae"))
    latents = 400
    if way == "encode":
        made = torch.empty(2, 1, 800 * latents, device=META)
        counted = peak_bytes(lambda: model.encoder(made, lambda: False), made, *model.parameters())
        found = memory.reference_encode(
            _vae_plan("fp16"), replace(SHAPE, images=False, sound_latents=latents)
        )
    else:
        made = torch.empty(2, 32, latents, device=META)
        counted = peak_bytes(
            lambda: model.decoder(model.dec_in_proj(made), lambda: False),
            made,
            *model.parameters(),
        )
        found = memory.audio_decode(latents)
    assert found == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_weights_are_the_bytes_that_the_loader_makes(dtype: str) -> None:
    file = DEMO / "h3_tiny_pruned_bf16.safetensors"
    plan = replace(_vae_plan("fp32"), device="cpu", dtype=dtype)
    checkpoint = open_checkpoint(file, "dit")
    model, _ = load_denoiser(checkpoint, plan, torch.device("cpu"))
    loaded = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    found = models.look(replace(plan, models=replace(plan.models, dit=file)))
    assert found.files[0].resident_bytes == loaded


@pytest.mark.parametrize("form", ["pruned_bf16", "pruned_nvfp4", "full_fp8"])
@pytest.mark.parametrize(
    "fields",
    [
        {"weights": "cached"},
        {"dense": "fp8_rowwise", "nvfp4": "fp8_rowwise", "fp8": "fp8_rowwise"},
        {"dense": "fp8_tensorwise", "nvfp4": "fp8_tensorwise", "fp8": "fp8_tensorwise"},
    ],
    ids=["cached", "rowwise", "tensorwise"],
)
def test_weights_in_another_form_are_the_bytes_that_the_loader_makes(
    tmp_path: Path, form: str, fields: dict[str, str]
) -> None:
    file = tiny(tmp_path, "dit", form)
    plan = replace(_vae_plan("fp32"), device="cpu", dtype="bf16", **fields)
    model, _ = load_denoiser(open_checkpoint(file, "dit"), plan, torch.device("cpu"))
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    found = models.look(replace(plan, models=replace(plan.models, dit=file)))
    assert found.files[0].resident_bytes == sum(t.nbytes for t in tensors.values())


def test_int8_layers_hold_more_at_once(
    full: tuple[Plan, Mapping[str, Part]], tmp_path: Path
) -> None:
    plan = plan_of(write_set(tmp_path, dit="pruned_int8"))
    int8 = models.look(plan).parts["dit"]
    more = memory.denoise(int8, plan, 1000) - memory.denoise(full[1]["dit"], full[0], 1000)
    assert more == 2 * 1000 * 1.5 * 14336


# ---- weights that are read when they are due, tables, a step cache


def test_the_full_bf16_checkpoint_stays_under_48_gib_at_the_reference_shape(
    tmp_path: Path,
) -> None:
    plan = plan_of(write_set(tmp_path, dit="full_bf16", text_encoder="bf16"))
    plan = replace(plan, adaln="offloaded", text_encoder="layers")
    parts, request = models.look(plan).parts, Ref2VARequest(id="r", prompt="")
    assert max(phase.bytes for phase in memory.phases(parts, plan, request, SHAPE)) < 48 * 2**30
    resident = replace(plan, adaln="resident")
    assert memory.weights(parts, resident)["dit"] - memory.weights(parts, plan)["dit"] > 24 * 2**30


@pytest.mark.parametrize("form", ["full_bf16", "pruned_bf16"])
def test_tables_of_a_schedule_are_those_the_denoiser_keeps(form: str, tmp_path: Path) -> None:
    file = tmp_path / "dit.safetensors"
    write_random(file, "dit", size="tiny", format=form)
    plan = replace(plan_of(dict.fromkeys(ROLES, file)), device="cpu", dtype="bf16")
    model, _ = load_denoiser(open_checkpoint(file, "dit"), plan, torch.device("cpu"))
    part, request = classify(read_header(file)).parts[0], Ref2VARequest(id="r", prompt="", steps=12)
    assert memory.tables(part, plan, request) == 12 * model.table_bytes(4)


def test_no_more_tables_are_counted_than_are_kept(full: tuple[Plan, Mapping[str, Part]]) -> None:
    long = Ref2VARequest(id="r", prompt="", steps=1000)
    assert KEPT_BYTES * 0.95 < memory.tables(full[1]["dit"], full[0], long) <= KEPT_BYTES


# ---- a text encoder in layers, a step cache


def test_nvfp4_with_a_text_encoder_in_layers_stays_under_24_gib_at_the_reference_shape(
    full: tuple[Plan, Mapping[str, Part]],
) -> None:
    plan, parts = full
    layers = replace(plan, text_encoder="layers")
    request = Ref2VARequest(id="r", prompt="")
    found = {phase.name: phase.bytes for phase in memory.phases(parts, layers, request, SHAPE)}
    assert max(found.values()) < 24 * 2**30
    assert found["text encode"] < found["denoise"]
    whole = memory.phases(parts, replace(plan, text_encoder="stream"), request, SHAPE)
    assert max(phase.bytes for phase in whole) > 24 * 2**30


@pytest.mark.parametrize("format", ["bf16", "nvfp4_awq"])
def test_layers_are_counted_as_the_encoder_holds_them(format: str, tmp_path: Path) -> None:
    file = tmp_path / "text.safetensors"
    write_random(file, "text_encoder", size="tiny", format=format)
    encoder = LayeredTextEncoder(
        open_checkpoint(file, "text_encoder"), device="cpu", deepstack_layers=(0, 1, 2)
    )
    held: dict[str, int] = {}
    picture = VisionBlock(frames=torch.rand(1, 64, 64, 3), is_video=False)
    encoder.encode((1, picture, 2), on_layer=lambda name, x: held.update({name: _settled(encoder)}))
    part = classify(read_header(file)).parts[0]
    plan = replace(plan_of(dict.fromkeys(ROLES, file)), text_encoder="layers")
    long = replace(SHAPE, text_rows=10**6, vision_tokens=0)
    large = replace(SHAPE, text_rows=0, vision_tokens=10**6)
    two_layers = max(size for name, size in held.items() if name.startswith("layer_"))
    assert two_layers > held["layer_49"]
    assert memory.text_phase(part, plan, long) == two_layers + memory.text_encode(part, long)
    vision = held["vision_0/merged"] + memory.text_encode(part, large)
    assert memory.text_phase(part, plan, large) == vision


def _settled(encoder: LayeredTextEncoder) -> int:
    """Its bytes once the thread that fetches the next layer is done, or stands still."""
    before = -1
    while (now := _bytes(encoder)) != before:
        before = now
        time.sleep(0.01)
    return now


def _bytes(encoder: LayeredTextEncoder) -> int:
    packed = [m.packed for m in encoder.modules.modules() if isinstance(m, DequantisedLinear)]
    tensors = [p for p in encoder.modules.parameters() if not p.is_meta]
    return sum(t.nbytes for t in [*tensors, *(t for p in packed for t in p.tensors.values())])


@pytest.mark.parametrize(("cache", "copies"), [("off", 0), ("h3_cache", 4), ("spectrum", 6)])
def test_a_step_cache_is_counted_by_the_copies_it_keeps(
    cache: str, copies: int, full: tuple[Plan, Mapping[str, Part]]
) -> None:
    plan, parts = full
    request = Ref2VARequest(id="r", prompt="")
    more = memory.step_cache(parts["dit"], replace(plan, cache=cache), request, 20_342)
    assert more == copies * 2 * 20_342 * 5376


def test_graphs_hold_a_step_s_activations_while_the_other_stages_run(
    full: tuple[Plan, Mapping[str, Part]],
) -> None:
    plan, parts = full
    graphs, request = replace(plan, graphs=True, kernel_times=False), REQUEST
    phases = [memory.phases(parts, p, request, SHAPE) for p in (plan, graphs)]
    more = {a.name: b.bytes - a.bytes for a, b in zip(*phases, strict=True)}
    buffers = memory.graph_buffers(parts["dit"], plan, request, SHAPE.rows)
    held = memory.denoise(parts["dit"], plan, SHAPE.rows) + buffers
    assert more.pop("weights") == 0
    assert more.pop("denoise") == buffers
    assert set(more.values()) == {held}
    assert (
        memory.graph_buffers(parts["dit"], plan, replace(request, cfg=4.0), SHAPE.rows)
        == 2 * buffers
    )
