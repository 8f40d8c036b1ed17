"""Decoded video frames to upright 8-bit sRGB: matrix, range, HDR, gamut, alpha, rotation.

Axes: H rows, W columns, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from av.sidedata.sidedata import SideData
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import VideoFrame
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation
from numpy.typing import NDArray

from runtime.media.images import Alpha, Colour, blend, hex_colour

# Full chroma interpolation and accurate rounding: 1/255 instead of 4/255 of colour error.
SCALING = (
    Interpolation.BICUBIC
    | Interpolation.ACCURATE_RND
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
)

WHITE_NITS = 203.0  # HDR reference white (BT.2408)
PEAK_NITS = 1000.0  # what the tone curve maps to 1.0; brighter is clipped
KNEE = 0.5  # in units of reference white: below, light passes unchanged

_PQ, _HLG = int(ColorTrc.SMPTE2084), int(ColorTrc.ARIB_STD_B67)
_HDR_NAMES = {_PQ: "PQ", _HLG: "HLG"}
_BT2020, _P3 = int(ColorPrimaries.BT2020), int(ColorPrimaries.SMPTE432)
_GAMUT_NAMES = {_BT2020: "BT.2020", _P3: "Display P3"}
_UNSPECIFIED = 2
_SMPTE170M = 6  # the same matrix as ITU601
_MATRICES = (
    Colorspace.ITU709,
    Colorspace.FCC,
    Colorspace.ITU601,
    _SMPTE170M,
    Colorspace.SMPTE240M,
    Colorspace.BT2020,
)
_TO_BT709 = {
    _BT2020: (
        (1.660491, -0.587641, -0.072850),
        (-0.124550, 1.132900, -0.008349),
        (-0.018151, -0.100579, 1.118730),
    ),
    _P3: (
        (1.224940, -0.224940, 0.0),
        (-0.042057, 1.042057, 0.0),
        (-0.019638, -0.078636, 1.098274),
    ),
}
_BAND_ROWS = 256  # rows toned at once, so that an 8K frame is never whole in float32

ToRGB = Callable[[VideoFrame], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameColour:
    """How the numbers of a stream's frames are to be read (codes of ITU-T H.273)."""

    matrix: int
    full_range: bool
    transfer: int
    hdr: str
    primaries: int
    rgb: bool
    alpha: bool


def frame_colour(frame: VideoFrame, notes: list[str]) -> FrameColour:
    """Reads the frame's tags; what is not tagged is assumed as players do, and noted.

    Raises ValueError for what cannot be converted (IPT of Dolby Vision, YCgCo, XYZ).
    """
    fmt = frame.format
    rgb = fmt.is_rgb or fmt.has_palette
    transfer, primaries = int(frame.color_trc), int(frame.color_primaries)
    if transfer in _HDR_NAMES and primaries == _UNSPECIFIED:
        primaries = _BT2020
    matrix = int(frame.colorspace)
    if not rgb and matrix in (0, _UNSPECIFIED):
        matrix = _assumed_matrix(frame, primaries)
        if not fmt.name.startswith("gray"):
            notes.append(f"no colour matrix in the file, {Colorspace(matrix).name} assumed")
    if fmt.name.startswith("xyz") or (not rgb and matrix not in _MATRICES):
        raise ValueError(
            f"its colours are stored as {fmt.name} with matrix code {matrix}, which cannot be "
            f"converted; export it as H.264 with BT.709 colours"
        )
    return FrameColour(
        matrix=matrix,
        full_range=rgb or frame.color_range == ColorRange.JPEG or fmt.name.startswith("yuvj"),
        transfer=transfer,
        hdr=hdr_name(frame),
        primaries=primaries,
        rgb=rgb,
        alpha=has_alpha(frame),
    )


def hdr_name(frame: VideoFrame) -> str:
    """ "PQ" or "HLG" when the frame is tagged as HDR, else ""."""
    return _HDR_NAMES.get(int(frame.color_trc), "")


def has_alpha(frame: VideoFrame) -> bool:
    """Whether the pixel format stores an alpha plane."""
    return any(component.is_alpha for component in frame.format.components)


def rgb_converter(
    first: VideoFrame, alpha: Alpha, background: Colour, width: int, notes: list[str]
) -> ToRGB:
    """A function from the stream's frames to upright uint8 sRGB [H,W,3], chosen by the first frame.

    `width`: stored width after non-square pixels are squared. HDR and wide-gamut streams go through
    linear light at 16 bits; their alpha, if any, is dropped. Notes say what will be done.
    """
    colour = frame_colour(first, notes)
    upright = _upright(first, notes)
    height = first.height
    if colour.hdr or colour.primaries in _TO_BT709:
        tone = _tone(colour, notes)
        if colour.alpha:
            notes.append("alpha plane of HDR or wide-gamut video dropped")
        return lambda frame: upright(tone(_read(frame, colour, "rgb48le", width, height)))
    if colour.alpha and alpha == "composite":
        notes.append(f"alpha composited on {hex_colour(background)}")
        return lambda frame: upright(blend(_read(frame, colour, "rgba", width, height), background))
    if colour.alpha:
        notes.append("alpha plane dropped, hidden colours of transparent pixels shown")
    return lambda frame: upright(_read(frame, colour, "rgb24", width, height))


def display_turn(frame: VideoFrame) -> tuple[bool, bool, bool]:
    """(transpose, then flip columns, then flip rows) that the display matrix asks for.

    x' = a*x + c*y, y' = b*x + d*y with the matrix stored row by row as a b u c d v x y w.
    """
    side_data = cast("Mapping[SideDataType, SideData]", frame.side_data)  # a TypedDict in the stub
    matrix = side_data.get(SideDataType.DISPLAYMATRIX)
    if matrix is None:
        return False, False, False
    a, b, _, c, d = np.frombuffer(bytes(matrix), "<i4", count=5).tolist()
    if abs(a) + abs(d) >= abs(b) + abs(c):
        return False, a < 0, d < 0
    return True, c < 0, b < 0


def _upright(
    first: VideoFrame, notes: list[str]
) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    transpose, flip_columns, flip_rows = display_turn(first)
    clockwise = {
        (False, True, True): 180,
        (True, True, False): 90,
        (True, False, True): 270,
    }
    turn = transpose, flip_columns, flip_rows
    if turn in clockwise:
        notes.append(f"rotated {clockwise[turn]}° clockwise by its display matrix")
    elif any(turn):
        notes.append("mirrored by its display matrix")

    def apply(image_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if transpose:
            image_HWC = image_HWC.swapaxes(0, 1)
        if flip_columns:
            image_HWC = image_HWC[:, ::-1]
        if flip_rows:
            image_HWC = image_HWC[::-1]
        return np.ascontiguousarray(image_HWC)

    return apply


def _assumed_matrix(frame: VideoFrame, primaries: int) -> int:
    if primaries == _BT2020:
        return int(Colorspace.BT2020)
    large = frame.height >= 720 or frame.width >= 1280
    return int(Colorspace.ITU709 if large else Colorspace.ITU601)


def _read(
    frame: VideoFrame, colour: FrameColour, fmt: str, width: int, height: int
) -> NDArray[Any]:
    return frame.reformat(
        width=width,
        height=height,
        format=fmt,
        src_colorspace=int(Colorspace.ITU709) if colour.rgb else colour.matrix,
        dst_colorspace=int(Colorspace.ITU709) if colour.rgb else colour.matrix,
        src_color_range=int(ColorRange.JPEG if colour.full_range else ColorRange.MPEG),
        dst_color_range=int(ColorRange.JPEG),
        interpolation=int(SCALING),
    ).to_ndarray()


def _tone(
    colour: FrameColour, notes: list[str]
) -> Callable[[NDArray[np.uint16]], NDArray[np.uint8]]:
    """16-bit RGB in the stream's transfer and gamut -> 8-bit sRGB, in bands of rows."""
    gamut = _GAMUT_NAMES.get(colour.primaries, "")
    if colour.hdr:
        notes.append(
            f"HDR ({colour.hdr}{', ' + gamut if gamut else ''}) tone-mapped to SDR: "
            f"{WHITE_NITS:g} nits white, {PEAK_NITS:g} nits peak"
        )
    else:
        notes.append(f"{gamut} colours converted to BT.709")
    linear_65536 = _linear_table(colour.transfer)
    srgb_65536 = _srgb_table()
    matrix = np.array(_TO_BT709.get(colour.primaries, np.eye(3)), dtype=np.float32)

    def band(rgb_HWC: NDArray[np.uint16]) -> NDArray[np.uint8]:
        light_HWC = linear_65536[rgb_HWC]
        if colour.transfer == _HLG:
            light_HWC = hlg_display_light(light_HWC)
        light_HWC = np.maximum(light_HWC @ matrix.T, 0)
        if colour.hdr:
            light_HWC = tone_curve(light_HWC)
        return srgb_65536[(np.minimum(light_HWC, 1) * 65535 + 0.5).astype(np.uint16)]

    return lambda rgb_HWC: np.concatenate(
        [band(rgb_HWC[y : y + _BAND_ROWS]) for y in range(0, rgb_HWC.shape[0], _BAND_ROWS)]
    )


def _linear_table(transfer: int) -> NDArray[np.float32]:
    """Linear light of each 16-bit code; PQ in units of reference white, HLG and SDR in [0,1]."""
    code = np.arange(65536) / 65535
    if transfer == _PQ:
        return (pq_nits(code) / WHITE_NITS).astype(np.float32)
    if transfer == _HLG:
        return hlg_scene_light(code).astype(np.float32)
    srgb = np.where(code <= 0.04045, code / 12.92, ((code + 0.055) / 1.055) ** 2.4)
    return srgb.astype(np.float32)  # the inverse of _srgb_table, so that SDR greys stay as they are


def pq_nits(signal: NDArray[np.float64]) -> NDArray[np.float64]:
    """SMPTE ST 2084 EOTF: signal in [0,1] -> 0 to 10,000 nits."""
    m1, m2 = 2610 / 16384, 2523 / 32
    c1, c2, c3 = 3424 / 4096, 2413 / 128, 2392 / 128
    power = signal ** (1 / m2)
    return 10000 * (np.maximum(power - c1, 0) / (c2 - c3 * power)) ** (1 / m1)


def hlg_scene_light(signal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inverse OETF of BT.2100 HLG: signal in [0,1] -> scene light in [0,1]."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12)


def hlg_display_light(scene_HWC: NDArray[np.float32]) -> NDArray[np.float32]:
    """BT.2100 OOTF for a 1000 nits display (gamma 1.2), in units of reference white."""
    luma_HW1 = scene_HWC @ np.array([[0.2627], [0.6780], [0.0593]], dtype=np.float32)
    return scene_HWC * luma_HW1 ** np.float32(0.2) * np.float32(1000 / WHITE_NITS)


def tone_curve(light_HWC: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales each pixel by f(m)/m, m its largest channel; hue and saturation stay.

    f is the identity up to KNEE, then extended Reinhard x(1 + x/p^2)/(1 + x) with
    x = (m - KNEE)/(1 - KNEE) and p so that f(peak) = 1; value and slope are continuous at the knee.
    """
    most_HW1 = light_HWC.max(axis=-1, keepdims=True)
    x = np.maximum(most_HW1 - KNEE, 0) / (1 - KNEE)
    peak = (PEAK_NITS / WHITE_NITS - KNEE) / (1 - KNEE)
    curve_HW1 = KNEE + (1 - KNEE) * x * (1 + x / peak**2) / (1 + x)
    scale_HW1 = np.where(most_HW1 > KNEE, curve_HW1 / np.maximum(most_HW1, KNEE), 1)
    return (light_HWC * scale_HW1).astype(np.float32)


def _srgb_table() -> NDArray[np.uint8]:
    """8-bit sRGB of each 16-bit linear value."""
    linear = np.arange(65536) / 65535
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return (srgb * 255 + 0.5).astype(np.uint8)
