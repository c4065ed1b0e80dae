"""Faults in how gradients are scaled and summed over data ranks."""

from __future__ import annotations

from fivefold.engine import engine
from fivefold.runtime.mesh import Handle
from fivefold.strategies.data import replicated
from fivefold.strategies.data.fully_sharded import FullySharded
from fivefold.strategies.data.replicated import Replicated
from fivefold.strategies.data.shards import Bucket
from fivefold.strategies.data.zero import Sharded
from fivefold.strategies.pipeline.apply import Pipeline

from .exhibit import Patch, exhibit


@exhibit(
    "pp2", "dp2 tp2 pp2:gpipe", "the gradient of head", "exactly 3.000x, which is the number of microbatches",
    "axis pp", seen_in="picotron (measured: 4.0000x), torchtitan #2972", quick=True,
)  # fmt: skip
def gradients_times_microbatches(patch: Patch) -> None:
    """Under a pipeline the loss is not divided by the number of microbatches."""
    run = Pipeline.run

    def faulty(self, microbatches, scale):
        return run(self, microbatches, scale * len(microbatches) if self.last_stage > 0 else scale)

    patch.setattr(Pipeline, "run", faulty)


@exhibit(
    "pp2", "dp2 pp2:gpipe", "the gradient of head in step 2", "exactly 0.333x", "1 / the number of microbatches",
    "axis pp", seen_in="torchtitan #1733", late=True,
)  # fmt: skip
def rescaled_at_every_step(patch: Patch) -> None:
    """Under a pipeline each step divides by the number of microbatches once more. Clipping hides it from weights."""
    run = Pipeline.run

    def faulty(self, microbatches, scale):
        done = self.steps_done = getattr(self, "steps_done", -1) + 1
        return run(self, microbatches, scale / len(microbatches) ** done if self.last_stage > 0 else scale)

    patch.setattr(Pipeline, "run", faulty)


@exhibit(
    "dp2", "cp2:gather", "the gradient of head", "axis dp",
    seen_in="torchtitan #2206, torchtune #1875", quick=True,
)  # fmt: skip
def mean_of_rank_means(patch: Patch) -> None:
    """Each rank divides by its own count of valid tokens, and the means are averaged."""
    step = engine.Engine.step

    def faulty(self, load, lr):
        axis, run = self.mesh.axis("data"), self.pipeline.run

        def of_rank(batches, scale):
            own = engine._valid_tokens(batches).clamp(min=1) * axis.degree
            return run(batches, 1.0 / own.to(scale.dtype) if axis.degree > 1 else scale)

        self.pipeline.run = of_rank
        try:
            return step(self, load, lr)
        finally:
            del self.pipeline.run

    patch.setattr(engine.Engine, "step", faulty)


@exhibit("pp2", "dp2 pp2:gpipe", "the gradient of head", "axis pp")
def mean_of_microbatch_means(patch: Patch) -> None:
    """Under a pipeline each microbatch divides by its own count of valid tokens. A relative of torchtune #1875."""
    backward = Pipeline._b

    def faulty(self, chunk, j):
        whole, valid = self.scale, self.microbatches[j].mask_BS.sum().clamp(min=1)
        if self.last_stage > 0:
            self.scale = 1.0 / (valid * len(self.microbatches) * self.mesh.axis("data").degree).to(
                whole.dtype
            )
        backward(self, chunk, j)
        self.scale = whole

    patch.setattr(Pipeline, "_b", faulty)


@exhibit("dp2", "dp2 cp2", "the gradient of head", "exactly 0.500x, which is 1 / dp", "axis dp")
def averaged_after_the_global_count(patch: Patch) -> None:
    """The loss is divided by the global count, and gradients are averaged over data ranks besides."""
    wait = Replicated.wait

    def faulty(self):
        wait(self)
        for bucket in self._all_buckets():
            bucket.flat /= self.axis.degree

    patch.setattr(Replicated, "wait", faulty)


@exhibit(
    "cp2", "dp2 cp2:gather", "the gradient of head", "exactly 2.000x, which is cp", "axis cp",
    seen_in="Megatron #673, #906",
)  # fmt: skip
def gradients_times_cp(patch: Patch) -> None:
    """The loss is scaled by cp for an average over dp x cp, but the gradients are summed."""
    run = Pipeline.run

    def faulty(self, microbatches, scale):
        return run(self, microbatches, scale * self.mesh.layout.cp)

    patch.setattr(Pipeline, "run", faulty)


@exhibit(
    "cp2", "dp2 cp2:gather", "reduce data all_reduce", "(missing)", "axis cp",
    seen_in="picotron (measured: first loss right, sixth wrong)", quick=True,
)  # fmt: skip
def reduced_over_dp_only(patch: Patch) -> None:
    """Gradients are summed over dp and not over cp: with dp = 1, not at all."""
    start = replicated._Bucket.start

    def faulty(self, owner):
        if owner.mesh.layout.cp == 1:
            return start(self, owner)
        axis = owner.mesh.axis("dp")
        self.handle = Handle(axis, self.flat, None) if axis.degree == 1 else axis.all_reduce_start(self.flat)

    patch.setattr(replicated._Bucket, "start", faulty)


@exhibit("dp2", "dp2 pp2", "the gradient of", "reduce data all_reduce", "(missing)", "axis dp")
def one_bucket_not_reduced(patch: Patch) -> None:
    """The last bucket is never summed over data ranks."""
    start = replicated._Bucket.start

    def faulty(self, owner):
        if self is owner.buckets[self.chunk][-1]:
            self.handle = Handle(owner.axis, self.flat, None)
        else:
            start(self, owner)

    patch.setattr(replicated._Bucket, "start", faulty)


@exhibit("dp2", "tp2 cp2", "the gradient of", "in step 2 is the first to differ", "axis dp", late=True)
def bucket_not_zeroed(patch: Patch) -> None:
    """The gradients of a step are added to those of the step before."""
    forget = Replicated.forget_gradients

    def faulty(self):
        kept = [bucket.flat.clone() for bucket in self._all_buckets()]
        forget(self)
        for bucket, old in zip(self._all_buckets(), kept):
            bucket.flat.copy_(old)

    patch.setattr(Replicated, "forget_gradients", faulty)


@exhibit(
    "dp2 zero2", "dp2 pp2:gpipe zero2", "the gradient of", "axis dp", "so it is with zero0",
    seen_in="DeepSpeed #823",
)  # fmt: skip
def shard_forgets_microbatches(patch: Patch) -> None:
    """ZeRO-2 keeps the shard of the last microbatch in place of the sum of all."""
    wait = Bucket.reduce_wait

    def faulty(self):
        if self.reducing is not None:
            self.total = None
        wait(self)

    patch.setattr(Bucket, "reduce_wait", faulty)


@exhibit(
    "dp2 zero3", "dp2 pp2 zero3", "the numbers agree", "backward data all_gather", "(2x)", "so it is with zero0",
    seen_in="DeepSpeed #823", quick=True,
)  # fmt: skip
def zero3_gathers_twice(patch: Patch) -> None:
    """ZeRO-3 gathers parameters in backward that are there already: right gradients, wrong volume."""
    make_whole = FullySharded._make_whole

    def faulty(self, bucket, next_one):
        make_whole(self, bucket, next_one)
        if self.mesh.phase == "backward":
            bucket.gather_start()
            bucket.gather_wait()

    patch.setattr(FullySharded, "_make_whole", faulty)


@exhibit(
    "dp4 zero1/2", "dp2 cp2 zero2/2", "the gradient of", "reduce data all_reduce", "(missing)",
    "so it is with zero1 without groups",
)  # fmt: skip
def groups_not_summed(patch: Patch) -> None:
    """Hybrid sharding sums within each group and forgets the sum across groups."""
    patch.setattr(Bucket, "sum_groups_start", lambda self: Handle(self.across, self.total, None))


@exhibit(
    "dp2 zero1", "dp2 pp2 zero2", "the weight after an SGD step of", "optimizer data all_gather", "(missing)",
    "axis dp", quick=True,
)  # fmt: skip
def stale_shard(patch: Patch) -> None:
    """After the update one bucket's shards are not gathered: ranks keep old values of what others updated."""

    def faulty(self):
        first, *others = self.buckets()
        for bucket in others:
            bucket.gather_start()
        for bucket in others:
            bucket.gather_wait()
        for part, shard in zip(first.parts, first.flat.split(first.sizes)):
            part[first.axis.index].copy_(shard)

    patch.setattr(Sharded, "spread", faulty)
