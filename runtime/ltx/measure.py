"""How many tokens a prompt has, as the text tower counts them: `python -m runtime.ltx.measure`.

{"prompt": ..., "text_encoder": folder, "tokenizer": folder or null} as JSON comes on stdin, the
count goes to stdout; 2 and a sentence for what is no tokenizer. No torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from runtime.ltx.text_folder import bos_of, open_tokenizer, prompt_ids

BAD_INPUT = 2


def main() -> int:
    """The entry of the child."""
    asked = json.load(sys.stdin)
    folder, tokenizer = Path(asked["text_encoder"]), asked["tokenizer"]
    try:
        words = open_tokenizer(folder, tokenizer and Path(tokenizer))
        print(len(prompt_ids(words, bos_of(folder), asked["prompt"])))
    except ValueError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
