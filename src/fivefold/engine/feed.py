"""Microbatches of one data rank as tensors on its device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fivefold.core.plan import Plan
from fivefold.data.batches import Batch, Dataset
from fivefold.runtime.device import Device
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.pipeline.apply import Microbatch


def feed(dataset: Dataset, plan: Plan, mesh: Mesh, step: int) -> Callable[[int], Microbatch]:
    """What `Engine.step` reads its microbatches with: index -> microbatch of this data rank at this step."""

    def load(index: int) -> Microbatch:
        batch = dataset.microbatch(
            step,
            index,
            dp_rank=mesh.coordinate["dp"],
            dp=plan.layout.dp,
            micro_batch=plan.execution.micro_batch,
            global_batch=plan.workload.global_batch,
        )
        return to_device(batch, mesh.device)

    return load


def to_device(batch: Batch, device: Device) -> Microbatch:
    """Tensors of one microbatch. Positions that are the same in every row are kept once."""
    positions = batch.positions_BS
    if (positions == positions[:1]).all():
        positions = positions[:1]
    tokens, labels, mask, places = (
        torch.from_numpy(array).to(device.device, non_blocking=True)
        for array in (batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, positions)
    )
    return Microbatch(tokens, labels, mask, places)
