"""Faults of tensor parallelism: partial sums, replicas, vocabulary, logical parts of weights."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.engine import engine
from fivefold.nn.init import make_shard
from fivefold.strategies.tensor import apply as tensor
from fivefold.strategies.tensor import linear
from fivefold.strategies.tensor.vocabulary import VocabularyLoss

from .exhibit import HARD, ONE_KV_HEAD, Patch, exhibit


def leave_out(patch: Patch, left_out) -> None:
    """`sum_gradients` of all rows but those for which `left_out(size of the runs)` holds."""
    sums = tensor.sum_gradients

    def faulty(gradients, mesh):
        sums([pair for pair in gradients if "tp" in pair[0].sums and not left_out(pair[0].sums["tp"])], mesh)

    patch.setattr(tensor, "sum_gradients", faulty)


@exhibit("tp2", "tp2 cp2", "the gradient of norm", "reduce tp all_reduce", "(missing)", "so it is with nosp",
         seen_in="Megatron #1446, #7452", quick=True)  # fmt: skip
def norms_not_summed_under_sp(patch: Patch) -> None:
    """Under sequence parallelism each tp rank keeps the norms' gradients of its own tokens."""
    leave_out(patch, lambda size: size is None)


@exhibit("tp2", "tp2 pp2 nosp", "the gradient of layers.1.attention.qkv.k", "reduce tp all_reduce", "axis tp",
         spec=ONE_KV_HEAD, seen_in="torchtitan #2574, transformers #48307 (crash)")  # fmt: skip
def kv_replicas_not_summed(patch: Patch) -> None:
    """Neighbours that hold the same KV head each keep the gradient of their own query heads."""
    leave_out(patch, lambda size: size is not None)


@exhibit("tp2", "tp2 pp2", "the gradient of", "axis tp", spec=HARD, loss_sees=True, seen_in="Megatron #1754",
         quick=True)  # fmt: skip
def padding_in_the_softmax(patch: Patch) -> None:
    """A vocabulary of 53 on two ranks: the 54th logit takes part in the softmax."""
    init = VocabularyLoss.__init__
    patch.setattr(VocabularyLoss, "__init__", lambda self, axis, vocab: init(self, axis, 10**9))


@exhibit("tp2 nosp", "tp2 pp2 nosp", "the output of layers.0", "forward tp all_reduce", "axis tp", loss_sees=True,
         seen_in="gpt-fast (measured: wrong at batch 2)")  # fmt: skip
def first_row_only(patch: Patch) -> None:
    """A hook sums the first row of a batch over tp and leaves the others as they are."""
    whole = linear.sum_partial

    def faulty(partial: Tensor, cut: linear.Cut) -> Tensor:
        if cut.sequence_parallel:
            return whole(partial, cut)
        cut.axis.all_reduce(partial.detach()[0])
        return partial

    patch.setattr(linear, "sum_partial", faulty)


@exhibit("tp2", "tp2 cp2", "the output of layers.0", "axis tp", spec=HARD, loss_sees=True)
def bias_added_by_every_rank(patch: Patch) -> None:
    """The bias of a row-parallel map is added before the sum over tp, not after it."""
    forward = linear.RowParallel.forward

    def faulty(self, x: Tensor) -> Tensor:
        out = forward(self, x)
        return out if self.bias is None else out + (self._cut.axis.degree - 1) * self.bias

    patch.setattr(linear.RowParallel, "forward", faulty)


@exhibit("tp2 nosp", "tp2 pp2 nosp", "the gradient of", "backward tp all_reduce", "(missing)", "axis tp")
def input_gradient_not_summed(patch: Patch) -> None:
    """The gradient of a column-parallel map's input stays the part of its own columns."""
    start = linear.sum_start
    patch.setattr(linear, "sum_start", lambda dx, cut: start(dx, cut) if cut.sequence_parallel else None)


# Logical parts of a weight


def values_by(patch: Patch, make) -> None:
    """Local values from `make(row, layout, coordinate, whole)` where it gives some; `whole` makes a global tensor."""
    given = engine.initial_value

    def faulty(row, layout, coordinate, dtype, *, seed, noise=0.0):
        def whole(name: str) -> Tensor:
            region = [slice(0, size) for size in row.shape]
            return make_shard(name, region, seed=seed, std=row.init_std, dtype=getattr(torch, dtype))

        made = make(row, layout, coordinate, whole) if layout.tp > 1 else None
        return given(row, layout, coordinate, dtype, seed=seed, noise=noise) if made is None else made

    patch.setattr(engine, "initial_value", faulty)


@exhibit("tp2", "dp2 tp2", "the initial value of layers.0.mlp.inputs.gate", "axis tp", loss_sees=True,
         seen_in="Megatron-ROCm #63")  # fmt: skip
def gate_and_up_cut_as_one(patch: Patch) -> None:
    """Gate and up are cut as one fused weight: the first ranks get rows of gate only, the last ones of up."""

    def make(row, layout, coordinate, whole):
        if row.role not in ("gate", "up"):
            return None
        prefix = row.init_name.rpartition("inputs.")[0]
        fused = torch.cat([whole(f"{prefix}inputs.{part}.weight") for part in ("gate", "up")])
        own = fused.chunk(layout.tp)[coordinate["tp"]]
        return own.chunk(2)[row.role == "up"].clone()

    values_by(patch, make)


@exhibit("tp2", "tp2 pp2", "the initial value of layers.0.attention.qkv.k", "axis tp",
         seen_in="torchtitan #1483, #4593")  # fmt: skip
def queries_and_keys_permuted_on_shards(patch: Patch) -> None:
    """The order of rotary pairs is changed on shards with the global number of heads, and back on whole weights."""

    def make(row, layout, coordinate, whole):
        if row.role not in ("q", "k") or row.is_bias:
            return None
        heads, columns = 4, row.shape[1]
        pairs = whole(row.init_name).view(heads, -1, 2, columns).transpose(1, 2).reshape(row.shape)
        own = pairs.chunk(layout.tp)[coordinate["tp"]]
        return own.view(heads, 2, -1, columns).transpose(1, 2).reshape(own.shape).clone()

    values_by(patch, make)


@exhibit("tp2", "tp2 pp2", "every rank, every step: backward tp all_reduce float32 28 B: predicted none, recorded 1",
         "the numbers agree", "axis tp")  # fmt: skip
def a_collective_too_many(patch: Patch) -> None:
    """Every step sends something that nobody planned."""
    step = engine.Engine.step

    def faulty(self, load, lr):
        result = step(self, load, lr)
        self.mesh.phase = "backward"
        self.mesh.axis("tp").all_reduce(torch.zeros(7))
        return result

    patch.setattr(engine.Engine, "step", faulty)
