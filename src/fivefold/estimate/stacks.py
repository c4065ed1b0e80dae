"""What a software stack adds to the memory that model and layout ask for: `stacks.yaml`, read."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from pydantic import Field

from fivefold.catalog.files import read
from fivefold.core.value import Value
from fivefold.errors import ConfigError, nearest
from fivefold.estimate.saved import Kernels
from fivefold.units import MIB

DEFAULT = "standard"


class Stack(Value):
    """Coefficients of one framework and era; `stacks.yaml` says what each is and where it comes from."""

    name: str
    attention: Literal["flash", "sdpa", "unfused"]
    norm: Literal["fused", "composed"]
    mlp: Literal["fused", "composed"]
    dropout: bool
    expert_output: bool
    logit_bytes: float = Field(ge=0)
    wide_shards: bool
    moment_bytes: float = Field(ge=0)
    fp16_optimizer: float = Field(gt=0)
    extra_gradient: float = Field(ge=0)
    gathered_layers: int = Field(gt=0)
    static_mib: float = Field(ge=0)
    fragmentation: float = Field(ge=0)
    context_mib: float = Field(ge=0)
    source: str

    def kernels(self, element_bytes: int) -> Kernels:
        return Kernels(
            element_bytes=element_bytes,
            attention=self.attention,
            norm=self.norm,
            mlp=self.mlp,
            dropout=self.dropout,
            expert_output=self.expert_output,
        )

    @property
    def static_bytes(self) -> float:
        return self.static_mib * MIB

    @property
    def context_bytes(self) -> float:
        return self.context_mib * MIB


@cache
def stacks() -> dict[str, Stack]:
    """All stacks by name."""
    entries: dict[str, dict[str, Any]] = read("stacks.yaml", __package__)
    return {name: Stack(name=name, **entry) for name, entry in entries.items()}


def stack(name: str) -> Stack:
    """The stack of that name. Raises ConfigError with the nearest one."""
    if name not in stacks():
        raise ConfigError(
            f"unknown framework {name[:60]!r}{nearest(name, stacks())}; known: {', '.join(stacks())}"
        )
    return stacks()[name]


def as_named(name: str) -> Stack:
    """The stack of that name, or of the framework that is called so: torchtitan is fsdp. Raises ConfigError."""
    found = of_framework(name)
    return stack(name) if name in stacks() or found.name == DEFAULT else found


def of_framework(framework: str, version: str = "") -> Stack:
    """The stack of a framework as a runs table names it; `standard` where nothing is known of it."""
    words = framework.lower()
    if any(
        word in words for word in ("fsdp", "titan", "composer", "automodel", "accelerate", "torchtune", "trl")
    ):
        return stack("fsdp")
    if "megatron" in words and "deepspeed" in words:
        return stack("megatron-deepspeed")
    if "deepspeed" in words:
        return stack("deepspeed")
    if "bridge" in words:
        return stack("megatron-bridge")
    if any(word in words for word in ("core", "nemo", "primus")):
        return stack("megatron-core")
    if "megatron" in words:
        return stack("megatron-classic")
    return stack("fivefold" if "fivefold" in words else DEFAULT)
