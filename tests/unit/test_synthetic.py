"""Random conditioning has the size that a benchmark names."""

from __future__ import annotations

import pytest
import torch

from runtime.h3.denoise import layout_of
from runtime.h3.packing import target_of
from runtime.h3.synthetic import synthetic_conditioning
from runtime.messages import Ref2VARequest

REFERENCE = Ref2VARequest(id="bench", prompt="")


def test_the_reference_shape_with_300_words_has_20_094_rows() -> None:
    made = synthetic_conditioning(REFERENCE, 300, 1)
    assert layout_of(made, target_of(REFERENCE)).num_rows == 20_094


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    small = Ref2VARequest(id="a", prompt="", width=64, height=64, frames=22)
    first, same, other = (synthetic_conditioning(small, 5, s, text_dim=8) for s in (3, 3, 4))
    assert torch.equal(first.context.context, same.context.context)
    latents = [made.references[0].latent for made in (first, same)]
    assert latents[0] is not None and latents[1] is not None
    assert torch.equal(latents[0], latents[1])
    assert not torch.equal(first.context.context, other.context.context)


@pytest.mark.parametrize("rows", [0, -1, 100_001])
def test_a_count_of_words_out_of_range_is_refused_in_a_sentence(rows: int) -> None:
    with pytest.raises(ValueError, match=f"text rows must be 1 to 100,000, got {rows}"):
        synthetic_conditioning(REFERENCE, rows, 1)


def test_a_side_without_references_has_the_words_alone() -> None:
    made = synthetic_conditioning(REFERENCE, 300, 1, picture=False)
    assert layout_of(made, target_of(REFERENCE)).num_rows == 20_094 - 510
