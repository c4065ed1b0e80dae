"""Execution: defaults, microbatches, refusals."""

from __future__ import annotations

import pytest

from fivefold.core.execution import Execution, microbatches
from fivefold.core.layout import Layout
from fivefold.core.workload import Workload
from fivefold.errors import ConfigError, WorkloadError


@pytest.mark.parametrize(
    ("global_batch", "layout", "micro_batch", "expected"),
    [
        (8, "dp1", 1, 8),
        (8, "dp4", 2, 1),
        (8, "dp2 tp2 pp2", 2, 2),
        (8, "cp4", 1, 8),  # context-parallel ranks share sequences
        (8, "dp2 cp2 ep4", 1, 4),
    ],
)
def test_microbatches(global_batch: int, layout: str, micro_batch: int, expected: int) -> None:
    workload = Workload(seq_len=16, global_batch=global_batch)
    assert microbatches(workload, Layout.parse(layout), Execution(micro_batch=micro_batch)) == expected


@pytest.mark.parametrize(
    ("global_batch", "message"),
    [
        (10, r"global batch 10 is not a multiple of dp4 x micro-batch 1 = 4; nearest global batch: 8 or 12"),
        (3, r"nearest global batch: 4$"),
    ],
)
def test_microbatches_that_do_not_divide(global_batch: int, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        microbatches(Workload(seq_len=16, global_batch=global_batch), Layout(dp=4), Execution())


def test_defaults_and_item_sizes() -> None:
    execution = Execution()
    assert (execution.micro_batch, execution.dtype, execution.recompute) == (1, "float32", "none")
    sizes = {dtype: Execution(dtype=dtype).itemsize_bytes for dtype in ("float32", "float64", "bfloat16")}  # type: ignore[arg-type]
    assert sizes == {"float32": 4, "float64": 8, "bfloat16": 2}


def test_unknown_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="dtype: expected 'float32', 'float64', 'bfloat16' or 'float16'"):
        Execution.read({"dtype": "fp8"}, where="execution")
    with pytest.raises(ConfigError, match="micro_batch: expected a number above 0"):
        Execution.read({"micro_batch": 0}, where="execution")
