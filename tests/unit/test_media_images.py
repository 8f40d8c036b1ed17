"""Reference pictures: what every kind of image file becomes, and which files are refused."""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from runtime.media.images import BACKGROUND, load_image


def corners() -> np.ndarray:
    """A 6x4 picture whose four corners differ."""
    image = np.zeros((4, 6, 3), np.uint8)
    image[0, 0], image[0, -1] = (255, 0, 0), (0, 255, 0)
    image[-1, 0], image[-1, -1] = (0, 0, 255), (255, 255, 255)
    return image


def bytes_of(path: Path, **how: object) -> np.ndarray:
    """Loaded pixels back as uint8 [H,W,3]."""
    pixels = load_image(path, **how).pixels
    assert pixels.dtype == np.float32 and pixels.shape[0] == 1
    return np.rint(pixels[0] * 255).astype(np.uint8)


def test_pixels_are_the_stored_bytes_over_255_in_float32(tmp_path: Path) -> None:
    ramp = np.arange(768, dtype=np.uint32).astype(np.uint8).reshape(16, 16, 3)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    loaded = load_image(tmp_path / "a.png")
    assert np.array_equal(loaded.pixels[0], ramp.astype(np.float32) / np.float32(255))
    assert loaded.notes == ()


# EXIF orientation -> what turns the upright picture into the stored one
STORED = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}


@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation_turns_the_picture_upright(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(STORED[orientation](corners()))
    Image.fromarray(stored).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(bytes_of(tmp_path / "a.png"), corners())
    assert any("EXIF" in note for note in load_image(tmp_path / "a.png").notes)


def half_transparent(path: Path) -> Path:
    rgba = np.zeros((2, 3, 4), np.uint8)
    rgba[:, 0] = (200, 100, 0, 255)
    rgba[:, 1] = (200, 100, 0, 128)
    rgba[:, 2] = (200, 100, 0, 0)
    Image.fromarray(rgba).save(path)
    return path


def test_alpha_is_composited_on_the_stated_grey(tmp_path: Path) -> None:
    path = half_transparent(tmp_path / "a.png")
    got = bytes_of(path)
    assert got[0].tolist() == [[200, 100, 0], [164, 114, 64], list(BACKGROUND)]
    assert load_image(path).notes == ("alpha composited on #808080",)


def test_alpha_is_composited_on_a_given_colour(tmp_path: Path) -> None:
    path = half_transparent(tmp_path / "a.png")
    assert bytes_of(path, background=(255, 0, 10))[0, 2].tolist() == [255, 0, 10]


def test_cut_alpha_shows_the_hidden_colour_as_comfyui_does(tmp_path: Path) -> None:
    path = half_transparent(tmp_path / "a.png")
    assert (bytes_of(path, alpha="cut") == (200, 100, 0)).all()
    assert "dropped" in load_image(path, alpha="cut").notes[0]


def test_opaque_alpha_plane_changes_nothing_and_is_not_noted(tmp_path: Path) -> None:
    rgba = np.dstack([corners(), np.full((4, 6), 255, np.uint8)])
    Image.fromarray(rgba).save(tmp_path / "a.webp", lossless=True)
    assert np.array_equal(bytes_of(tmp_path / "a.webp"), corners())
    assert load_image(tmp_path / "a.webp").notes == ()


def test_transparent_palette_entry_is_composited(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1]], np.uint8), mode=None).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.save(tmp_path / "a.png", transparency=1)
    assert bytes_of(tmp_path / "a.png")[0].tolist() == [[10, 20, 30], list(BACKGROUND)]


def test_16_bit_grey_keeps_its_brightness(tmp_path: Path) -> None:
    grey = np.array([[0, 257 * 100, 65535]], np.uint16)
    Image.fromarray(grey).save(tmp_path / "a.png")
    assert bytes_of(tmp_path / "a.png")[0, :, 0].tolist() == [0, 100, 255]
    assert "16-bit" in load_image(tmp_path / "a.png").notes[0]


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            png_chunk(b"IHDR", header),
            png_chunk(b"IDAT", zlib.compress(rows)),
            png_chunk(b"IEND", b""),
        )
    )


def test_16_bit_rgb_keeps_its_brightness(tmp_path: Path) -> None:
    row = b"\0" + struct.pack(">6H", 65535, 257 * 7, 0, 257 * 200, 257, 257 * 128)
    (tmp_path / "a.png").write_bytes(png(2, 1, 16, 2, row))
    assert bytes_of(tmp_path / "a.png")[0].tolist() == [[255, 7, 0], [200, 1, 128]]


def test_grey_and_grey_with_alpha_become_rgb(tmp_path: Path) -> None:
    Image.fromarray(np.array([[7, 200]], np.uint8)).save(tmp_path / "l.png")
    assert bytes_of(tmp_path / "l.png")[0].tolist() == [[7, 7, 7], [200, 200, 200]]
    both = Image.merge("LA", [Image.new("L", (2, 1), 9), Image.new("L", (2, 1), 0)])
    both.save(tmp_path / "la.png")
    assert (bytes_of(tmp_path / "la.png") == BACKGROUND).all()


def test_cmyk_jpeg_becomes_rgb_with_a_note(tmp_path: Path) -> None:
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=95)
    red, green, blue = bytes_of(tmp_path / "a.jpg")[4, 4].tolist()
    assert red > 240 and green < 15 and blue < 15
    assert load_image(tmp_path / "a.jpg").notes == ("CMYK converted to RGB",)


def test_first_frame_of_an_animation_is_used_with_a_note(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), (value, 0, 0)) for value in (250, 50, 90)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert bytes_of(tmp_path / "a.gif")[0, 0].tolist() == [250, 0, 0]
    assert load_image(tmp_path / "a.gif").notes == (
        "first of 3 frames of the animated picture used",
    )


def test_colour_profile_that_is_not_srgb_is_noted(tmp_path: Path) -> None:
    for name in ("LAB", "sRGB"):
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile(name)).tobytes()
        Image.fromarray(corners()).save(tmp_path / f"{name}.png", icc_profile=profile)
    assert load_image(tmp_path / "sRGB.png").notes == ()
    assert "not applied, values read as sRGB" in load_image(tmp_path / "LAB.png").notes[0]


@pytest.mark.parametrize("side", [8200, 12_000, 30_000])
def test_pixel_bomb_is_refused_from_its_header(tmp_path: Path, side: int) -> None:
    (tmp_path / "a.png").write_bytes(png(side, side, 1, 0, b"\0"))
    with pytest.raises(ValueError, match=r"at most 67,108,864 \(8192x8192\) are read"):
        load_image(tmp_path / "a.png")


def test_text_file_named_png_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("this is no picture\n")
    with pytest.raises(ValueError, match=r"a\.png is not a picture that can be read; give a PNG"):
        load_image(tmp_path / "a.png")


def test_svg_and_postscript_are_refused(tmp_path: Path) -> None:
    for name, text in (("a.svg", "<svg xmlns='http://www.w3.org/2000/svg'/>"), ("a.eps", "%!PS")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="is not a picture that can be read"):
            load_image(tmp_path / name)


def test_picture_cut_short_is_refused(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="broken or cut short"):
        load_image(tmp_path / "a.png")


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff", "bmp", "gif", "avif"])
def test_damaged_picture_is_read_or_refused_and_never_crashes(tmp_path: Path, suffix: str) -> None:
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8))
    path = tmp_path / f"a.{suffix}"
    image.save(path)
    good = np.frombuffer(path.read_bytes(), np.uint8)
    refused = 0
    for _ in range(40):
        data = good[: random.integers(10, len(good) + 1)].copy()
        data[random.integers(0, min(len(data), 600), 8)] = random.integers(0, 256, 8)
        path.write_bytes(data.tobytes())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # Pillow warns of odd TIFF tags
                load_image(path)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 10


def test_float_picture_is_refused(tmp_path: Path) -> None:
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match="has float pixels"):
        load_image(tmp_path / "a.tiff")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("http://127.0.0.1/a.png", "is an address, not a file"),
        ("file:///etc/passwd", "is an address, not a file"),
        ("/nowhere/a.png", "does not exist"),
        ("/tmp", "is not an ordinary file"),
    ],
)
def test_path_that_is_no_file_is_refused(path: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load_image(Path(path))


def test_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(ValueError, match="is empty"):
        load_image(tmp_path / "a.png")
