"""The layers of docs/architecture.md, checked: lower layers never see higher ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAMILIES = {"runtime.h3", "runtime.ltx"}
PARTS = {f"runtime.{x}" for x in ("kernels", "parallel", "caches", "checkpoints", "parity")}
RUNTIME = FAMILIES | PARTS
# What app may read of the runtime's parts, for preflight and inspect; all of it is torch-free.
TORCH_FREE = {
    "runtime.checkpoints.header",
    "runtime.checkpoints.classify",
    "runtime.checkpoints.modes",
    "runtime.h3.packing",
    "runtime.ltx.sizes",
    "runtime.ltx.census",
    "runtime.ltx.orders",
    "runtime.ltx.folders",
    "runtime.ltx.published",
    "runtime.ltx.text_folder",
    "runtime.parity.ltx_kinds",
}
DRAWING = {"gradio", "plotly"}

BANNED = {
    "runtime": {"app", "panels", "pynvml"} | DRAWING,
    "runtime/messages.py": RUNTIME | {"torch"},
    "runtime/layouts.py": RUNTIME | {"torch"},
    "runtime/quoted.py": RUNTIME | {"torch"},
    "runtime/engine.py": RUNTIME | {"torch", "runtime.clock", "runtime.media"},
    "runtime/families.py": RUNTIME | {"torch"},
    "runtime/h3": {"runtime.ltx", "torch.distributed"},
    "runtime/h3/model.py": {"runtime.parallel"},
    "runtime/ltx": {"runtime.h3", "torch.distributed"},
    "runtime/kernels": FAMILIES,
    "runtime/parallel": FAMILIES,
    "runtime/caches": FAMILIES,
    "runtime/checkpoints": FAMILIES,
    "app": RUNTIME | DRAWING | {"panels", "torch"},
    "panels": RUNTIME | {"runtime.engine", "torch"},
}
ALLOWED = {"app": TORCH_FREE}
# Copied into ComfyUI: relative imports, nothing of ours (test_capture_node.py loads it so).
STANDS_ALONE = ROOT / "runtime" / "parity" / "comfy_node"


def python_files(place: str) -> list[Path]:
    path = ROOT / place
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*.py") if not p.is_relative_to(STANDS_ALONE))


def imported(source: str) -> set[str]:
    """Absolute names that the source imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def offences(source: str, place: str) -> list[str]:
    """The imports of `source` that a file under `place` may not have."""
    return [
        name
        for name in sorted(imported(source))
        if any(f"{name}.".startswith(f"{banned}.") for banned in BANNED[place])
        and not any(f"{name}.".startswith(f"{free}.") for free in ALLOWED.get(place, ()))
    ]


@pytest.mark.parametrize("place", BANNED)
def test_a_layer_imports_nothing_above_it(place: str) -> None:
    found = {
        str(file.relative_to(ROOT)): names
        for file in python_files(place)
        if (names := offences(file.read_text(encoding="utf-8"), place))
    }
    assert not found


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("runtime", "import gradio"),
        ("runtime", "def f():\n    from app import runs"),
        ("runtime/messages.py", "import torch.nn"),
        ("runtime/kernels", "from runtime.h3 import model"),
        ("app", "from torch import Tensor"),
        ("app", "from runtime.checkpoints import base"),
        ("panels", "from runtime.engine import Engine"),
    ],
)
def test_the_check_sees_a_planted_import(place: str, line: str) -> None:
    assert offences(line, place)


def test_app_may_read_checkpoint_headers() -> None:
    assert not offences("from runtime.checkpoints.header import read_header", "app")


def test_only_the_engine_part_of_the_runtime_is_known_to_app() -> None:
    known = {
        name.split(".")[1]
        for file in python_files("app")
        for name in imported(file.read_text(encoding="utf-8"))
        if name.startswith("runtime.")
    }
    engine = {"messages", "layouts", "engine", "families", "media", "checkpoints", "packed_files"}
    assert known <= engine | {"quoted", "h3", "ltx", "parity"}


@pytest.mark.parametrize(
    "module", ["app.session", "app.host", "panels.generate", "launch", *sorted(TORCH_FREE)]
)
def test_the_console_never_loads_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("module", ["app.cli.generate", "panels.serve", "panels"])
def test_commands_read_their_arguments_before_gradio_is_loaded(module: str) -> None:
    code = f"import sys, {module}; sys.exit('gradio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_no_page_template_can_run_what_a_user_wrote() -> None:
    """gr.HTML evaluates ${...} and {{...}} of a template, so templates are constant text."""
    for file in python_files("panels"):
        text = file.read_text(encoding="utf-8")
        assert not any(bad in text for bad in ("${", "{{")), file


RUNS_MARKUP = (  # every way by which a script turns text into markup or into code
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "setHTML", "srcdoc", "document.write"),
    *("DOMParser", "createContextualFragment", "new Function", "eval(", "javascript:"),
    *("setAttribute('on", "setTimeout('", "setInterval('"),
)


@pytest.mark.parametrize("word", RUNS_MARKUP)
def test_no_script_of_the_page_turns_text_into_markup_or_code(word: str) -> None:
    scripts = list((ROOT / "panels/web").glob("*.js"))
    assert len(scripts) > 10
    assert [s.name for s in scripts if word in s.read_text(encoding="utf-8")] == []


def test_the_shared_scripts_cannot_end_their_element_in_the_head() -> None:
    from panels.theme import head  # imports Gradio

    text = head()
    assert text.count("<script") == text.count("</script") == 1
