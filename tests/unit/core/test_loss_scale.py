"""The loss scale's settings and its course, against a walk written out by hand."""

from __future__ import annotations

import random

import pytest

from fivefold.core.execution import ITEMSIZE_BYTES, LARGEST_NUMBER, Execution
from fivefold.core.loss_scale import LARGEST_SCALE, LossScaleConfig, LossScaleState
from fivefold.errors import ConfigError


def course(overflows: list[bool], start: int, grow_every: int) -> list[int]:
    """The scale of each step and of the one after the last."""
    scales, quiet = [start], 0
    for overflow in overflows:
        scale = scales[-1]
        if overflow:
            scale, quiet = scale / 2, 0
        else:
            quiet += 1
            if quiet == grow_every:
                scale, quiet = scale * 2, 0
        scales.append(int(min(max(scale, 1), 2**24)))
    return scales


@pytest.mark.parametrize("grow_every", [1, 2, 3, 7])
@pytest.mark.parametrize("start", [1, 4, 65536, LARGEST_SCALE])
def test_course(start: int, grow_every: int) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        overflows = [chance.random() < 0.3 for _ in range(60)]
        state, seen = LossScaleState(scale=start), [start]
        for overflow in overflows:
            state = state.after(overflow=overflow, grow_every=grow_every)
            seen.append(state.scale)
        assert seen == course(overflows, start, grow_every)
        assert state.overflows == sum(overflows)


def test_a_count_that_was_kept_goes_on() -> None:
    state = LossScaleState(scale=8, good_steps=4)
    assert LossScaleState.model_validate_json(state.model_dump_json()) == state
    assert state.after(overflow=False, grow_every=5) == LossScaleState(scale=16)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"initial": 1000}, "initial: expected a power of two, such as 512 or 1024 (got 1000)"),
        ({"initial": 0}, "initial: expected a number of at least 1 (got 0)"),
        ({"initial": 2**25}, "initial: expected a number of at most 16777216"),
        ({"initial": True}, "initial: expected a number, not true or false"),
        ({"grow_every": 0}, "grow_every: expected a number of at least 1"),
        ({"inital": 2}, "unknown key 'inital' (did you mean 'initial'?)"),
    ],
)
def test_bounds(data: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LossScaleConfig.read(data, where="config")
    assert words in str(caught.value)


def test_float16_always_has_one() -> None:
    assert Execution(dtype="float16").scaling == LossScaleConfig()
    assert Execution(dtype="bfloat16").scaling is None
    assert Execution(dtype="float16").grad_dtype == "float32"
    given = LossScaleConfig(initial=2)
    assert Execution(dtype="float64", loss_scale=given).scaling == given
    assert ITEMSIZE_BYTES.keys() == LARGEST_NUMBER.keys()


def test_largest_numbers_are_torchs() -> None:
    import torch

    assert {name: torch.finfo(getattr(torch, name)).max for name in LARGEST_NUMBER} == LARGEST_NUMBER
