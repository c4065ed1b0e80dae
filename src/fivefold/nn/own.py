"""A module that is not ours, read through a table of roles: its parts by our names, its parameters, its sizes.

    parts     embedding, positions, layers.0, layers.1, ..., norm, head: what strategies act on, by our names
    rows      its parameters under these names, such as layers.0.self_attn.q_proj.weight
    measure   its sizes as a ModelSpec, read off the shapes of its weights

Nothing here changes the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from torch import nn
from torch.nn.parameter import UninitializedParameter

from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, MoESpec
from fivefold.core.sharding import ParameterRow, Role
from fivefold.core.value import describe
from fivefold.core.workload import MOST_TOKENS
from fivefold.errors import ModelError, nearest
from fivefold.nn.own_roles import BLOCK_ROLES, LINEAR_ROLES, OWN_ROLES
from fivefold.nn.roles import role_of

POSITION_NAMES = ("position_ids", "positions")
HEAD_DIM_NAMES = ("head_dim", "head_size", "d_head", "dim_head")
HEADS_NAMES = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
"""Attributes of an attention module that tell how its features fall into heads."""
JOINED_ROLES = ("qkv", "kv", "gate_up")
JOINED = " (a matrix that joins several is cut by no strategy: split it, or call it 'whole' and leave out tp and cp)"
TOP_K_NAMES = ("top_k", "num_experts_per_tok", "k")
"""Attributes of a router, or of the block around it, that tell how many experts a token meets."""


@dataclass(frozen=True)
class Parts:
    """Where the parts of a module are."""

    root: nn.Module
    names: Mapping[str, str]
    """Our name of a part -> the module's own: `layers.0` -> `model.layers.0`."""
    roles: Mapping[str, str]
    """Our name of a module inside a part -> its role."""

    @property
    def kind(self) -> str:
        return type(self.root).__name__

    @property
    def layers(self) -> int:
        return sum(name.startswith("layers.") for name in self.names)

    def own_name(self, name: str) -> str:
        """What the module calls something that we call `layers.0.self_attn`."""
        part = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]
        return self.names[part] + name[len(part) :]

    def module(self, name: str) -> nn.Module:
        return self.root.get_submodule(self.own_name(name))

    def inside(self, layer: int, role: str) -> list[str]:
        """Our names of the modules of a layer that play a role."""
        prefix = f"layers.{layer}."
        return [name for name, found in self.roles.items() if found == role and name.startswith(prefix)]

    def block_of(self, name: str) -> str | None:
        """The attention or MLP that a module is inside of, by our names."""
        parts = name.split(".")
        above = [".".join(parts[:i]) for i in range(len(parts) - 1, 2, -1)]
        return next((one for one in above if self.roles.get(one) in BLOCK_ROLES), None)

    @property
    def positions_name(self) -> str | None:
        """The parameter of its forward that takes the places [B or 1, S] of the tokens in their sequences."""
        names = inspect.signature(self.root.forward).parameters
        return next((name for name in POSITION_NAMES if name in names), None)

    @property
    def tied(self) -> bool:
        return self.module("head").weight is self.module("embedding").weight


def find_parts(root: nn.Module, roles: Mapping[str, str]) -> Parts:
    """Find every part. Raises: ModelError naming the role that no module has, or the module that has none."""
    if not isinstance(root, nn.Module):
        raise ModelError(f"a {type(root).__name__} is no nn.Module, which is what can be cut")
    if not isinstance(roles, Mapping) or not all(isinstance(text, str) for text in (*roles, *roles.values())):
        raise ModelError("the table of roles must be a mapping of texts, {'name pattern of modules': 'role'}")
    for pattern, role in roles.items():
        if role not in OWN_ROLES:
            hint = JOINED if role.startswith(JOINED_ROLES) else nearest(role, OWN_ROLES)
            raise ModelError(
                f"the table of roles gives {pattern!r} the role {role!r}{hint}; roles are: {', '.join(OWN_ROLES)}"
            )
    layers = _with_role(root, "layer", roles)
    names = {"embedding": _only(root, "embedding", roles)}
    if _with_role(root, "positions", roles, required=False):
        names["positions"] = _only(root, "positions", roles)
    names |= {f"layers.{i}": name for i, name in enumerate(layers)}
    final = [n for n in _with_role(root, "norm", roles, required=False) if _inside(n, layers) is None]
    if len(final) > 1:
        raise ModelError(
            f"{type(root).__name__} has {len(final)} modules of the role 'norm' outside its layers "
            f"({', '.join(final)}); one can be the last norm"
        )
    names |= {"norm": final[0]} if final else {}
    names["head"] = _only(root, "head", roles)
    _refuse_nesting(root, names)
    found = dict(_roles_inside(root, names, roles))
    routed = {name.rpartition(".")[0] for name, role in found.items() if role == "experts"}
    # Each rank routes its own tokens: a block around experts is not one that splits the work on shared tokens.
    parts = Parts(root, names, {n: role for n, role in found.items() if role != "mlp" or n not in routed})
    _check_parameters(parts)
    return parts


def _refuse_nesting(root: nn.Module, names: Mapping[str, str]) -> None:
    for own in names.values():
        outer = _inside(own, [other for other in names.values() if other != own])
        if outer is not None:
            raise ModelError(
                f"{type(root).__name__}: the table of roles makes a part of {own}, which is inside of another one, "
                f"{outer}; embedding, positions, layers, last norm and head are apart from each other"
            )


def _with_role(root: nn.Module, role: str, roles: Mapping[str, str], *, required: bool = True) -> list[str]:
    modules = [name for name, _ in root.named_modules() if name]
    found = [name for name in modules if role_of(name, roles) == role]
    if required and not found:
        patterns = [pattern for pattern, given in roles.items() if given == role]
        said = f"the table has {', '.join(map(repr, patterns))} for it" if patterns else "the table has none"
        raise ModelError(
            f"no module of {type(root).__name__} has the role {role!r}: {said}; its modules are called "
            f"{_sample(modules)}"
        )
    return found


def _only(root: nn.Module, role: str, roles: Mapping[str, str]) -> str:
    found = _with_role(root, role, roles)
    if len(found) > 1:
        raise ModelError(
            f"{type(root).__name__} has {len(found)} modules of the role {role!r}: {_sample(found)}"
        )
    return found[0]


def _sample(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _inside(name: str, layers: list[str]) -> str | None:
    return next((layer for layer in layers if f"{name}.".startswith(f"{layer}.")), None)


def _roles_inside(
    root: nn.Module, names: Mapping[str, str], roles: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    for part, own in names.items():
        for inner, _ in root.get_submodule(own).named_modules():
            name = f"{own}.{inner}" if inner else own
            role = role_of(name, roles)
            if role is not None:
                yield part + name[len(own) :], role


def _check_parameters(parts: Parts) -> None:
    """Every parameter is in a part, in a module with a role, trained, and no other's but the embedding's and head's."""
    own = {parts.own_name(name) for name in parts.roles if parts.roles[name] not in ("layer", *BLOCK_ROLES)}
    for name, module in parts.root.named_modules():
        if name not in own and next(module.parameters(recurse=False), None) is not None:
            raise ModelError(
                f"{parts.kind}: {name or 'the module itself'} ({type(module).__name__}) has parameters and no role; "
                f"add it to the table of roles, as 'whole' where none fits"
            )
    seen: dict[int, str] = {}
    pair = {parts.own_name("embedding.weight"), parts.own_name("head.weight")}
    for name, parameter in parts.root.named_parameters(remove_duplicate=False):
        other = seen.setdefault(id(parameter), name)
        if other != name and {other, name} != pair:
            raise ModelError(
                f"{parts.kind}: {other} and {name} are one parameter; only embedding and head can share theirs"
            )
        if not parameter.requires_grad:
            raise ModelError(
                f"{parts.kind}: {name} does not require a gradient; every parameter is trained, so let it require one"
            )
        if isinstance(parameter, UninitializedParameter) or not parameter.is_floating_point():
            what = (
                "no shape yet"
                if isinstance(parameter, UninitializedParameter)
                else f"{parameter.dtype} values"
            )
            raise ModelError(
                f"{parts.kind}: {name} has {what}; every parameter is a tensor of floating-point values"
            )


def own_rows(parts: Parts) -> tuple[ParameterRow, ...]:
    """The parameters on one device, in the order of the parts: what the one table is made from."""
    rows = []
    for part in parts.names:
        for inner, parameter in parts.module(part).named_parameters():
            name = f"{part}.{inner}"
            if name == "head.weight" and parts.tied:
                continue
            role, leaf = _row_role(parts, name), inner.rpartition(".")[2]
            row = ParameterRow(name, role, tuple(parameter.shape), is_bias=leaf == "bias", init_name=name)
            rows.append(replace(row, mesh="expert") if role == "expert_up" else row)
    return tuple(rows)


def _row_role(parts: Parts, name: str) -> Role:
    owner = name.rpartition(".")[0]
    role = parts.roles[owner]
    if role == "experts":
        return "expert_up"  # as all stacks of experts, however many matrices one joins: cut by experts only
    # What is inside an attention or MLP comes after the point where tensor parallelism splits the work: each rank has
    # a part of its gradient, as of a norm on heads.
    return "head_norm" if role == "norm" and parts.block_of(owner) else role  # type: ignore[return-value]


# Sizes


def measure(parts: Parts) -> ModelSpec:
    """The sizes of the module. Raises: ModelError naming the module that is not what its role says."""
    embedding, head = parts.module("embedding"), parts.module("head")
    if not isinstance(embedding, nn.Embedding):
        raise ModelError(_is_not(parts, "embedding", "an nn.Embedding"))
    if not isinstance(head, nn.Linear):
        raise ModelError(_is_not(parts, "head", "an nn.Linear"))
    if embedding.sparse:
        raise ModelError(
            f"{parts.kind}: {parts.own_name('embedding')} makes sparse gradients; use sparse=False"
        )
    vocab, hidden = embedding.weight.shape
    if tuple(head.weight.shape) != (vocab, hidden):
        raise ModelError(
            f"{parts.kind}: the head {parts.names['head']} has a weight of {list(head.weight.shape)}, the embedding "
            f"{parts.names['embedding']} one of {[vocab, hidden]}; they must be alike"
        )
    config: Any = getattr(parts.root, "config", None)
    return ModelSpec(
        name=parts.kind,
        family="own",
        hidden=hidden,
        vocab=vocab,
        blocks=tuple(_blocks(parts, hidden)),
        tied_embeddings=parts.tied,
        head_bias=head.bias is not None,
        max_positions=min(getattr(config, "max_position_embeddings", None) or MOST_TOKENS, _learned(parts)),
    )


def _learned(parts: Parts) -> int:
    """Positions in a table of learned ones."""
    table = parts.module("positions") if "positions" in parts.names else None
    return table.num_embeddings if isinstance(table, nn.Embedding) else MOST_TOKENS


def _is_not(parts: Parts, name: str, wanted: str) -> str:
    module = parts.module(name)
    return f"{parts.kind}: {parts.own_name(name)} is a {type(module).__name__}, its role needs {wanted}"


def linear(parts: Parts, layer: int, role: str) -> nn.Linear | None:
    """The linear of a layer with this role; None if it has none. Raises: ModelError if it is something else."""
    found = parts.inside(layer, role)
    if not found:
        return None
    if len(found) > 1:
        raise ModelError(f"{parts.kind}: layer {layer} has {len(found)} modules of the role {role!r}")
    module = parts.module(found[0])
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise ModelError(_is_not(parts, found[0], "a plain nn.Linear"))
    return module


def _blocks(parts: Parts, hidden: int) -> Iterator[BlockSpec]:
    for layer in range(parts.layers):
        try:
            yield _block(parts, layer, hidden)
        except ValidationError as error:
            where = parts.own_name(f"layers.{layer}")
            raise ModelError(f"{parts.kind}: {where}: {describe(error, BlockSpec)}") from None


def _block(parts: Parts, layer: int, hidden: int) -> BlockSpec:
    linears = {role: linear(parts, layer, role) for role in LINEAR_ROLES}
    q, k, up = linears["q"], linears["k"], linears["up"]
    size = head_dim(parts, layer) if q is not None else None
    if q is None or k is None or size is None:
        attention = AttentionSpec(heads=1, kv_heads=1, head_dim=hidden)
    else:
        for module, of in ((q, "q"), (k, "k")):
            if module.out_features % size:
                raise ModelError(
                    f"{parts.kind}: {of} of layer {layer} has {module.out_features} features, no multiple of the "
                    f"{size} of a head"
                )
        attention = AttentionSpec(
            heads=q.out_features // size,
            kv_heads=k.out_features // size,
            head_dim=size,
            qkv_bias=q.bias is not None,
        )
    return BlockSpec(
        attention=attention, mlp=_feed_forward(parts, layer, hidden, up, linears["gate"] is not None)
    )


def _feed_forward(
    parts: Parts, layer: int, hidden: int, up: nn.Linear | None, gated: bool
) -> MLPSpec | MoESpec:
    if experts := parts.inside(layer, "experts"):
        return _routed(parts, layer, experts[0], hidden, 0 if up is None else up.out_features)
    if up is not None:
        return MLPSpec(ffn=up.out_features, gated=gated, bias=up.bias is not None)
    held = sum(p.numel() for p in parts.module(f"layers.{layer}").parameters())
    return MLPSpec(ffn=max(1, (held - 4 * hidden**2) // (3 * hidden)))


def _routed(parts: Parts, layer: int, name: str, hidden: int, shared: int) -> MoESpec:
    stacks = list(parts.module(name).parameters())
    own = parts.own_name(name)
    if not stacks or {stack.ndim for stack in stacks} != {3} or len({len(stack) for stack in stacks}) != 1:
        raise ModelError(
            f"{parts.kind}: {own} has parameters of shapes {[list(stack.shape) for stack in stacks]}; experts are "
            f"stacks of matrices, as many in each"
        )
    around = [parts.module(one) for one in parts.inside(layer, "router")] + [
        parts.module(name.rpartition(".")[0])
    ]
    chosen = (getattr(module, attribute, None) for module in around for attribute in TOP_K_NAMES)
    top_k = next((k for k in chosen if isinstance(k, int) and k > 0), None)
    if top_k is None:
        raise ModelError(
            f"{parts.kind}: nothing around {own} tells how many experts a token meets; "
            f"give its router an attribute top_k"
        )
    each = [stack[0].numel() for stack in stacks]
    return MoESpec(
        experts=len(stacks[0]), top_k=top_k, ffn=max(1, min(each) // hidden), gated=sum(each) > 2 * min(each),
        shared_ffn=shared,
    )  # fmt: skip


def head_dim(parts: Parts, layer: int) -> int | None:
    """Features of a head, as the attention module's attributes tell; None if they do not."""
    q = linear(parts, layer, "q")
    for name in parts.inside(layer, "attention"):
        module = parts.module(name)
        for attribute in HEAD_DIM_NAMES:
            if isinstance(size := getattr(module, attribute, None), int) and size > 0:
                return size
        for attribute in HEADS_NAMES:
            heads = getattr(module, attribute, None)
            if isinstance(heads, int) and heads > 0 and q is not None and q.out_features % heads == 0:
                return q.out_features // heads
    return None
