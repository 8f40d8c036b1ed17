"""What can be known to be wrong before a process is spawned: files, media, disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from app import families, ltx_fit, ltx_prompt, models, presets
from app.incoming import called
from runtime.layouts import check_guidance
from runtime.media.info import MediaInfo
from runtime.messages import FPS, LTXRequest, Plan, Reference, Request

Probe = Callable[[Path], MediaInfo]

MOST_CHARACTERS = 7000  # of a prompt, in the console

_ARTICLE = {"image": "an image", "video": "a video", "audio": "a sound"}
_LEAST_FRAMES = 5  # what the video VAE needs for its first two latents (contract 4)
_FLOOR_BYTES = 1 << 20
_LATENT_BYTES_PER_PIXEL = 0.1  # float32, 24 channels, 1 in 16 x 16 pixels, 1 in 4 frames: 0.094
_MP4_BYTES_PER_PIXEL = 0.2  # a noisy picture at crf 16; an ordinary one takes a tenth


def probe_here(path: Path) -> MediaInfo:
    """What the file holds, read in this process; the console asks app.media.facts instead."""
    from runtime.media.probe import probe  # needs PyAV, which a run without media does not

    return probe(path)


def check(
    request: Request,
    plan: Plan,
    out: Path,
    *,
    media: bool = True,
    probe: Probe = probe_here,
) -> None:
    """Raises ValueError with one sentence for what the request cannot be run with.

    probe: the console's reads no file in its own process, which then never loads PyAV.
    """
    families.check_pair(request, plan)
    check_guidance(plan.layout, request.cfg)
    if probe is probe_here and (media or request.references):
        check_pyav()
    for reference in request.references:
        check_reference(reference, probe, least_side=families.of_request(request).least_side)
    check_loadable(plan)
    if isinstance(request, LTXRequest):
        ltx_prompt.check(request.prompt, plan)
    check_disk(request, out)


def check_length(request: Request) -> None:
    """What the console takes of a prompt; the command line takes what the model does."""
    for text in (request.prompt, request.negative_prompt):
        if len(text) > MOST_CHARACTERS:
            raise ValueError(
                f"a prompt may have {MOST_CHARACTERS:,} characters, this one has "
                f"{len(text):,}; shorten it"
            )


def check_pyav() -> None:
    """PyAV reads references and writes mp4s; latents and float frames of a prompt need neither."""
    try:
        import av  # noqa: F401  # only asked for
    except ImportError as error:
        raise ValueError(
            f"references and mp4 files need PyAV, which cannot be imported ({error}); "
            f"pip install 'av>=18.1,<20', or use --no-media without references"
        ) from error


def check_reference(
    reference: Reference, probe: Probe = probe_here, *, least_side: int = 1
) -> MediaInfo:
    """The file can be read as its kind of reference; returns what it holds.

    least_side: pixels that a picture must have each way, of the family (families.py).
    """
    info, name = probe(reference.path), called(reference.path)
    if reference.kind == "audio" or reference.soundtrack is not None:
        sound = info if reference.kind == "audio" else probe(reference.soundtrack or Path())
        if not sound.audio_codec:
            silent = called(reference.soundtrack or reference.path)
            raise ValueError(f"{silent} holds no sound; give an audio file")
    gif = info.video_codec == "gif" and info.frames > 1  # read as a picture or as a video
    if reference.kind not in ("audio", info.kind) and not (gif and reference.kind == "video"):
        raise ValueError(
            f"{name} is {_ARTICLE[info.kind]}, not {_ARTICLE[reference.kind]}; "
            f"give it as a reference {info.kind} or choose another file"
        )
    if reference.kind == "video" and 0 < info.seconds * FPS < _LEAST_FRAMES - 0.5:
        raise ValueError(
            f"{name} is {info.seconds:.2f} s long; a reference video needs at least "
            f"{_LEAST_FRAMES} frames at {FPS} fps; use a longer one or an image"
        )
    if reference.kind == "image" and min(info.width, info.height) < least_side:
        raise ValueError(
            f"{name} has {info.width}x{info.height} pixels, and a picture needs {least_side} or "
            f"more each way; choose another"
        )
    return info


def check_models(plan: Plan) -> None:
    """Every model that the plan's family needs is there and, by its header, the right one."""
    family = families.of_plan(plan)
    for role, path in families.paths(plan).items():
        if path is None:
            raise ValueError(f"plan {plan.name} names no {role}; add it to [models]")
        folder = role in family.folders
        try:
            there = path.is_dir() if folder else path.is_file()
        except OSError as error:  # a folder above it that may not be entered
            raise ValueError(models.unreadable(path, error, plan)) from error
        if not there:
            kind = "a folder" if folder else "an ordinary file"
            what = f"not {kind}" if path.exists() else "not there"
            make = f"; {family.make}" if family.make and presets.is_demo(plan) else ""
            raise ValueError(
                f"plan {plan.name} needs {path}, which is {what}; put "
                f"{'it' if folder else 'the file'} there or change [models] in the plan{make}"
            )
    for file in models.look(plan).files:
        if file.problem:
            raise ValueError(file.problem)


def check_loadable(plan: Plan) -> None:
    """check_models, and what a family's libraries alone can tell, which takes seconds at first."""
    check_models(plan)
    if families.of_plan(plan) is families.LTX:
        ltx_fit.check(plan)


def disk_need(request: Request) -> int:
    """Bytes of the latents and the video, generously."""
    pixels = request.width * request.height * request.frames
    return _FLOOR_BYTES + int(pixels * (_LATENT_BYTES_PER_PIXEL + _MP4_BYTES_PER_PIXEL))


def disk_free(out: Path) -> int:
    """Bytes free on the disk that `out` is or will be on."""
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    return shutil.disk_usage(place).free


def check_disk(request: Request, out: Path) -> None:
    """The disk of `out` has room for the latents and the video."""
    need, free = disk_need(request), disk_free(out)
    if free < need:
        raise ValueError(
            f"the disk of {out} has {free / 2**20:.1f} MiB free and this request needs about "
            f"{need / 2**20:.1f} MiB; free some or choose another folder with --out"
        )
