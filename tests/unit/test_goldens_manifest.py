"""The manifest of goldens, read from headers alone, and what may be imported."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from app.access import User
from app.errors import Missing, NoRoom, TooLarge, WrongState
from app.golden_imports import discard, import_folder, import_upload
from app.goldens import CHECKOUT, Goldens
from runtime.parity.golden import Golden
from runtime.parity.replay import e2e
from runtime.parity.tiny_checkpoints import BASES, WHOLE

ROOT = Path(__file__).parents[2]
ALICE, BOB, ADMIN = User(name="alice"), User(name="bob"), User(name="admin", admin=True)
SCHEDULES = CHECKOUT / "schedules.safetensors"


def safetensors(document: Any, *, metadata: str = "header") -> bytes:
    """A file with one small tensor and this JSON document in its metadata."""
    header = {
        "__metadata__": {metadata: json.dumps(document)},
        "x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"ab"


def golden(**params: Any) -> bytes:
    """A golden of kind e2e that needs the denoiser "mine"."""
    return safetensors({"case": "c", "kind": "e2e", "params": {"dit": "mine", **params}})


def zipped(files: dict[str, bytes]) -> io.BytesIO:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    stream.seek(0)
    return stream


@pytest.fixture
def goldens(tmp_path: Path) -> Goldens:
    return Goldens(tmp_path)


# ---- the manifest


def test_the_checkout_lists_every_golden_with_what_it_was_captured_by(goldens: Goldens) -> None:
    found = [g for g in goldens.list(ALICE) if g.collection == "checkout"]
    assert [g.path.stem for g in found] == sorted(p.stem for p in CHECKOUT.glob("*.safetensors"))
    case = next(g for g in found if g.case == "ref2va_1img_22f_res_beta_12_s440202_bf16")
    assert (case.kind, case.mode, case.width, case.height, case.steps) == (
        "e2e",
        "ref2va",
        96,
        64,
        12,
    )
    assert (case.comfyui, case.commit[:8], case.comfy_kitchen) == ("0.33.0", "0f1fa67a", "0.2.31")
    assert case.switches == {"denoiser": "bf16", "audio VAE": "float32", "video VAE": "float32"}
    assert case.pictures
    assert not [g for g in found if g.missing or g.problem]


def test_the_checkpoints_a_golden_needs_are_those_its_replay_opens(goldens: Goldens) -> None:
    h3 = [g for g in goldens.list(ALICE) if g.rebuilt == "h3"]
    needs = {g.kind: g.needs for g in h3 if "vvae" not in Golden(g.path).params}
    assert needs["e2e"][2:] == (e2e.DEFAULT_VIDEO_VAE, e2e.DEFAULT_AUDIO_VAE)
    known = {*WHOLE, *BASES}
    assert all(set(g.needs) <= known for g in h3)
    assert needs["schedules"] == needs["layout"] == needs["quant"] == ()


def test_reading_the_manifest_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from app.goldens import Goldens;"
        "from app.access import User;"
        f"n = len(Goldens(Path({str(tmp_path)!r})).list(User(name='a')));"
        "sys.exit(n < 28 or 'torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_damaged_golden_is_listed_with_its_problem(goldens: Goldens) -> None:
    folder = goldens.folder / "mine"
    folder.mkdir(parents=True)
    (folder / ".collection.json").write_text('{"owner": "alice", "imported": 1}')
    (folder / "cut.safetensors").write_bytes(SCHEDULES.read_bytes()[:5000])
    (one,) = [g for g in goldens.list(ALICE) if g.origin == "imported"]
    assert "truncated" in one.problem


@pytest.mark.parametrize(
    "params",
    [
        *({"steps": "4"}, {"width": None}, {"cfg": []}, {"gemm": {}}),
        *({"cfg": float("nan")}, {"cfg": float("inf")}, {"cfg": 10**400}),
    ],
)
def test_odd_values_in_a_header_are_left_out(params: dict[str, Any], goldens: Goldens) -> None:
    import_upload(goldens, "alice", "odd.safetensors", io.BytesIO(golden(**params)))
    (one,) = [g for g in goldens.list(ALICE) if g.collection == "odd"]
    assert (one.steps, one.width, one.cfg) == (0, 0, 1.0)


# ---- imports


def test_an_uploaded_golden_belongs_to_its_owner(goldens: Goldens) -> None:
    name = import_upload(goldens, "alice", "my run.safetensors", io.BytesIO(SCHEDULES.read_bytes()))
    assert name == "my_run"
    assert f"{name}/my_run" in [g.id for g in goldens.list(ALICE)]
    assert f"{name}/my_run" in [g.id for g in goldens.list(ADMIN)]
    assert goldens.get(ALICE, ["my_run/my_run"])[0].path.read_bytes() == SCHEDULES.read_bytes()
    with pytest.raises(Missing):
        goldens.get(BOB, ["my_run/my_run"])
    with pytest.raises(Missing):
        goldens.collection(BOB, "my_run")
    discard(goldens.collection(ALICE, "my_run"))
    assert "my_run" not in {g.collection for g in goldens.list(ADMIN)}


def test_a_zip_brings_its_checkpoints_and_says_which_are_missing(goldens: Goldens) -> None:
    files = {
        "run/a.safetensors": golden(te="t", vvae="v", avae="a"),
        "run/README.md": b"words",
        "run/checkpoints/mine.safetensors": safetensors({}),
        "run/checkpoints/index.json": b"{}",
    }
    import_upload(goldens, "alice", "pack.zip", zipped(files))
    (one,) = [g for g in goldens.list(ALICE) if g.collection == "pack"]
    assert (one.needs, one.missing) == (("mine", "t", "v", "a"), ("t", "v", "a"))
    assert not one.rebuilt
    kept = sorted(str(p.relative_to(goldens.folder / "pack")) for p in one.path.parent.rglob("*.*"))
    assert kept == [".collection.json", "a.safetensors", "checkpoints/mine.safetensors"]


def test_a_golden_without_a_folder_of_checkpoints_uses_the_tiny_ones(goldens: Goldens) -> None:
    file = CHECKOUT / "vae_decode_tlat1_32x48.safetensors"
    import_upload(goldens, "alice", "vae.safetensors", io.BytesIO(file.read_bytes()))
    import_upload(goldens, "alice", "other.safetensors", io.BytesIO(golden()))
    found = {g.collection: g for g in goldens.list(ALICE)}
    assert found["vae"].rebuilt
    assert found["vae"].missing == ()
    assert found["other"].missing == ("mine",)


def test_a_folder_is_copied_with_its_checkpoints(goldens: Goldens, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "checkpoints").mkdir(parents=True)
    (source / "a.safetensors").write_bytes(golden())
    (source / "checkpoints" / "mine.safetensors").write_bytes(safetensors({}))
    import_folder(goldens, "alice", source)
    (one,) = [g for g in goldens.list(ALICE) if g.collection == "source"]
    assert "mine" not in one.missing
    with pytest.raises(WrongState, match="there is a collection 'source' already"):
        import_folder(goldens, "alice", source)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("x.pt", b"PK\x03\x04", "a .pt file can run code and is never opened"),
        ("x.safetensors", b"PK\x03\x04abcdefgh", "x.safetensors is a zip archive"),
        ("x.safetensors", b"\x80\x02}q\x00.abcdef", "x.safetensors is a Python pickle"),
        ("x.safetensors", safetensors({"case": "c"}), "no header with case, kind and params"),
        ("x.safetensors", safetensors({}, metadata="other"), "is no golden"),
        ("x.zip", b"not a zip", "the zip cannot be read"),
        ("x.zip", {"model.pt": b"x"}, "only .safetensors files are taken"),
        ("x.zip", {"../out.safetensors": golden()}, "leads out of it"),
        ("x.zip", {"/abs.safetensors": golden()}, "leads out of it"),
        ("x.zip", {"a/../../b.safetensors": golden()}, "leads out of it"),
        ("x.zip", {"a/b/c.safetensors": golden(), "a/d.safetensors": golden()}, "are taken"),
        ("x.zip", {"checkpoints/x.safetensors": safetensors({})}, "holds no golden"),
        ("x.zip", {"a.safetensors": golden(), "b.safetensors": b"PK\x03\x04"}, "b.safetensors is"),
        ("x.zip", {f"{'n' * 300}.safetensors": golden()}, "is too long or has characters"),
        ("x.zip", {"a\n.safetensors": golden()}, "is too long or has characters"),
        ("x.zip", {"d/a.safetensors": golden(), "./d/a.safetensors": golden()}, "two files"),
        ("x.safetensors", golden(prompt="\ud800"), "is no golden: its header is not JSON"),
        (
            "x.safetensors",
            safetensors({"case": "\udfff", "kind": "", "params": {}}),
            "is no golden",
        ),
    ],
)
def test_what_is_no_golden_is_refused_and_leaves_nothing(
    name: str, data: bytes | dict[str, bytes], said: str, goldens: Goldens
) -> None:
    stream = zipped(data) if isinstance(data, dict) else io.BytesIO(data)
    with pytest.raises(ValueError, match=said) as refused:
        import_upload(goldens, "alice", name, stream)
    assert str(goldens.folder) not in str(refused.value)
    assert not list(goldens.folder.rglob("*.safetensors"))
    assert not list(goldens.folder.glob("*.part"))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_with_damaged_data_is_refused_whatever_packed_it(
    method: int, goldens: Goldens
) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr("a.safetensors", golden())
    data = bytearray(stream.getvalue())
    begin = 30 + len("a.safetensors")
    data[begin + 2 : begin + 12] = b"\xff" * 10
    with pytest.raises(ValueError, match="the zip cannot be read"):
        import_upload(goldens, "alice", "x.zip", io.BytesIO(bytes(data)))


def test_two_imports_of_one_name_at_once_are_one(goldens: Goldens) -> None:
    class Twin(io.BytesIO):
        """Comes while another file of its name is sent."""

        def read(self, size: int | None = -1, /) -> bytes:
            with pytest.raises(WrongState, match="just being imported"):
                import_upload(goldens, "bob", "a.safetensors", io.BytesIO(golden()))
            return super().read(size)

    import_upload(goldens, "alice", "a.safetensors", Twin(golden()))
    (one,) = [g for g in goldens.list(ADMIN) if g.origin == "imported"]
    assert one in goldens.list(ALICE)


def test_an_import_leaves_the_console_room_on_its_disk(
    goldens: Goldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.golden_imports._KEEP_FREE_BYTES", 1 << 60)
    with pytest.raises(NoRoom, match="almost full"):
        import_upload(goldens, "alice", "a.safetensors", io.BytesIO(golden()))
    assert not list(goldens.folder.rglob("*.safetensors"))


def test_a_zip_that_unpacks_to_too_much_is_refused(
    goldens: Goldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.golden_imports.MOST_BYTES", 4096)
    bomb = zipped({"a.safetensors": b"\0" * 100_000})
    with pytest.raises(TooLarge):
        import_upload(goldens, "alice", "bomb.zip", bomb)
    with pytest.raises(TooLarge):
        import_upload(goldens, "alice", "a.safetensors", io.BytesIO(b"\0" * 5000))
    assert not list(goldens.folder.rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["checkout", "checkpoints"])
def test_an_import_cannot_take_a_name_of_the_console(name: str, goldens: Goldens) -> None:
    with pytest.raises(WrongState):
        import_upload(goldens, "alice", f"{name}.safetensors", io.BytesIO(golden()))


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../goldens"])
def test_a_collection_name_leads_nowhere_else(name: str, goldens: Goldens) -> None:
    with pytest.raises(Missing):
        goldens.collection(ADMIN, name)
