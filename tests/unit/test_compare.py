"""`launch.py compare`: figures per frame, temporal joins apart, one sentence for what differs."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file

from runtime.media.frames import write_frames
from runtime.media.mp4 import Mp4Options, write_mp4
from runtime.parity import compare
from runtime.parity.frames import join_of, measured

ROOT = Path(__file__).parents[2]


def noise(frames: int, *, height: int = 6, width: int = 8) -> NDArray[np.float32]:
    """The same random frames [F,H,W,3] every time."""
    random = np.random.default_rng(3)
    return random.random((frames, height, width, 3), dtype=np.float32)


def folder(path: Path, frames: NDArray[np.float32]) -> Path:
    write_frames(path, [frames])
    return path


def compared(*words: str | Path) -> tuple[int, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    args = parser.parse_args([str(w) for w in words])
    return compare.run(args), args


def document(tmp_path: Path, *words: str | Path) -> dict[str, Any]:
    out = tmp_path / "figures.json"
    compared(*words, "--json", out)
    read: dict[str, Any] = json.loads(out.read_text())
    return read


def last_rows(text: str, count: int) -> Sequence[str]:
    return text.splitlines()[-count:]


# ---- frames


def test_equal_folders_exit_with_0_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = compared(folder(tmp_path / "a", noise(5)), folder(tmp_path / "b", noise(5)))
    assert status == 0
    assert last_rows(capsys.readouterr().out, 1) == ["equal"]


def test_the_figures_of_a_frame_are_the_textbook_ones() -> None:
    a, b = noise(1)[0], noise(1)[0]
    b[2, 3, 1] += np.float32(0.25)
    step = float(b[2, 3, 1]) - float(a[2, 3, 1])
    figures = measured(a, b).figures()
    assert figures.max_abs == pytest.approx(step)
    assert figures.mean_abs == pytest.approx(step / a.size)
    assert figures.relative_l2 == pytest.approx(step / float(np.linalg.norm(a.astype(float))))
    assert figures.psnr == pytest.approx(-10 * math.log10(step**2 / a.size))


def test_worst_frames_come_first_and_the_rest_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = noise(8)
    for number, step in ((1, 0.01), (6, 0.5), (4, 0.1)):
        other[number, 0, 0, 0] += np.float32(step)
    status, _ = compared(
        folder(tmp_path / "a", noise(8)), folder(tmp_path / "b", other), "--worst", "2"
    )
    rows = capsys.readouterr().out.splitlines()
    assert status == 1
    assert [row.split()[0] for row in rows[1:3]] == ["6", "4"]
    assert rows[3] == "... 1 more frames differ (--worst shows more)"
    assert rows[4] == "3 of 8 frames differ"
    assert rows[-1] == "different"


@pytest.mark.parametrize(
    ("frames", "starts"),
    [(5, []), (18, []), (22, []), (30, [17]), (39, [17]), (56, [17, 34])],
)
def test_joins_are_where_the_decoder_blends_two_clips(frames: int, starts: list[int]) -> None:
    joins = [join_of(n, frames) for n in range(frames)]
    blended = [n for n, join in enumerate(joins) if join is not None]
    assert blended == [n for start in starts for n in range(start, start + 5)]
    assert sorted({join for join in joins if join is not None}) == starts


def test_a_difference_in_a_join_is_called_out_and_summed_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = noise(39)
    other[19] += np.float32(0.125)
    a, b = folder(tmp_path / "a", noise(39)), folder(tmp_path / "b", other)
    figures = document(tmp_path, a, b)
    text = capsys.readouterr().out
    assert text.splitlines()[1].endswith("join at 17")
    assert figures["frames"][19]["join"] == 17
    assert figures["summary"]["in temporal joins"]["frames"] == 5
    assert figures["summary"]["in temporal joins"]["max_abs"] == pytest.approx(0.125)
    assert figures["summary"]["outside of joins"]["equal"] is True
    assert figures["summary"]["outside of joins"]["psnr"] is None


def test_a_value_that_is_not_finite_is_different_and_infinite(tmp_path: Path) -> None:
    other = noise(2)
    other[1, 0, 0, 0] = np.nan
    a, b = folder(tmp_path / "a", noise(2)), folder(tmp_path / "b", other)
    figures = document(tmp_path, a, b)
    assert figures["equal"] is False
    assert figures["frames"][0]["equal"] is True
    assert figures["frames"][1]["max_abs"] is None


def test_pictures_are_compared_and_their_8_bits_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = noise(3)
    (tmp_path / "b").mkdir()
    for n, frame in enumerate(frames):
        Image.fromarray(np.rint(frame * 255).astype(np.uint8)).save(tmp_path / f"b/{n:05d}.png")
    figures = document(tmp_path, folder(tmp_path / "a", frames), tmp_path / "b")
    assert figures["summary"]["all frames"]["max_abs"] < 0.5 / 255 + 1e-6
    assert "holds 8-bit pictures" in capsys.readouterr().out


def test_a_video_is_compared_with_the_warning_that_it_is_not_for_parity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = np.full((5, 32, 32, 3), 0.5, np.float32)
    wave = np.zeros((2, 6667), np.float32)
    write_mp4(tmp_path / "b.mp4", [frames], wave, {}, Mp4Options())
    figures = document(tmp_path, folder(tmp_path / "a", frames), tmp_path / "b.mp4")
    assert len(figures["frames"]) == 5
    assert figures["summary"]["all frames"]["max_abs"] < 0.02
    assert "its figures say nothing about parity" in capsys.readouterr().out


# ---- tensors


def tensors(path: Path, **changed: torch.Tensor) -> Path:
    stored = {"video": torch.arange(24.0).reshape(1, 2, 3, 2, 2), "audio": torch.ones(1, 2, 9)}
    save_file(stored | changed, str(path))
    return path


def test_latents_are_compared_tensor_by_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = torch.ones(1, 2, 9)
    other[0, 1, 4] = 1.5
    a, b = tensors(tmp_path / "a.safetensors"), tensors(tmp_path / "b.safetensors", audio=other)
    assert compared(a, a)[0] == 0
    assert compared(a, b)[0] == 1
    rows = capsys.readouterr().out.splitlines()
    assert "audio" in rows[-3] and "5.00e-01" in rows[-3]
    assert rows[-2] == "1 of 2 tensors differ"


def test_a_tensor_in_one_file_only_makes_them_different(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = tensors(tmp_path / "a.safetensors")
    b = tensors(tmp_path / "b.safetensors", extra=torch.ones(2))
    assert compared(a, b)[0] == 1
    assert f"only in {b}: extra" in capsys.readouterr().out


def test_frames_of_two_goldens_are_compared_frame_by_frame(tmp_path: Path) -> None:
    video = torch.from_numpy(noise(30))[None]
    other = video.clone()
    other[0, 18, 0, 0, 0] += 0.5
    a = tensors(tmp_path / "a.safetensors", **{"out/video": video})
    b = tensors(tmp_path / "b.safetensors", **{"out/video": other})
    figures = document(tmp_path, a, b)
    assert [f["frame"] for f in figures["out/video"]["frames"] if not f["equal"]] == [18]
    assert figures["out/video"]["frames"][18]["join"] == 17


def test_a_frame_folder_is_compared_with_a_goldens_frames(tmp_path: Path) -> None:
    frames = noise(4)
    golden = tensors(tmp_path / "g.safetensors", **{"decode/video": torch.from_numpy(frames)})
    assert compared(folder(tmp_path / "a", frames), golden)[0] == 0


# ---- what cannot be compared


def test_other_counts_and_sizes_are_one_sentence(tmp_path: Path) -> None:
    five = folder(tmp_path / "five", noise(5))
    six = folder(tmp_path / "six", noise(6))
    wide = folder(tmp_path / "wide", noise(5, width=10))
    with pytest.raises(ValueError, match=r"five ends after 5 frames, .*six goes on"):
        compared(six, five)
    with pytest.raises(ValueError, match="five has fewer frames than"):
        compared(five, six)
    with pytest.raises(ValueError, match=r"frame 0 is 8x6 in .*five and 10x6 in .*wide"):
        compared(five, wide)


def test_what_is_no_frame_or_has_none_is_one_sentence(tmp_path: Path) -> None:
    good = folder(tmp_path / "good", noise(2))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no frames")
    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    broken = folder(tmp_path / "broken", noise(2))
    (broken / "00001.npy").write_bytes(b"broken")
    doubles = tmp_path / "doubles"
    doubles.mkdir()
    np.save(doubles / "00000.npy", np.zeros((4, 4, 3)))
    for path, said in (
        (tmp_path / "empty", "holds no frames"),
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "notes.txt", "is not a frame folder"),
        (tmp_path / "broken.safetensors", "is not a readable .safetensors file"),
        (tensors(tmp_path / "latents.safetensors"), "has no frames"),
        (broken, "00001.npy is not a readable .npy frame"),
        (doubles, r"holds float64 \[4, 4, 3\]; a frame is float32"),
    ):
        with pytest.raises(ValueError, match=said):
            compared(good, path)


def test_files_without_a_common_tensor_are_refused(tmp_path: Path) -> None:
    a = tensors(tmp_path / "a.safetensors")
    save_file({"other": torch.ones(2)}, str(tmp_path / "b.safetensors"))
    with pytest.raises(ValueError, match="no tensor name in common"):
        compared(a, tmp_path / "b.safetensors")


def test_only_one_frame_of_each_side_is_alive_at_a_time(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", noise(4)), folder(tmp_path / "b", noise(4))
    (b / "00002.npy").write_bytes(b"broken")  # a reader of whole folders would fail at once
    left, right = compare._source(a), compare._source(b)
    pairs = compare.pairs(left, right)
    assert len([next(pairs), next(pairs)]) == 2
    with pytest.raises(ValueError, match=r"00002\.npy is not a readable"):
        next(pairs)


@pytest.mark.parametrize(("changed", "status"), [(0.0, 0), (0.5, 1), (None, 2)])
def test_the_command_exits_with_0_equal_1_different_2_bad_input(
    changed: float | None, status: int, tmp_path: Path
) -> None:
    a, b = folder(tmp_path / "a", noise(2)), tmp_path / "b"
    if changed is not None:
        folder(b, noise(2) + np.float32(changed))
    line = [sys.executable, "launch.py", "compare", str(a), str(b)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
