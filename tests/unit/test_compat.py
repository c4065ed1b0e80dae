"""Every private torch API, pinned: a new torch version that moves one fails here and names it."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold import compat
from fivefold.compat import COLLECTIVE_NAMESPACES, TorchDispatchMode, default_timeout, group_name_of
from fivefold.runtime.ledger import NOT_COMMUNICATION, OPERATIONS

TIMEOUT = timedelta(seconds=77)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


class Spy(TorchDispatchMode):
    """Keeps (namespace, operator, arguments) of everything that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.namespace, func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_collectives_and_their_group() -> None:
    group = dist.new_group([0], use_local_synchronization=True)
    with Spy() as spy:
        dist.all_reduce(torch.ones(2), group=group)
    ((namespace, name, arguments),) = [call for call in spy.calls if call[0] in COLLECTIVE_NAMESPACES]
    assert (namespace, name) == ("c10d", "allreduce_")
    names = [group_name_of(argument) for argument in arguments]
    assert [n for n in names if n] == [group.group_name]


def test_what_is_no_group_has_no_name() -> None:
    assert group_name_of(torch.ones(1)) is None
    assert group_name_of("sum") is None
    with Spy() as spy:
        dist.all_reduce(torch.ones(2))
    boxed = [a for _, _, arguments in spy.calls for a in arguments if isinstance(a, torch.ScriptObject)]
    assert len(boxed) == 2  # the group and the reduction, both boxed
    assert sorted(group_name_of(a) is None for a in boxed) == [False, True]


def test_group_name_of_an_unboxed_group() -> None:
    assert dist.group.WORLD is not None
    assert group_name_of(dist.group.WORLD) == dist.group.WORLD.group_name


def test_groups_of_the_same_ranks_have_names_of_their_own() -> None:
    a = dist.new_group([0], use_local_synchronization=True)
    b = dist.new_group([0], use_local_synchronization=True)
    assert a.group_name != b.group_name


def test_default_timeout_is_the_one_that_the_job_was_started_with() -> None:
    assert default_timeout(CPU) == TIMEOUT


def test_a_new_group_does_not_inherit_the_timeout() -> None:
    """The reason for `default_timeout`; when torch changes this, it can go."""
    group = dist.new_group([0], use_local_synchronization=True)
    assert group._get_backend(CPU).options._timeout != TIMEOUT


def test_every_collective_operator_of_torch_is_known() -> None:
    """A new operator has to be given its name in an event, and an old one that is gone has to be dropped."""
    registered = set()
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace in COLLECTIVE_NAMESPACES:
            registered.add(name.split(".")[0])
    several_at_once = {"batch_p2p_ops"}
    assert registered - several_at_once - {"_wrap_tensor_autograd"} == (
        (OPERATIONS.keys() | NOT_COMMUNICATION) - {"_wrap_tensor_autograd"}
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_returns_the_log_sum_exp(dtype: torch.dtype, causal: bool) -> None:
    """Grouped heads, a head size of no power of two; its backward takes slices of what the forward gave."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 9, 12, generator=generator, dtype=torch.float64) for n in (6, 2, 2))
    assert compat.has_flash(q.to(dtype))
    mine = [x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    q, k, v = (x.double().requires_grad_() for x in mine)
    scores = q @ k.repeat_interleave(3, 1).transpose(2, 3) / 12**0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
    expected = scores.softmax(-1) @ v.repeat_interleave(3, 1)
    out, lse = compat.flash_attention(*mine, causal=causal)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=min(tolerance, 1e-5))
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(dtype)
    exact = torch.autograd.grad(expected, (q, k, v), grad.double())
    found = compat.flash_attention_backward(grad, *mine, out.contiguous(), lse.contiguous(), causal=causal)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=4 * tolerance)


def test_flash_attention_on_cuda_still_has_these_arguments() -> None:
    """Not run here: the names and types that `flash_attention` and its backward rely on."""
    ops = torch.ops.aten
    forward = ops._scaled_dot_product_flash_attention.default._schema
    assert [a.name for a in forward.arguments][:5] == ["query", "key", "value", "dropout_p", "is_causal"]
    assert [a.name for a in forward.returns][:2] == ["output", "logsumexp"]
    backward = ops._scaled_dot_product_flash_attention_backward.default._schema
    assert [a.name for a in backward.arguments] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal", "philox_seed", "philox_offset", "scale",
    ]  # fmt: skip
    assert not compat.has_flash(torch.empty(1, 1, 1, 8, dtype=torch.bfloat16, device="meta"))


def test_a_finalizer_on_a_storage_runs_when_the_last_owner_lets_go() -> None:
    """The last owner may be autograd, in C++, long after Python forgot the tensor."""
    freed: list[str] = []
    weight = torch.ones(3, requires_grad=True)
    y = weight.exp()  # saved by its own backward
    weakref.finalize(y.untyped_storage(), freed.append, "y")
    view = y[1:]
    loss = y.sum()
    del y
    gc.collect()
    assert freed == []
    loss.backward()
    assert freed == [], "a view is an owner too"
    del view, loss
    assert freed == ["y"]


def test_the_same_storage_is_the_same_key() -> None:
    x = torch.ones(4)
    assert x.untyped_storage()._cdata == x.view(2, 2)[1].untyped_storage()._cdata
    assert x.untyped_storage()._cdata != x.clone().untyped_storage()._cdata


def test_warm_up_imports_what_torch_imports_late() -> None:
    compat.warm_up_imports()
    assert {"torch._dynamo", "torch.distributed"} <= sys.modules.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products(dtype: torch.dtype) -> None:
    """Rows times a matrix per group, and sums over groups; an empty group counts, and gives zeros."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((9, 16), (3, 16, 8)))
    counts = torch.tensor([5, 0, 4])
    assert compat.has_grouped_mm(a, b)
    expected = torch.cat([a[:5] @ b[0], a[5:] @ b[2]])
    torch.testing.assert_close(compat.grouped_mm(a, b, counts), expected)
    c = torch.randn(9, 8, generator=generator).to(dtype)
    sums = torch.stack([a[:5].t() @ c[:5], torch.zeros(16, 8).to(dtype), a[5:].t() @ c[5:]])
    torch.testing.assert_close(compat.grouped_mm(a.t(), c, counts), sums)


def test_what_grouped_products_refuse() -> None:
    for a, b in (
        (torch.ones(4, 16, dtype=torch.float64), torch.ones(2, 16, 8, dtype=torch.float64)),
        (torch.ones(4, 6), torch.ones(2, 6, 8)),
    ):
        assert not compat.has_grouped_mm(a, b)
        with pytest.raises(RuntimeError):
            compat.grouped_mm(a, b, torch.tensor([1, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan"), -float("inf")])
def test_unscaling_finds_what_is_not_finite(dtype: torch.dtype, bad: float | None) -> None:
    given = [torch.tensor([3.0, -5e-7], dtype=dtype), torch.full((2, 2), 7.0, dtype=dtype)]
    if bad is not None:
        given[1][1, 0] = bad
    tensors, found = [t.clone() for t in given], torch.zeros(1)
    compat.unscale_in_place(tensors, found, torch.full((1,), 2.0**-13))
    assert float(found) == (bad is not None)
    for a, b in zip(tensors, given, strict=True):
        assert torch.equal(a.nan_to_num(9), (b * 2.0**-13).nan_to_num(9)), "a power of two changes no digit"
    compat.unscale_in_place([], found, torch.ones(1))
