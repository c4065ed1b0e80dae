"""Faults of context parallelism: places of tokens, masks, the transposes of its collectives."""

from __future__ import annotations

from dataclasses import replace

import torch

from fivefold.engine import feed
from fivefold.engine.engine import Engine
from fivefold.runtime import collectives
from fivefold.strategies.context import blocks, gather, ring
from fivefold.strategies.context.gather import GatherCore
from fivefold.strategies.context.ring import RingCore

from .exhibit import HARD, Patch, exhibit


def change_what_is_fed(patch: Patch, changed) -> None:
    """Under cp, `changed(microbatch, batch, here)` is fed; `here`: the places of the rank's tokens."""
    given = feed.to_device

    def faulty(batch, device, here=None, **options):
        made = given(batch, device, here, **options)
        return made if here is None else changed(made, batch, here)

    patch.setattr(feed, "to_device", faulty)


@exhibit("cp2", "tp2 cp2:gather", "the ranks read other positions", "axis cp", quick=True)
def positions_start_anew(patch: Patch) -> None:
    """Rotary positions start at 0 on every cp rank."""

    def changed(made, batch, here):
        return replace(made, positions=torch.arange(len(here))[None])

    change_what_is_fed(patch, changed)


@exhibit("cp2", "cp2:gather pp2", "the ranks read other labels", "axis cp", loss_sees=True)
def labels_in_another_order(patch: Patch) -> None:
    """Tokens are in zig-zag order, labels in the order of the sequence."""

    def changed(made, batch, here):
        size = len(here)
        place = here[0] // (size // 2)  # zig-zag: the first of a rank's two chunks has its number
        return replace(made, labels_BS=torch.from_numpy(batch.labels_BS[:, place * size :][:, :size].copy()))

    change_what_is_fed(patch, changed)


@exhibit(
    "cp2",
    "cp2:gather pp2",
    "the output of layers.0",
    "axis cp",
    loss_sees=True,
    seen_in="kin of pytorch #141429",
)
def attention_in_another_order(patch: Patch) -> None:
    """Tokens are in zig-zag order, the attention masks as if they were in the order of the sequence."""

    def contiguous(seq_len, positions, place):
        size = seq_len // positions
        return (range(place * size, (place + 1) * size),)

    patch.setattr(ring, "ring_spans", contiguous)
    patch.setattr(gather, "ring_spans", contiguous)


def blind(core: type[torch.nn.Module]):
    """The forward of an attention core that is given no mask."""
    forward = core.forward

    def faulty(self, q, k, v, mask):
        return forward(self, q, k, v, None)

    return faulty


@exhibit("cp2", "cp2:gather pp2", "the output of layers.0", "axis cp", documents=True,
         seen_in="trl #6843", quick=True)  # fmt: skip
def document_mask_dropped(patch: Patch) -> None:
    """Under cp, attention is causal over the whole sample, whatever its documents."""
    for core in (RingCore, GatherCore):
        patch.setattr(core, "forward", blind(core))


@exhibit("cp2:gather", "dp2 cp2", "the output of layers.0", "worst inf", "axis cp", loss_sees=True, documents=True,
         seen_in="Megatron #1764")  # fmt: skip
def nothing_seen_is_not_a_number(patch: Patch) -> None:
    """Where a query has seen nothing yet, merging takes the difference of two infinities."""

    def faulty(self, k, v, parts, view):
        for part in parts:
            rows, columns = part.queries, part.keys
            out, lse = blocks._forward(self.q[:, :, rows], k[:, :, columns], v[:, :, columns], part, view)
            before = self.lse[:, :, rows]
            total = torch.logaddexp(before, lse)
            old, new = (before - total).exp()[..., None], (lse - total).exp()[..., None]
            self.out[:, :, rows] = self.out[:, :, rows] * old + out * new
            self.lse[:, :, rows] = total

    patch.setattr(blocks.Merged, "add", faulty)


def boundless(core: type[torch.nn.Module]):
    """The constructor of an attention core that has no window."""
    init = core.__init__

    def faulty(self, window, axis):
        init(self, None, axis)

    return faulty


@exhibit("cp2", "cp2:gather pp2", "the output of layers.0", "axis cp", spec=HARD, loss_sees=True)
def window_dropped(patch: Patch) -> None:
    """Under cp, a sliding window of 7 is not applied."""
    for core in (RingCore, GatherCore):
        patch.setattr(core, "__init__", boundless(core))


@exhibit("cp2:ulysses", "tp2 cp2:ulysses", "the gradient of layers.1.attention.qkv", "axis cp", "so it is with gather",
         seen_in="DeepSpeed #5248")  # fmt: skip
def ulysses_gradients_times_sp(patch: Patch) -> None:
    """The backward of an all-to-all multiplies by the number of its ranks."""
    backward = collectives._AllToAll.backward

    def faulty(ctx, grad):
        return backward(ctx, grad * ctx.axis.degree)

    patch.setattr(collectives._AllToAll, "backward", staticmethod(faulty))


@exhibit("cp2", "tp2 cp2", "the loss differs by 0.5", "exactly 0.500x, which is 1 / cp", "axis cp", loss_sees=True,
         seen_in="torchtitan #3280, PR 3111", quick=True)  # fmt: skip
def displayed_loss_divided_by_cp(patch: Patch) -> None:
    """The loss that is shown is divided by cp once too often; everything else is right."""
    agree = Engine._agree_on_loss
    patch.setattr(Engine, "_agree_on_loss", lambda self, loss: agree(self, loss) / self.mesh.layout.cp)
