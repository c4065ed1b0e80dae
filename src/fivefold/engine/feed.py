"""Microbatches of one data rank as tensors on its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from fivefold.core.model_spec import MoESpec
from fivefold.core.plan import Plan
from fivefold.data.batches import Batch, Dataset, Ints
from fivefold.nn.attention import Mask
from fivefold.runtime.device import Device
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.context.order import local_spans
from fivefold.strategies.pipeline.apply import Microbatch


def feed(dataset: Dataset, plan: Plan, mesh: Mesh, step: int) -> Callable[[int], Microbatch]:
    """What `Engine.step` reads its microbatches with: index -> microbatch of this data rank at this step.

    All cp ranks read the same sequences; each takes its own tokens to its device.
    """
    here = None
    if plan.layout.cp > 1:
        spans = local_spans(plan.workload.seq_len, plan.layout, mesh.coordinate["cp"])
        here = np.concatenate([np.arange(span.start, span.stop) for span in spans])

    def load(index: int) -> Microbatch:
        batch = dataset.microbatch(
            step,
            index,
            dp_rank=mesh.coordinate["dp"],
            dp=plan.layout.dp,
            micro_batch=plan.execution.micro_batch,
            global_batch=plan.workload.global_batch,
        )
        microbatch = to_device(batch, mesh.device, here, separate_documents=plan.workload.separate_documents)
        return _without_padding(microbatch, batch, plan, mesh, here) if routed else microbatch

    routed = any(isinstance(block.mlp, MoESpec) for block in plan.model.blocks)
    return load


def _without_padding(
    microbatch: Microbatch, batch: Batch, plan: Plan, mesh: Mesh, here: Ints | None
) -> Microbatch:
    """With what is no padding, of the tokens whose hidden states this rank holds: S/cp, under SP S/cp/tp."""
    valid = batch.document_ids_BS >= 0
    if valid.all():
        return microbatch
    valid = valid if here is None else valid[:, here]
    padding = int((~valid).sum())
    if plan.layout.sequence_parallel:
        valid = np.split(valid, plan.layout.tp, axis=1)[mesh.coordinate["tp"]]
    valid_BS = torch.from_numpy(np.ascontiguousarray(valid)).to(mesh.device.device, non_blocking=True)
    return replace(microbatch, valid_BS=valid_BS, padding=padding)


def to_device(
    batch: Batch, device: Device, here: Ints | None = None, *, separate_documents: bool = False
) -> Microbatch:
    """Tensors of one microbatch. Positions that are the same in every row are kept once.

    `here`: the places of this rank's tokens; None: all. One index cuts tokens, labels, loss mask and positions alike.
    What attention masks need is small and stays whole: every cp rank knows the documents of all tokens.
    """
    positions = batch.positions_BS
    if (positions == positions[:1]).all():
        positions = positions[:1]
    tokens, labels, mask, places = (
        torch.from_numpy(array if here is None else np.ascontiguousarray(array[:, here])).to(
            device.device, non_blocking=True
        )
        for array in (batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, positions)
    )
    if not separate_documents:
        return Microbatch(tokens, labels, mask, places)
    documents = torch.from_numpy(batch.document_ids_BS).to(device.device, non_blocking=True)
    return Microbatch(tokens, labels, mask, places, Mask(documents_BS=documents))
