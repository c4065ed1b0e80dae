"""Is a module that is not ours the same model under a layout as on one device?"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from fivefold.core.layout import Layout
from fivefold.core.router import RouterConfig
from fivefold.engine.own import OwnModel
from fivefold.errors import ConfigError
from fivefold.runtime.device import check_device_count, device_kind
from fivefold.verify.observe import NOISE
from fivefold.verify.verify import STEPS, Reference, Verdict
from fivefold.verify.workload import BOUNDS, common_plans


def verify_model(
    model: nn.Module,
    layout: Layout | str,
    *,
    roles: Mapping[str, str] | None = None,
    dtype: Literal["float64", "float32"] = "float32",
    steps: int = STEPS,
    device: str = "auto",
    recompute: str = "none",
) -> Verdict:
    """Compare the module under `layout` with itself on one device: every quantity of every rank, and communication.

    Copies of it are trained, in ranks that are forked; it stays as it is. On one device no function of it is replaced.
    What is compared and how: as for our own decoder (`verify`). Norms and biases get some noise, so that faults in
    them show. A module that casts to float32 itself cannot be judged in float64.
    `recompute`: `full` or `full/k`, what it computes again in backward under `layout`.
    Raises: UserError where the module cannot be cut so; RankFailure if a rank breaks.
    """
    if dtype not in BOUNDS:
        raise ConfigError(f"a module is judged in {' or '.join(BOUNDS)}, not in {dtype!r}")
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    check_device_count(device_kind(device), layout.world_size)
    own = OwnModel(model, roles)
    plan, one = common_plans(
        own.spec, layout, Layout(), dtype, check=own.check, recompute=recompute, router=RouterConfig()
    )
    shaken = _shaken(model)
    reference = Reference(
        one, steps=steps, seed=0, device=device, make_own=lambda: OwnModel(copy.deepcopy(shaken), roles)
    )
    return reference.judge(plan)


def _shaken(model: nn.Module) -> nn.Module:
    """A copy whose norms and biases are not all ones and zeros."""
    generator, copied = torch.Generator().manual_seed(0), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape, generator=generator) * NOISE
                parameter.add_(noise.to(parameter))
    return copied
