"""Faults in what training starts from: weights, data, counts."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from fivefold.data.batches import Dataset
from fivefold.engine import build, engine

from .exhibit import LONG, Patch, exhibit


@exhibit("dp2", "pp2", "the initial value of embedding", "on rank 1 only", "axis dp", loss_sees=True,
         seen_in="torchtitan #1750", quick=True)  # fmt: skip
def values_by_rank(patch: Patch) -> None:
    """The seed of the initial values has the rank in it."""
    make = build.make_shard

    def faulty(*arguments, seed, **options):
        return make(*arguments, seed=seed + dist.get_rank(), **options)

    patch.setattr(build, "make_shard", faulty)


@exhibit("tp2", "dp2 zero3", "the initial value of embedding", "on rank 1 only", "axis tp", loss_sees=True,
         seen_in="torchtitan #1750")  # fmt: skip
def values_by_local_index(patch: Patch) -> None:
    """Every rank draws its part as if it were the first."""
    make = build.make_shard

    def faulty(name, region, **options):
        return make(name, [slice(0, part.stop - part.start) for part in region], **options)

    patch.setattr(build, "make_shard", faulty)


@exhibit("dp2", "dp2 tp2", "the ranks read other tokens", "on rank 1 only", "axis dp", loss_sees=True,
         seen_in="torchtitan #3029")  # fmt: skip
def samples_by_rank(patch: Patch) -> None:
    """Every data rank has a part of the data of its own, so that the samples of a step depend on dp."""
    microbatch = Dataset.microbatch

    def faulty(self, step, index, *, dp_rank, **options):
        return microbatch(self, step + 1000 * dp_rank, index, dp_rank=dp_rank, **options)

    patch.setattr(Dataset, "microbatch", faulty)


@exhibit("dp2", "dp2 pp2", "the ranks read other tokens", "on rank 1 only", "axis dp", loss_sees=True)
def the_same_samples_on_every_rank(patch: Patch) -> None:
    """Data ranks all read what is meant for the first."""
    microbatch = Dataset.microbatch

    def faulty(self, step, index, *, dp_rank, **options):
        return microbatch(self, step, index, dp_rank=0, **options)

    patch.setattr(Dataset, "microbatch", faulty)


@exhibit("dp2", "dp2 tp2 zero1", "the ranks read other loss mask", "axis dp", loss_sees=True)
def loss_mask_lost(patch: Patch) -> None:
    """With more than one data rank, labels that are masked count as well."""
    microbatch = Dataset.microbatch

    def faulty(self, step, index, *, dp, **options):
        batch = microbatch(self, step, index, dp=dp, **options)
        return replace(batch, loss_mask_BS=batch.loss_mask_BS | (dp > 1))

    patch.setattr(Dataset, "microbatch", faulty)


@exhibit("dp2", "cp2", "the gradient of head", "exactly", "metrics data all_reduce bfloat16", "axis dp", spec=LONG,
         loss_sees=True, seen_in="pytorch/xla #2425")  # fmt: skip
def tokens_counted_in_bfloat16(patch: Patch) -> None:
    """The valid tokens of all ranks are summed in bfloat16, in which 256 + 1 is 256."""

    def faulty(self, batches):
        self.mesh.phase = "metrics"
        own, axis = engine._valid_tokens(batches), self.mesh.axis("data")
        return axis.all_reduce(own.bfloat16()).long() if axis.degree > 1 else own

    patch.setattr(engine.Engine, "count_valid", faulty)
