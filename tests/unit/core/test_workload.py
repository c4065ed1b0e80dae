"""Workload: sizes of one step."""

from __future__ import annotations

import pytest

from fivefold.core.workload import Workload
from fivefold.errors import ConfigError, WorkloadError


def test_tokens() -> None:
    assert Workload(seq_len=128, global_batch=6).tokens == 768


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"seq_len": 0, "global_batch": 1}, "job: seq_len: expected a number above 0"),
        ({"seq_len": 8}, "job: missing key 'global_batch'"),
        (
            {"seq_len": 8, "global_batch": 1, "seq_length": 8},
            r"unknown key 'seq_length' \(did you mean 'seq_len'\?\)",
        ),
    ],
)
def test_refusals(data: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload.read(data, where="job")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 10**9}, "1000000000 tokens in a sequence .* at most 134217728"),
        ({"global_batch": 10**7}, "10000000 sequences in a step .* at most 1000000"),
    ],
)
def test_endless_steps_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        Workload(**{"seq_len": 8, "global_batch": 1, **changes})
