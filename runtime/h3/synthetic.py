"""Random conditioning of a given size, for benchmarks and gates that have no text encoder.

It says how long a request takes and how far two backends are apart, nothing about pictures.
"""

from __future__ import annotations

import torch

from runtime.h3.conditioning import Conditioning, ReferenceBlock
from runtime.h3.packing import target_of
from runtime.h3.text import TextContext
from runtime.layouts import guided
from runtime.messages import Ref2VARequest

TEXT_DIM = 5120  # of the published text encoder (contract 1.2); tiny denoisers say their own
MOST_TEXT_ROWS = 100_000
_VIDEO_CHANNELS = 24
_TEXT_TAG = 1  # AdaLN row of a word; vision tokens are not made


def synthetic_conditioning(
    request: Ref2VARequest,
    text_rows: int,
    seed: int,
    *,
    text_dim: int = TEXT_DIM,
    picture: bool = True,
) -> Conditioning:
    """`text_rows` words [1,L,text_dim] and one reference picture of the target's size, fp32, CPU.

    picture: False leaves it out, as a negative side does that has no references.
    Standard normal numbers of one generator: words first, then the latent [1,24,1,h,w]. 960x544,
    124 frames and 300 words pack into 20,094 rows. ValueError for a count of words out of range.
    """
    if not 1 <= text_rows <= MOST_TEXT_ROWS:
        raise ValueError(f"text rows must be 1 to {MOST_TEXT_ROWS:,}, got {text_rows}")
    generator = torch.Generator().manual_seed(seed)
    context = TextContext(
        context=torch.randn(1, text_rows, text_dim, generator=generator),
        token_tags=torch.full((text_rows,), _TEXT_TAG, dtype=torch.int64),
        tokens=(),
    )
    if not picture:
        return Conditioning(context=context)
    target = target_of(request)
    latent = torch.randn(
        1, _VIDEO_CHANNELS, 1, target.latent_h, target.latent_w, generator=generator
    )
    return Conditioning(context=context, references=(ReferenceBlock(kind="image", latent=latent),))


def synthetic_sides(
    request: Ref2VARequest, text_rows: int, text_dim: int
) -> tuple[Conditioning, Conditioning | None]:
    """The positive side, and the negative one of a request that has one."""
    seed = request.seed
    positive = synthetic_conditioning(request, text_rows, seed, text_dim=text_dim)
    if not guided(request.cfg):
        return positive, None
    negative = synthetic_conditioning(
        request,
        text_rows,
        (seed + 1) % 2**64,
        text_dim=text_dim,
        picture=request.negative_references,
    )
    return positive, negative
