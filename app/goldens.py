"""The goldens a console knows: those of the checkout and those that users imported.

A golden is a safetensors file that was captured from ComfyUI; what it is stands in its header, so
no tensor is read here. Its checkpoints lie in a folder `checkpoints` beside it. A collection
without that folder, as the checkout's, uses the tiny checkpoints, which are rebuilt from the demo
model into <root>/goldens/checkpoints when a run needs them. LTX's goldens lie compressed in the
checkout: they are unpacked into <root>/goldens/checkout+ltx, and rebuilt beside them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app import goldens_ltx
from app.access import User
from app.errors import Missing
from runtime.checkpoints.header import CheckpointError, Header, read_header
from runtime.packed_files import unpack
from runtime.quoted import quoted

_ROOT = Path(__file__).parents[1]
CHECKOUT = _ROOT / "tests" / "goldens"
CHECKOUT_LTX = _ROOT / "tests" / "goldens_ltx"
_REBUILT_FROM: Mapping[str, tuple[Path, Path]] = {
    "h3": (_ROOT / "presets" / "demo", _ROOT / "presets" / "checkpoint_deltas"),
    "ltx": (CHECKOUT_LTX / "checkpoints", CHECKOUT_LTX / "checkpoints" / "deltas"),
}
CHECKOUT_NAME, LTX_NAME = "checkout", "checkout+ltx"  # no import can have the second's plus
CHECKPOINTS = "checkpoints"
FACTS = ".collection.json"  # owner and time of an imported collection
FRAMES = ("decode/video", "out/video", "final/video")  # what pictures can be made from

Origin = Literal["checkout", "imported"]
Tiny = Literal["", "h3", "ltx"]  # whose tiny checkpoints a folder is filled with

# Kinds whose checkpoints are named in params, with what stands for a name that is not there.
_NAMED: Mapping[str, Mapping[str, str]] = {
    "e2e": {
        "dit": "",
        "te": "qwen3vl_tiny_bf16",
        "vvae": "h3_tiny_video_vae_fp16",
        "avae": "h3_tiny_audio_vae_fp32",
    },
    "te": {"te": "qwen3vl_tiny_bf16"},
    "vae_decode": {"vvae": ""},
    "vae_encode": {"vvae": ""},
    "audio": {"avae": "h3_tiny_audio_vae_fp32"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One case. A number is 0 and a text "" where the header does not say it.

    id: "<collection>/<file name without .safetensors>". checkpoints: their folder. rebuilt: whose
    tiny checkpoints it is to be filled with, "" for none. missing: those that cannot be had.
    problem: why it cannot run.
    """

    id: str
    collection: str
    origin: Origin
    path: Path
    checkpoints: Path
    rebuilt: Tiny
    bytes: int
    tensors: int = 0
    case: str = ""
    kind: str = ""
    mode: str = ""
    prompt: str = ""
    width: int = 0
    height: int = 0
    frames: int = 0
    steps: int = 0
    sampler: str = ""
    scheduler: str = ""
    cfg: float = 1.0
    seed: int = 0
    pictures: bool = False  # a run can show frames of both sides
    comfyui: str = ""
    commit: str = ""
    torch: str = ""
    comfy_kitchen: str = ""
    attention: str = ""
    captured_on: str = ""
    switches: Mapping[str, str] = field(default_factory=dict)  # what decided dtypes and kernels
    needs: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problem: str = ""


class Goldens:
    """The goldens of a runs folder; headers are read once per file and change."""

    def __init__(self, root: Path, *, checkout: Path = CHECKOUT) -> None:
        self.folder = root / "goldens"
        self.checkout = checkout
        self._lock = threading.Lock()
        self._read: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def list(self, user: User) -> tuple[Golden, ...]:
        """The checkout's, then the collections that this user (an admin: anybody) imported."""
        found = [*self._collection(CHECKOUT_NAME, self.checkout, "checkout", "h3")]
        found += self._of_ltx()
        for folder in sorted(self.folder.glob("*/" + FACTS)):
            if user.admin or facts_of(folder.parent)["owner"] == user.name:
                tiny: Tiny = "" if (folder.parent / CHECKPOINTS).is_dir() else "h3"
                found += self._collection(folder.parent.name, folder.parent, "imported", tiny)
        return tuple(found)

    def get(self, user: User, ids: Sequence[str]) -> tuple[Golden, ...]:
        """Those of these ids, in this order; Missing names the first that is not there."""
        known = {golden.id: golden for golden in self.list(user)}
        for id in ids:
            if id not in known:
                raise Missing(f"there is no golden {quoted(id)}; choose one of the list")
        return tuple(known[id] for id in ids)

    def collection(self, user: User, name: str) -> Path:
        """The folder of an imported collection of this user; else Missing."""
        folder = self.folder / name
        names = {
            path.parent.name for path in self.folder.glob("*/" + FACTS)
        }  # no path, none too long
        if name not in names or not (user.admin or facts_of(folder)["owner"] == user.name):
            raise Missing(f"there is no imported collection {quoted(name)}")
        return folder

    def _of_ltx(self) -> Iterator[Golden]:
        """Those of the checkout; one that cannot be unpacked has that as its problem."""
        folder, problem = self.folder / LTX_NAME, ""
        try:
            unpack(CHECKOUT_LTX, folder)
        except (OSError, ValueError) as error:
            problem = f"it could not be unpacked into {folder}: {error}"
        known = {g.path.stem: g for g in self._collection(LTX_NAME, folder, "checkout", "ltx")}
        for packed in sorted(CHECKOUT_LTX.glob("*.xz")):
            path = folder / packed.stem
            yield known.get(path.stem) or Golden(
                id=f"{LTX_NAME}/{path.stem}",
                collection=LTX_NAME,
                origin="checkout",
                path=path,
                checkpoints=folder / CHECKPOINTS,
                rebuilt="ltx",
                bytes=0,
                case=path.stem,
                problem=problem,
            )

    def _collection(
        self, name: str, folder: Path, origin: Origin, rebuilt: Tiny
    ) -> Iterator[Golden]:
        beside = self.folder / CHECKPOINTS if rebuilt == "h3" else folder / CHECKPOINTS
        there = {
            path.name.removesuffix(".xz").removesuffix(".safetensors")  # a delta is compressed
            for place in _REBUILT_FROM.get(rebuilt, (beside,))
            for path in place.glob("*.safetensors*")
        }
        for path in sorted(folder.glob("*.safetensors")):
            fields = self._fields(path)
            yield Golden(
                id=f"{name}/{path.stem}",
                collection=name,
                origin=origin,
                path=path,
                checkpoints=beside,
                rebuilt=rebuilt,
                missing=tuple(need for need in fields.get("needs", ()) if need not in there),
                **fields,
            )

    def _fields(self, path: Path) -> dict[str, Any]:
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        with self._lock:
            known = self._read.get(path)
            if known is None or known[0] != stamp:
                known = self._read[path] = (stamp, {"bytes": stat.st_size, **_manifest(path)})
            return known[1]


def facts_of(folder: Path) -> dict[str, Any]:
    """Owner and time of an imported collection."""
    facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return facts


def golden_header(header: Header) -> dict[str, Any]:
    """The JSON document of a golden's metadata; ValueError for a file that is no golden."""
    ltx = goldens_ltx.KEY in header.metadata
    try:
        document = json.loads(header.metadata.get(goldens_ltx.KEY if ltx else "header", "null"))
        json.dumps(document, ensure_ascii=False).encode()  # lists of it go out as UTF-8
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{header.path.name} is no golden: its header is not JSON") from error
    if ltx:
        document = goldens_ltx.as_header(document, header.tensors)
    if not isinstance(document, dict) or not (
        isinstance(document.get("case"), str)
        and isinstance(document.get("kind"), str)
        and isinstance(document.get("params"), dict)
    ):
        raise ValueError(
            f"{header.path.name} is no golden: its metadata has no header with case, kind and "
            "params; docs/goldens.md says how one is made"
        )
    return document


def _manifest(path: Path) -> dict[str, Any]:
    try:
        header = read_header(path)
        document = golden_header(header)
        return {"tensors": len(header.tensors), **_told(header, document)}
    except (CheckpointError, ValueError, OSError) as error:
        return {"case": path.stem, "problem": str(error)}


def _told(header: Header, document: Mapping[str, Any]) -> dict[str, Any]:
    params, world = document["params"], _mapping(document.get("environment"))
    kind = document["kind"]
    width, height, frames = _shape(kind, params)
    return {
        "case": _text(document["case"]),
        "kind": _text(kind),
        "mode": _text(params.get("mode")),
        "prompt": _text(params.get("prompt")),
        "width": width,
        "height": height,
        "frames": frames,
        "steps": _number(params.get("steps")),
        "sampler": _text(params.get("sampler")),
        "scheduler": _text(params.get("scheduler")),
        "cfg": _decimal(params.get("cfg"), 1.0),
        "seed": _number(params.get("seed")),
        "pictures": kind in ("e2e", "vae_decode") and any(f in header.tensors for f in FRAMES),
        "comfyui": _text(world.get("comfyui_version")),
        "commit": _text(world.get("comfyui_commit")),
        "torch": _text(world.get("torch")),
        "comfy_kitchen": _text(world.get("comfy_kitchen")),
        "attention": _text(world.get("attention")),
        "captured_on": _text(world.get("device")) or _text(world.get("machine")),
        "switches": _switches(params, document),
        "needs": _needs(kind, params) or goldens_ltx.needs(document),
    }


def _shape(kind: str, params: Mapping[str, Any]) -> tuple[int, int, int]:
    """Width, height and frames, as asked for; a VAE golden's latent [T,H,W] is in 16 px tokens."""
    latent = params.get("latent")
    if kind == "vae_decode" and isinstance(latent, list) and len(latent) == 3:
        return _number(latent[2]) * 16, _number(latent[1]) * 16, 0
    return tuple(_number(params.get(name)) for name in ("width", "height", "length"))  # type: ignore[return-value]


def _switches(params: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, str]:
    """What fixed the numbers: compute dtype, native or emulated, VAE dtype, checkpoint."""
    found: dict[str, str] = {}
    if "compute" in params:
        found["denoiser"] = _text(params["compute"])
    if "native_quant" in params or "gemm" in params:
        native = bool(params.get("native_quant"))
        found["quantised activations"] = "yes" if native else "no"
    if native_gemm := _text(params.get("gemm")):
        found["FP4 matmul"] = native_gemm
    dtype = document.get("vae_dtype")
    for part, value in (dtype if isinstance(dtype, dict) else {"": dtype}).items():
        if isinstance(value, str):
            found[f"{part} VAE".strip()] = value.removeprefix("torch.")
    return found


def _needs(kind: str, params: Mapping[str, Any]) -> tuple[str, ...]:
    named = _NAMED.get(kind, {})
    names = (_text(params.get(key)) or default for key, default in named.items())
    return tuple(name for name in names if name)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value[:500] if isinstance(value, str) else ""


def _number(value: object) -> int:
    return value if type(value) is int else 0


def _decimal(value: object, default: float) -> float:
    """The number as a float; the default for what is none or is not finite, as 1e999."""
    known = isinstance(value, int | float) and abs(value) < 1e300  # also a whole number of any size
    return float(value) if known else default  # type: ignore[arg-type]
