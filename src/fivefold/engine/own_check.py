"""Whether the structure of a module that is not ours allows what a layout asks of it."""

from __future__ import annotations

from torch import nn

from fivefold.core.layout import Layout
from fivefold.core.recompute import Recompute
from fivefold.errors import ModelError
from fivefold.nn.own import Parts, head_dim, linear

CHANCE_MODULES = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
CHANCE_NAMES = ("dropout", "drop_path", "drop_prob", "jitter_noise")
"""What a number is called by which a forward uses chance itself, or a part of its name: `attention_dropout`."""

NEEDS = {
    "attention": ("q", "k", "v", "attention_output"),
    "mlp": ("up", "down"),
}
"""Block -> the linears that it must have, each as a module of its own, to be cut."""


def check_structure(parts: Parts, layout: Layout) -> None:
    """Raises: ModelError naming the module that does not allow a strategy, and why; one line."""
    if layout.world_size > 1:
        _refuse_chance(parts, "at every layout")
    if layout.tp > 1:
        asked = f"tp{layout.tp}"
        _check_layers(parts, asked, ("attention", "mlp"))
        _refuse_whole(parts, asked)
        _check_embedding(parts, asked)
    if layout.etp > 1:
        raise ModelError(
            f"etp{layout.etp} does not fit {parts.kind}: experts of a module that is not ours are cut by experts only; "
            f"use etp1"
        )
    if layout.cp > 1:
        _check_layers(parts, f"cp{layout.cp}", ("attention",))
        if parts.positions_name is None:
            raise ModelError(
                f"cp{layout.cp} does not fit {parts.kind}: each rank has some tokens of a sequence, but its forward "
                f"takes no places of tokens; give it a parameter position_ids or positions"
            )


def check_dtype(parts: Parts, dtype: str) -> None:
    """Raises: ModelError for a dtype that the kernels of a model of transformers do not take."""
    kernel = getattr(getattr(parts.root, "config", None), "_experts_implementation", None)
    if dtype == "float64" and kernel == "grouped_mm" and "experts" in parts.roles.values():
        raise ModelError(
            f"{parts.kind}: its grouped products of experts take no float64; make it with experts_implementation="
            f"'eager', or use float32"
        )


def check_recompute(parts: Parts, recompute: Recompute) -> None:
    """Raises: ModelError for parts of layers, which only our own layers compute apart, and for chance inside them."""
    if recompute.regions:
        _refuse_chance(parts, "when a layer is computed again")
    if recompute.regions not in ((), ("layer",)):
        raise ModelError(
            f"recompute={recompute} does not fit {parts.kind}: attention and MLP of its layers cannot be called apart; "
            f"nearest: {Recompute(('layer',), recompute.every)}"
        )


def _refuse_chance(parts: Parts, when: str) -> None:
    for name, module in parts.root.named_modules():
        numbers = {
            key: value for key, value in vars(module).items() if any(part in key for part in CHANCE_NAMES)
        }
        if isinstance(module, CHANCE_MODULES):
            numbers["p"] = module.p
        for attribute, chance in numbers.items() if module.training else ():
            if type(chance) in (int, float) and chance > 0:
                raise ModelError(
                    f"{parts.kind}: {name or 'the module itself'} has {attribute} = {chance}, "
                    f"and chance falls otherwise {when}; set it to 0"
                )


def _check_layers(parts: Parts, asked: str, blocks: tuple[str, ...]) -> None:
    for layer in range(parts.layers):
        routed = parts.inside(layer, "experts")
        for block in blocks:
            if block == "mlp" and routed:
                continue
            missing = [role for role in NEEDS[block] if linear(parts, layer, role) is None]
            where = parts.own_name(f"layers.{layer}")
            if missing or len(parts.inside(layer, block)) != 1:
                role = (missing or [block])[0]
                raise ModelError(
                    f"{asked} does not fit {parts.kind}: in {where} no module has the role {role!r}; "
                    f"the table of roles must name one, and a matrix that joins several must be split"
                )
        if "mlp" in blocks:
            _check_features(parts, layer, asked)
        if head_dim(parts, layer) is None:
            attention = parts.own_name(parts.inside(layer, "attention")[0])
            raise ModelError(
                f"{asked} does not fit {parts.kind}: {attention} does not tell how its features fall into heads; "
                f"give it an attribute head_dim"
            )


def _check_features(parts: Parts, layer: int, asked: str) -> None:
    """Linears are cut as if they led from hidden states to features of their own, and back from these."""
    embedding = parts.module("embedding")
    assert isinstance(embedding, nn.Embedding)
    hidden = embedding.embedding_dim
    down = linear(parts, layer, "down")
    wanted = {
        **dict.fromkeys(("q", "k", "v"), (hidden, None)),
        **dict.fromkeys(("gate", "up"), (hidden, down and down.in_features)),
        **dict.fromkeys(("attention_output", "down"), (None, hidden)),
    }
    for role, (takes, makes) in wanted.items():
        module = linear(parts, layer, role)
        if module is None:
            continue
        has = module.in_features if takes else None, module.out_features if makes else None
        if has != (takes, makes):
            raise ModelError(
                f"{asked} does not fit {parts.kind}: {parts.own_name(parts.inside(layer, role)[0])} has a weight of "
                f"{list(module.weight.shape)}, which the role {role!r} in {parts.own_name(f'layers.{layer}')} needs as "
                f"{[makes or module.out_features, takes or module.in_features]}; one that joins several must be split"
            )


def _refuse_whole(parts: Parts, asked: str) -> None:
    for name, role in parts.roles.items():
        if role == "whole":
            module = parts.module(name)
            raise ModelError(
                f"{asked} does not fit {parts.kind}: {parts.own_name(name)} ({type(module).__name__}) has the role "
                f"'whole', so it cannot be cut; use tp1"
            )
        if role != "head_norm":
            continue
        layer = int(name.split(".")[1])
        for parameter in parts.module(name).parameters():
            if parameter.shape != (head_dim(parts, layer),):
                raise ModelError(
                    f"{asked} does not fit {parts.kind}: {parts.own_name(name)} acts on {parameter.numel()} features, "
                    f"not on each head alone; use tp1"
                )


def _check_embedding(parts: Parts, asked: str) -> None:
    embedding = parts.module("embedding")
    assert isinstance(embedding, nn.Embedding)
    if type(embedding).forward is not nn.Embedding.forward:
        reason = f"is a {type(embedding).__name__} with a forward of its own"
    elif embedding.max_norm is not None or embedding.scale_grad_by_freq:
        reason = "scales its rows or their gradients (max_norm, scale_grad_by_freq)"
    else:
        return
    raise ModelError(
        f"{asked} does not fit {parts.kind}: {parts.own_name('embedding')} {reason}, which cannot be cut; use tp1"
    )
