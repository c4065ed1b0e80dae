"""A module that is not ours, read through a table of roles: what is found, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.core.layout import Layout
from fivefold.core.recompute import Recompute
from fivefold.engine.own import OwnModel
from fivefold.engine.own_check import check_recompute, check_structure
from fivefold.errors import ModelError
from fivefold.nn.own import Parts, find_parts, measure, own_rows
from fivefold.nn.own_stage import NoTokens, OwnRoot, OwnStage

D, V = 12, 20


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads = 3
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, 4), nn.Linear(D, 4)
        self.o = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(D), Mixer()
        self.wide, self.narrow = nn.Linear(D, 16), nn.Linear(16, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))  # type: ignore[no-any-return]


class Other(nn.Module):
    """`seen` counts the layers that have run."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.h = nn.ModuleList(Layer() for _ in range(3))
        self.end, self.out = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, str]:
        x = self.words(tokens)
        for layer in self.h:
            x = layer(x)
        return self.out(self.end(x)), "and more"


ROLES = {
    "words": "embedding", "h.*": "layer", "end": "norm", "out": "head", "h.*.norm": "norm", "h.*.mix": "attention",
    "h.*.mix.q": "q", "h.*.mix.[kv]": "whole", "h.*.mix.o": "attention_output", "h.*.wide": "up", "h.*.narrow": "down",
}  # fmt: skip
SPLIT = {**{k: v for k, v in ROLES.items() if v != "whole"}, "h.*.mix.k": "k", "h.*.mix.v": "v"}


def parts(roles: dict[str, str] = SPLIT, **changes: Any) -> Parts:
    model = Other()
    for name, module in changes.items():
        setattr(model, name, module)
    return find_parts(model, roles)


def test_parts_have_our_names_and_keep_their_own() -> None:
    found = parts()
    assert list(found.names) == ["embedding", "layers.0", "layers.1", "layers.2", "norm", "head"]
    assert found.own_name("layers.2.mix.q") == "h.2.mix.q"
    assert found.module("layers.1") is found.root.get_submodule("h.1")
    assert found.block_of("layers.0.mix.q") == "layers.0.mix"
    assert found.block_of("layers.0.wide") is None


def test_rows_are_the_parameters_in_the_order_of_the_parts() -> None:
    found = parts()
    rows = {row.name: row for row in own_rows(found)}
    shapes = {
        f"{ours}.{name}": tuple(p.shape)
        for ours in found.names
        for name, p in found.module(ours).named_parameters()
    }
    assert {name: row.shape for name, row in rows.items()} == shapes
    assert list(rows) == list(shapes)
    assert rows["layers.1.mix.q.bias"].is_bias
    assert rows["layers.1.mix.o.weight"].role == "attention_output"
    assert {rows[name].block for name in rows} == {"embedding", "layers.0", "layers.1", "layers.2", "head"}


def test_a_tied_head_has_no_row_of_its_own() -> None:
    model = Other()
    model.out.weight = model.words.weight
    found = find_parts(model, SPLIT)
    assert found.tied
    assert "head.weight" not in [row.name for row in own_rows(found)]


def test_a_norm_inside_attention_has_a_part_of_its_gradient_on_each_rank() -> None:
    model = Other()
    model.h[0].mix.inner = nn.LayerNorm(D)  # type: ignore[union-attr]
    rows = {row.name: row for row in own_rows(find_parts(model, {**SPLIT, "h.*.mix.inner": "norm"}))}
    assert rows["layers.0.mix.inner.weight"].role == "head_norm"
    assert rows["layers.0.norm.weight"].role == "norm"


def test_sizes_are_those_of_the_weights() -> None:
    spec = measure(parts())
    attention = spec.blocks[0].attention
    assert (spec.hidden, spec.vocab, spec.layers, spec.name) == (D, V, 3, "Other")
    assert attention.kind == "gqa"
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (3, 1, 4)
    assert spec.blocks[0].mlp.ffn == 16
    assert not spec.blocks[0].mlp.gated


def stages() -> tuple[Other, list[OwnStage]]:
    model = Other()
    root = OwnRoot(find_parts(model, SPLIT))
    cuts = (range(1), range(1, 3))
    return model, [OwnStage(root, cut, first=cut.start == 0, last=cut.stop == 3) for cut in cuts]


def test_stages_one_after_the_other_are_the_whole() -> None:
    model, (first, last) = stages()
    tokens, places = torch.randint(V, (2, 5)), torch.arange(5)[None]
    want, _ = model(tokens, places)
    assert torch.equal(last(first(tokens, places), places), want)
    assert [name for name, _ in model.h[0].named_parameters()] == []
    assert {id(p) for p in first.parameters()}.isdisjoint({id(p) for p in last.parameters()})
    assert torch.equal(last(first(tokens, places), places), want)


def test_tokens_are_not_there_on_later_stages() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64).as_subclass(NoTokens)
    assert tokens.shape == (2, 3)
    assert tokens.device == torch.device("cpu")
    with pytest.raises(ModelError, match=r"uses its tokens beside the embedding \(ne\)"):
        tokens != 0  # noqa: B015


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (
            {},
            "no module of Other has the role 'layer': the table has none; its modules are called words, h, h.0",
        ),
        ({**SPLIT, "words": "layer"}, "no module of Other has the role 'embedding'"),
        ({"model.h.*": "layer"}, "no module of Other has the role 'layer': the table has 'model.h.*' for it"),
        ({**SPLIT, "out": "haed"}, r"gives 'out' the role 'haed' \(did you mean 'head'\?\)"),
        (
            {**SPLIT, "h.*.mix.q": "qkv"},
            r"the role 'qkv' \(a matrix that joins several is cut by no strategy: split it",
        ),
        (
            {k: v for k, v in SPLIT.items() if k != "h.*.wide"},
            r"Other: h.0.wide \(Linear\) has parameters and no role",
        ),
        ({**SPLIT, "h.*.norm": "embedding"}, "Other has 4 modules of the role 'embedding': words, h.0.norm"),
        ({**SPLIT, "h.*.mix": "layer"}, "makes a part of h.0.mix, which is inside of another one, h.0;"),
        ({**SPLIT, "h": "embedding"}, "Other has 2 modules of the role 'embedding': words, h"),
        ({**SPLIT, "words": 3}, "the table of roles must be a mapping of texts"),
        ({3: "embedding"}, "the table of roles must be a mapping of texts"),
        ([("words", "embedding")], "the table of roles must be a mapping of texts"),
    ],
)
def test_tables_that_do_not_fit(roles: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        find_parts(Other(), roles)
    assert "\n" not in str(caught.value)


def test_what_is_no_module() -> None:
    with pytest.raises(ModelError, match=r"a str is no nn.Module"):
        find_parts("gpt", SPLIT)  # type: ignore[arg-type]


def with_mixer(**changes: Any) -> Parts:
    model = Other()
    for name, value in changes.items():
        setattr(model.h[1].mix, name, value)  # type: ignore[union-attr]
    return find_parts(model, SPLIT)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            lambda: with_mixer(k=nn.Linear(D, 8)),
            "h.1: 3 attention heads cannot share 2 key/value heads evenly",
        ),
        (lambda: with_mixer(head_dim=5), "q of layer 1 has 12 features, no multiple of the 5 of a head"),
        (lambda: routed_with(9), "h.1: top_k 9 is more than the 6 experts; at most 6"),
    ],
)
def test_sizes_that_do_not_go_together(found: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        measure(found())
    assert "\n" not in str(caught.value)


def test_heads_that_do_not_share_the_features() -> None:
    with pytest.raises(ModelError, match=r"h.1.mix does not tell how its features fall into heads"):
        check_structure(with_mixer(n_heads=5), Layout.parse("cp2"))


def test_learned_positions_limit_the_sequence() -> None:
    model = Other()
    model.places = nn.Embedding(9, D)
    assert measure(find_parts(model, {**SPLIT, "places": "positions"})).max_positions == 9


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose, self.stacks = nn.Linear(D, 6), Stacks()
        self.top_k = 2


class Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(6, 10, D)), nn.Parameter(torch.zeros(6, D, 5))


ROUTED = {**SPLIT, "h.*.ff": "mlp", "h.*.ff.choose": "router", "h.*.ff.stacks": "experts"}


def routed() -> Other:
    model = Other()
    model.h[1].ff = Routed()  # type: ignore[union-attr]
    return model


def routed_with(top_k: int) -> Parts:
    model = routed()
    model.h[1].ff.top_k = top_k  # type: ignore[union-attr]
    return find_parts(model, ROUTED)


def test_experts_are_measured_and_cut_by_experts() -> None:
    found = find_parts(routed(), ROUTED)
    mlp = measure(found).blocks[1].mlp
    assert mlp.kind == "moe"
    assert (mlp.experts, mlp.top_k, mlp.ffn, mlp.gated) == (6, 2, 5, True)
    assert "layers.1.ff" not in found.roles  # its tokens are not those of all tp ranks
    rows = {row.name: (row.role, row.mesh) for row in own_rows(found)}
    assert rows["layers.1.ff.stacks.a"] == rows["layers.1.ff.stacks.b"] == ("expert_up", "expert")
    assert rows["layers.1.ff.choose.weight"] == ("router", "dense")
    assert measure(found).blocks[0].mlp.kind == "dense"


def test_experts_that_cannot_be_measured() -> None:
    model = routed()
    del model.h[1].ff.top_k  # type: ignore[union-attr]
    with pytest.raises(
        ModelError, match=r"nothing around h.1.ff.stacks tells how many experts a token meets"
    ):
        measure(find_parts(model, ROUTED))
    model = routed()
    model.h[1].ff.stacks.b = nn.Parameter(torch.zeros(5, D, 5))  # type: ignore[union-attr]
    with pytest.raises(
        ModelError, match=r"h.1.ff.stacks has parameters of shapes \[\[6, 10, 12\], \[5, 12, 5\]\]"
    ):
        measure(find_parts(model, ROUTED))
    with pytest.raises(
        ModelError, match=r"etp2 does not fit Other: experts .* are cut by experts only; use etp1"
    ):
        check_structure(find_parts(routed(), ROUTED), Layout.parse("dp2 etp2"))


def test_parameters_that_cannot_be_handled() -> None:
    model = Other()
    model.h[1].wide.weight = model.h[0].wide.weight  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"h.0.wide.weight and h.1.wide.weight are one parameter"):
        find_parts(model, SPLIT)
    model = Other()
    model.h[2].norm.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    with pytest.raises(ModelError, match=r"h.2.norm.bias does not require a gradient"):
        find_parts(model, SPLIT)
    for module, said in (
        (nn.LazyLinear(16), "h.1.wide.weight has no shape yet"),
        (nn.Linear(D, 16, dtype=torch.complex64), "h.1.wide.weight has torch.complex64 values"),
    ):
        model = Other()
        model.h[1].wide = module  # type: ignore[union-attr]
        with pytest.raises(ModelError, match=said):
            find_parts(model, SPLIT)
    with pytest.raises(ModelError, match=r"words makes sparse gradients; use sparse=False"):
        measure(parts(words=nn.Embedding(V, D, sparse=True)))


@pytest.mark.parametrize(
    ("roles", "text", "said"),
    [
        (ROLES, "tp2", "tp2 does not fit Other: in h.0 no module has the role 'k'; .* must be split"),
        (ROLES, "cp2", "cp2 does not fit Other: in h.0 no module has the role 'k'"),
        (SPLIT, "tp2", "tp2 does not fit Other: in h.0 no module has the role 'mlp'"),
    ],
)
def test_structures_that_cannot_be_cut(roles: dict[str, str], text: str, said: str) -> None:
    found = parts(roles)
    with pytest.raises(ModelError, match=said):
        check_structure(found, Layout.parse(text))
    check_structure(found, Layout.parse("dp2 pp2"))


class Block(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            Block(nn.Linear(D, 32), nn.Linear(16, D)),
            r"h.1.ff.up has a weight of \[32, 12\], .* needs as \[16, 12\]",
        ),
        (
            Block(nn.Linear(16, D), nn.Linear(D, 16)),
            r"h.1.ff.up has a weight of \[12, 16\], .* needs as \[12, 12\]",
        ),
        (
            Block(nn.Linear(D, 16), nn.Linear(16, 8)),
            r"h.1.ff.down has a weight of \[8, 16\], .* as \[12, 16\]",
        ),
    ],
    ids=["gate and up in one", "changed over", "narrower"],
)
def test_matrices_that_tensor_parallelism_would_cut_wrongly(block: Block, said: str) -> None:
    """One that joins gate and up has rows of both on a rank only if it is cut into halves: elsewhere another model."""
    model = Other()
    for layer in model.h:
        del layer.wide, layer.narrow
        layer.ff = Block(nn.Linear(D, 16), nn.Linear(16, D))
    model.h[1].ff = block  # type: ignore[union-attr]
    table = {k: v for k, v in SPLIT.items() if v not in ("up", "down")}
    found = find_parts(model, {**table, "h.*.ff": "mlp", "h.*.ff.up": "up", "h.*.ff.down": "down"})
    check_structure(found, Layout.parse("dp2"))
    with pytest.raises(ModelError, match=f"tp2 does not fit Other: {said}"):
        check_structure(found, Layout.parse("tp2"))


class Chance(nn.Module):
    """What a forward of one's own reads."""

    def __init__(self, **numbers: float) -> None:
        super().__init__()
        vars(self).update(numbers)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Dropout(0.5), "p = 0.5"), (nn.Dropout(1), "p = 1"), (nn.AlphaDropout(0.1), "p = 0.1"),
        (nn.Dropout1d(0.1), "p = 0.1"), (nn.FeatureAlphaDropout(0.1), "p = 0.1"),
        (Chance(dropout=0.2), "dropout = 0.2"), (Chance(attention_dropout=1), "attention_dropout = 1"),
        (Chance(jitter_noise=0.1), "jitter_noise = 0.1"), (Chance(drop_path_rate=0.1), "drop_path_rate = 0.1"),
    ],
)  # fmt: skip
def test_chance_is_refused_where_it_falls_otherwise(module: nn.Module, said: str) -> None:
    """On several ranks, and where a layer is computed again: its second forward would draw other numbers."""
    found = parts(end=nn.Sequential(module))
    check_structure(found, Layout())
    check_recompute(found, Recompute())
    with pytest.raises(ModelError, match=f"end.0 has {said}, and chance falls otherwise at every layout"):
        check_structure(found, Layout.parse("dp2"))
    with pytest.raises(ModelError, match=f"end.0 has {said}, .* when a layer is computed again"):
        check_recompute(found, Recompute.parse("full"))
    found.root.eval()
    check_structure(found, Layout.parse("dp2"))


@pytest.mark.parametrize(
    "module",
    [nn.Dropout(0.0), Chance(dropout=0.0), Chance(dropout=0), Chance(use_dropout=True), Chance(rate=0.1)],
)
def test_what_is_no_chance_is_not_refused(module: nn.Module) -> None:
    check_structure(parts(end=nn.Sequential(module)), Layout.parse("dp2"))


def test_own_values_are_cut_as_the_table_says() -> None:
    model = Other()
    own = OwnModel(model, SPLIT)
    row = next(row for row in own.rows if row.name == "layers.1.mix.o.weight")
    assert torch.equal(own.values(row, Layout(), Layout().coordinate(0), "float32"), model.h[1].mix.o.weight)  # type: ignore[union-attr, arg-type]
