"""AdaLN tables once per schedule: each step's own bits, bounded; weights that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from runtime.checkpoints.demo import random_checkpoint
from runtime.checkpoints.header import CheckpointError
from runtime.h3.conditioning import ReferenceBlock
from runtime.h3.denoise import draw_noise, sample
from runtime.h3.load import load_denoiser
from runtime.h3.model import H3Model
from runtime.h3.modulation import TableCache, Tables
from runtime.h3.schedule import sigmas_for
from tests.denoiser_parts import CPU, TARGET, conditioning, demo_plan, denoiser, normal, side

Timed = Callable[[int], AbstractContextManager[None]]  # of `sample`

SIGMAS = sigmas_for("beta", 4, 12.0)
STEPS = [torch.tensor([t, t + 0.25, 0.999]) for t in (0.0, 0.1, 0.2, 0.3)]


class Counted:
    """A table per step that tells which times it was built from, and a record of the builds."""

    def __init__(self) -> None:
        self.builds: list[list[Tensor]] = []

    def modulation(self, times: Sequence[Tensor]) -> list[Tables]:
        self.builds.append(list(times))
        return [[(t_M * 2,)] for t_M in times]

    def table_bytes(self, num_times: int) -> int:
        return 100 * num_times


def built(model: Counted) -> list[int]:
    return [len(times) for times in model.builds]


def test_a_schedule_is_built_once_and_the_same_one_again_not_at_all() -> None:
    model, cache = Counted(), TableCache()
    for _ in range(2):
        cache.plan(STEPS, model)
        for t_M in STEPS:
            assert torch.equal(cache.at(t_M.clone(), model)[0][0], t_M * 2)
    assert built(model) == [4]


def test_another_schedule_takes_the_place_of_the_first() -> None:
    model, cache = Counted(), TableCache()
    cache.plan(STEPS[:2], model)
    cache.plan(STEPS[2:], model)
    cache.at(STEPS[2], model)
    assert built(model) == [2, 2]
    cache.plan(STEPS[:2], model)
    assert built(model) == [2, 2, 2]


def test_times_that_differ_in_the_last_bit_have_their_own_tables() -> None:
    model, cache = Counted(), TableCache()
    next_up = torch.nextafter(STEPS[1], torch.ones(3))
    assert torch.equal(cache.at(STEPS[1], model)[0][0], STEPS[1] * 2)
    assert torch.equal(cache.at(next_up, model)[0][0], next_up * 2)


def test_a_schedule_over_the_limit_is_built_in_windows_that_fit() -> None:
    model, cache = Counted(), TableCache(limit_bytes=750)  # two steps of three times
    cache.plan(STEPS, model)
    for t_M in STEPS:
        assert torch.equal(cache.at(t_M, model)[0][0], t_M * 2)
    assert built(model) == [2, 2]


def test_a_step_larger_than_the_limit_is_built_alone() -> None:
    model, cache = Counted(), TableCache(limit_bytes=1)
    cache.plan(STEPS, model)
    for t_M in STEPS:
        cache.at(t_M, model)
    assert built(model) == [1, 1, 1, 1]


def test_times_outside_the_schedule_are_built_alone() -> None:
    model, cache = Counted(), TableCache()
    cache.plan(STEPS[:2], model)
    cache.at(STEPS[3], model)
    assert built(model) == [2, 1]


@pytest.mark.parametrize("format", ["full_bf16", "pruned_bf16", "pruned_nvfp4", "full_fp8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tables_of_a_schedule_are_those_of_its_steps_bit_for_bit(format: str, dtype: str) -> None:
    model = denoiser(format, dtype=dtype)
    with torch.inference_mode():
        together = model.modulation(STEPS)
        for t_M, tables in zip(STEPS, together, strict=True):
            t_emb = model.embed_time(t_M)
            alone = [layer(t_emb) for layer in model.adaln_layers]
            for want, got in zip(alone, tables, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        bytes = sum(t.nbytes for tables in together[:1] for part in tables for t in part)
    assert model.table_bytes(3) == bytes


def calls(model: H3Model) -> Iterator[list[str]]:
    seen: list[str] = []
    model.adaln_layers[0].register_forward_hook(lambda *_: seen.append("built"))
    yield seen


def untimed(step: int) -> AbstractContextManager[None]:
    return nullcontext()


def sampled(model: H3Model, cfg: float = 4.0, timed: Timed = untimed) -> Tensor:
    reference = (ReferenceBlock(kind="ref_img", latent=normal(1, 24, 1, 2, 2), audio_latent=None),)
    with torch.inference_mode():
        pair = sample(
            side(model, conditioning(references=reference)),
            side(model, conditioning((1, 1))),
            cfg=cfg,
            sampler="euler",
            sigmas=SIGMAS,
            noise=draw_noise(TARGET, 3),
            start=None,
            on_step=lambda step: None,
            timed=timed,
        )
    return pair.packed()


def test_no_steps_time_has_the_tables_of_the_schedule_in_it() -> None:
    """As docs/benchmarks/README.md says of the first turn."""
    model = denoiser("full_bf16")
    (seen,) = calls(model)
    marks: list[int] = []

    @contextmanager
    def timed(step: int) -> Iterator[None]:
        marks.append(len(seen))
        yield
        marks.append(len(seen))

    sampled(model, timed=timed)
    steps = len(SIGMAS) - 1
    assert marks == [2 * steps] * 2 * steps, "both sides' before step 1, none within a step"


@pytest.mark.parametrize("format", ["full_bf16", "pruned_bf16"])
def test_a_second_request_of_the_same_schedule_builds_no_table(format: str) -> None:
    model = denoiser(format)
    (seen,) = calls(model)
    first = sampled(model)
    assert len(seen) == 2 * (len(SIGMAS) - 1), "both sides have times of their own"
    assert torch.equal(sampled(model), first)
    assert len(seen) == 2 * (len(SIGMAS) - 1)


@pytest.mark.parametrize("format", ["full_bf16", "pruned_bf16"])
def test_kept_tables_change_no_bit_of_a_sample(format: str) -> None:
    model = denoiser(format)
    want = sampled(model)
    model.tables = TableCache(limit_bytes=1)
    assert torch.equal(sampled(model), want)


# ---- offloaded


def held(model: H3Model) -> dict[str, str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.device.type for name, t in named if "adaln_proj" in name}


@pytest.mark.parametrize("format", ["full_bf16", "full_fp8"])
def test_offloaded_weights_are_on_the_device_only_while_tables_are_built(format: str) -> None:
    want = sampled(denoiser(format))
    model = denoiser(format, adaln="offloaded")
    assert set(held(model).values()) == {"meta"}
    most: list[int] = []
    for layer in model.adaln_layers:
        layer.register_forward_hook(
            lambda *_: most.append(sum(d != "meta" for d in held(model).values()))
        )
    assert torch.equal(sampled(model), want)
    assert set(most) == {2}, "one layer's weight and bias"
    assert set(held(model).values()) == {"meta"}


def test_each_layer_is_lent_once_for_a_whole_schedule() -> None:
    model = denoiser("full_bf16", adaln="offloaded")
    lend, lent = model.lend, []

    @contextmanager
    def counted(layer: nn.Module) -> Iterator[None]:
        lent.append(layer)
        with lend(layer):
            yield

    model.lend = counted
    sampled(model)
    sampled(model)
    assert lent == model.adaln_layers


def test_everything_else_of_an_offloaded_model_is_the_resident_one_s() -> None:
    rest = [
        {n: t for n, t in denoiser("full_bf16", adaln=a).state_dict().items() if "adaln" not in n}
        for a in ("resident", "offloaded")
    ]
    assert rest[0].keys() == rest[1].keys()
    assert all(torch.equal(rest[0][name], rest[1][name]) for name in rest[0])


def test_a_pruned_file_is_not_offloaded() -> None:
    checkpoint = random_checkpoint("dit", size="tiny", format="pruned_bf16")
    with pytest.raises(CheckpointError, match=r"this one is pruned .* set adaln to resident"):
        load_denoiser(checkpoint, demo_plan(adaln="offloaded"), CPU)


def test_an_offloaded_tensor_has_to_fit_before_anything_is_read() -> None:
    checkpoint = random_checkpoint("dit", size="tiny", format="full_bf16")
    missing = "blocks.0.adaln_proj.linear.bias"
    names = tuple(name for name in checkpoint.names() if name != missing)
    checkpoint.names = lambda: names  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=f"1 tensors missing: {missing}"):
        load_denoiser(checkpoint, demo_plan(adaln="offloaded"), CPU)
