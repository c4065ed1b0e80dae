"""Which module plays which role: how a strategy finds what it acts on without the model knowing.

embedding       token ids to vectors                     head            vectors to logits
column          linears with a common input (q/k/v)      row             the linear that ends a block
norm            acts on every token alone                head_norm       acts on every head alone
attention_core  softmax attention                        loss            logits and labels to a sum
layer           one decoder layer                        router          chooses experts for tokens
experts         the routed experts of a layer            latent          linears whose outputs all heads share
latent_column   from latents to heads (MLA)

For modules that are not ours, see `own_roles.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from torch import nn

DECODER_ROLES: Mapping[str, str] = {
    "embedding": "embedding",
    "layers.*.attention.qkv": "column",
    "layers.*.attention.down": "latent",
    "layers.*.attention.up": "latent_column",
    "layers.*.attention.core": "attention_core",
    "layers.*.attention.output": "row",
    "layers.*.attention.[qk]_norm": "head_norm",
    "layers.*.attention.*_norm": "norm",
    "layers.*.mlp.inputs": "column",
    "layers.*.mlp.down": "row",
    "layers.*.mlp.router": "router",
    "layers.*.mlp.experts": "experts",
    "layers.*.mlp.shared.inputs": "column",
    "layers.*.mlp.shared.down": "row",
    "layers.*.*_norm": "norm",
    "layers.*": "layer",
    "norm": "norm",
    "head": "head",
    "loss": "loss",
}
"""Name pattern -> role; the first pattern that fits decides."""


def modules_with_role(
    model: nn.Module, role: str, roles: Mapping[str, str] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that play `role`, by name, in the order of the model. `roles`: None: `model.roles`, or our own."""
    roles = getattr(model, "roles", DECODER_ROLES) if roles is None else roles
    for name, module in list(model.named_modules()):
        if name and role_of(name, roles) == role:
            yield name, module


def role_of(name: str, roles: Mapping[str, str] = DECODER_ROLES) -> str | None:
    """The role of the module called `name`."""
    return next((role for pattern, role in roles.items() if fits(name, pattern)), None)


@lru_cache(maxsize=2**14)
def fits(name: str, pattern: str) -> bool:
    """Whether a module's name fits a pattern: part by part, so that a star stands for one part or a piece of one."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` where the module called `name` stands."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
