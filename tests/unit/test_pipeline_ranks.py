"""The whole line on the demo model through the engine: two and four ranks give what one gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime.engine import Engine
from runtime.messages import Failure, Note, Progress, Ready, Ref2VARequest, Result, StageTime
from tests.denoiser_parts import demo_plan


def request(id: str = "r", **fields: object) -> Ref2VARequest:
    small = {"width": 64, "height": 288, "frames": 22, "steps": 3, "seed": 5}
    return Ref2VARequest(id=id, prompt="a calm sea", **(small | fields))  # type: ignore[arg-type]


def engine(layout: str) -> Engine:
    return Engine(demo_plan(text_encoder="resident", threads=1, layout=layout))


def made(engine: Engine, out: Path, **fields: object) -> dict[str, Tensor]:
    """Every tensor that a request writes, frames too."""
    out.mkdir()
    *_, last = engine.generate(request(**fields), out=out, media=False, preview=False)
    assert isinstance(last, Result), last
    found = {f"latent {k}": v for k, v in load_file(str(out / "latents.safetensors")).items()}
    found |= load_file(str(out / "audio.safetensors"))
    for path in sorted((out / "frames").iterdir()):
        found[path.name] = torch.from_numpy(np.load(path))
    return found


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    with engine("single") as alone:
        assert isinstance(list(alone.start())[-1], Ready)
        return made(alone, tmp_path_factory.mktemp("single") / "run")


@pytest.fixture(scope="module", params=["U2", "U4"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine(request.param) as several:
        assert isinstance(list(several.start())[-1], Ready)
        yield several


def test_ranks_write_what_one_process_writes(
    ranks: Engine, single: dict[str, Tensor], tmp_path: Path
) -> None:
    found = made(ranks, tmp_path / "run")
    assert found.keys() == single.keys()
    for name, want in single.items():
        assert float((found[name] - want).norm() / want.norm()) <= 1e-6, name


def test_each_rank_tells_its_steps_and_its_tiles(ranks: Engine, tmp_path: Path) -> None:
    *events, last = ranks.generate(request(steps=2), out=tmp_path, media=False, preview=False)
    assert isinstance(last, Result), last
    count = len(ranks.pids)
    for rank in range(count):
        steps = [s for s in last.stages if s.rank == rank and s.stage == "denoise"]
        assert [s.step for s in steps] == [0, 1] and min(s.seconds for s in steps) > 0
        attention = [s for s in last.stages if s.rank == rank and s.stage == "attention"]
        assert len(attention) == 2
    decoding = {s.rank for s in last.stages if s.stage == "video VAE decode"}
    assert {0, 1} <= decoding
    assert [s.rank for s in last.stages if s.stage == "end to end"] == [0]
    # told as events too, each once: the page and the record of a run that failed have them
    told = [e for e in events if isinstance(e, StageTime)]
    assert len(told) == len(set(told)) and {e.rank for e in told} == set(range(count))


def test_a_latents_file_is_decoded_to_the_same_bits(
    ranks: Engine, single: dict[str, Tensor], tmp_path: Path
) -> None:
    """Tiles are independent, and each comes from the same call as in one process."""
    pytest.importorskip("av")
    from safetensors.torch import save_file

    latents = {k.removeprefix("latent "): v for k, v in single.items() if k.startswith("latent")}
    save_file(latents, str(tmp_path / "latents.safetensors"))
    *_, last = ranks.decode("d", tmp_path / "latents.safetensors", out=tmp_path / "ranks.mp4")
    assert isinstance(last, Result), last
    with engine("single") as alone:
        list(alone.start())
        list(alone.decode("d", tmp_path / "latents.safetensors", out=tmp_path / "one.mp4"))
    assert pixels(tmp_path / "ranks.mp4").equal(pixels(tmp_path / "one.mp4"))


def pixels(path: Path) -> Tensor:
    import av

    with av.open(str(path)) as file:
        return torch.stack(
            [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in file.decode(video=0)]
        )


@pytest.mark.parametrize("stage", ["denoise", "video VAE decode"])
def test_a_cancel_stops_every_rank_and_the_engine_goes_on(
    ranks: Engine, tmp_path: Path, stage: str
) -> None:
    pids = ranks.pids
    asked = request(steps=40 if stage == "denoise" else 2)
    for event in ranks.generate(asked, out=tmp_path, media=False, preview=False):
        if isinstance(event, Progress) and event.stage == stage and event.done == 1:
            ranks.cancel("r")
    assert isinstance(event, Failure) and event.cancelled
    made(ranks, tmp_path / "after", steps=1)
    assert ranks.pids == pids


def test_bad_input_is_told_by_rank_0_and_restarts_none(ranks: Engine, tmp_path: Path) -> None:
    pids = ranks.pids
    from runtime.messages import Reference

    missing = Reference(kind="image", path=tmp_path / "none.png")
    *_, last = ranks.generate(request(references=(missing,)), out=tmp_path, media=False)
    assert isinstance(last, Failure) and last.rank == 0 and "none.png" in last.reason
    made(ranks, tmp_path / "after", steps=1)
    assert ranks.pids == pids


def test_the_memory_of_every_rank_is_noted(ranks: Engine, tmp_path: Path) -> None:
    notes = [
        e.text
        for e in ranks.generate(request(steps=1), out=tmp_path, media=False, preview=False)
        if isinstance(e, Note)
    ]
    (told,) = [text for text in notes if text.startswith("most memory of each rank")]
    assert told.count(",") == len(ranks.pids) - 1


def test_no_rank_outlives_its_engine(tmp_path: Path) -> None:
    with engine("U2") as several:
        list(several.start())
        pids = several.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)
