"""Context parallelism: which lengths and degrees are legal, and what it communicates.

Each cp rank holds S/cp tokens of every sequence (`order.py`) and all parameters of its tp rank. Only attention looks
beyond a token, so only the attention core is replaced:

    gather   all-gather of K and V; backward: reduce-scatter of dK and dV
    ring     K and V travel around the ring in R-1 steps; backward: once more, and dK, dV with them
             (Liu et al. 2023, arXiv:2310.01889; merging by log-sum-exp as in Dao et al. 2022, arXiv:2205.14135)
    ulysses  all-to-all from tokens to heads and back (Jacobs et al. 2023, arXiv:2309.14509, section 3.1)
    ringAxulyssesB   both (Fang and Zhao 2024, arXiv:2405.07719)

Gradients are summed over `data` = dp x cp and the loss is divided by the global count of valid tokens, which is data
parallelism's rule and knows no difference between the two.

Letters: b micro-batch, S sequence, H head size, V that of values (the same but in latent attention), N and K query and
KV heads of a tp rank, R ring positions, U ulysses ranks; x bytes of one element, w of one accumulated one (at least 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import lcm

from fivefold.core.events import Event, Events, forward_again
from fivefold.core.layout import Layout
from fivefold.core.layout_checks import divisors
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLASpec, ModelSpec
from fivefold.core.recompute import Regions
from fivefold.errors import LayoutError, nearest_numbers
from fivefold.strategies.context.order import degrees


def check(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    """Raises: LayoutError for a length that cannot be cut, or a ulysses degree that the heads do not allow."""
    if layout.cp == 1:
        return
    _check_length(layout, seq_len, spec.max_positions)
    ulysses = layout.cp_ulysses
    for heads, kv_heads in dict.fromkeys(local_heads(spec.kinds_of_blocks, layout)):
        if legal_ulysses(heads, kv_heads, ulysses):
            continue
        legal = [u for u in divisors(heads) if legal_ulysses(heads, kv_heads, u)]
        of_tp = f" of a tp{layout.tp} rank" if layout.tp > 1 else ""
        raise LayoutError(
            f"ulysses degree {ulysses} does not fit {spec.name}: it must divide the {heads} heads{of_tp}, and divide "
            f"its {kv_heads} KV heads or be a multiple of them; nearest legal degree: "
            f"{nearest_numbers(ulysses, legal)}, or cp{layout.cp}:ring"
        )


def length_unit(layout: Layout) -> int:
    """What must divide the sequence length: cp (times tp under SP), and 2R where the order is zig-zag."""
    ring, _ = degrees(layout)
    return lcm(layout.cp * (layout.tp if layout.sequence_parallel else 1), 2 * ring if ring > 1 else 1)


def _check_length(layout: Layout, seq_len: int, most: int) -> None:
    unit = length_unit(layout)
    if seq_len % unit == 0:
        return
    ring, _ = degrees(layout)
    needs = f"cp*tp = {layout.cp * layout.tp}" if layout.sequence_parallel else f"cp = {layout.cp}"
    needs += f" and the 2*{ring} chunks of the zig-zag order" if ring > 1 else ""
    below = seq_len // unit * unit
    nearest = nearest_numbers(seq_len, (length for length in (below, below + unit) if 0 < length <= most))
    raise LayoutError(
        f"sequence length {seq_len} is not a multiple of {unit}, which {layout} needs ({needs}); nearest: {nearest}"
        + _without_sp(layout, seq_len)
    )


def _without_sp(layout: Layout, seq_len: int) -> str:
    alone = layout.replace(sp=False)
    return ", or add 'nosp'" if layout.sequence_parallel and seq_len % length_unit(alone) == 0 else ""


def legal_ulysses(heads: int, kv_heads: int, degree: int) -> bool:
    """Whether these heads can be cut over `degree` ranks; fewer KV heads than ranks are repeated."""
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def local_heads(blocks: Iterable[BlockSpec], layout: Layout) -> list[tuple[int, int]]:
    """(query heads, KV heads) that one tp rank holds in each of these layers."""
    heads = []
    for block in blocks:
        attention = block.attention
        assert isinstance(attention, AttentionSpec | MLASpec)
        kv_heads = attention.kv_heads if isinstance(attention, AttentionSpec) else attention.heads
        heads.append((attention.heads // layout.tp, max(1, kv_heads // layout.tp)))
    return heads


def _head_sizes(block: BlockSpec) -> tuple[int, int]:
    """Sizes of a key (or query) and of a value head."""
    attention = block.attention
    if isinstance(attention, MLASpec):
        return attention.key_dim, attention.value_dim
    assert isinstance(attention, AttentionSpec)
    return attention.head_dim, attention.head_dim


def predict_chunk(
    spec: ModelSpec,
    layout: Layout,
    *,
    layers: range,
    tokens: int,
    dtype: str,
    itemsize: int,
    recomputed: Sequence[Regions],
) -> Events:
    """Events of one microbatch (`tokens` = b*S/cp) through the layers of one virtual stage, forward and backward.

    `recomputed`: what each of these layers computes again; with its attention, its forward happens in backward as well.

    Per layer, gather:   forward an all-gather of b*S*K*(H+V)*x, backward a reduce-scatter of b*S*K*(H+V)*w bytes.
    Per layer, ulysses:  an all-to-all of b*S/cp*(N*H + max(K, U)*(H+V))*x and one of b*S/cp*N*V*x bytes, each way.
    Per layer, ring:     R-1 sends and R-1 receives of b*S/R*K'*(H+V)*x bytes forward; backward the same and R-1 of
                         b*S/R*K'*(H+V)*w bytes; K' = K, or max(K, U)/U inside ulysses.
    """
    events: Events = Counter()
    if layout.cp == 1:
        return events
    blocks = spec.blocks[layers.start : layers.stop]
    for block, heads, regions in zip(blocks, local_heads(blocks, layout), recomputed):
        one = _predict_attention(layout, heads, _head_sizes(block), tokens, dtype=dtype, itemsize=itemsize)
        events += one
        if not {"layer", "attention"}.isdisjoint(regions):
            events += forward_again(one)
    return events


def _predict_attention(
    layout: Layout, heads: tuple[int, int], sizes: tuple[int, int], tokens: int, *, dtype: str, itemsize: int
) -> Events:
    """Events of one attention: (query heads, KV heads) of (key, value) size, for the tokens that are here."""
    events: Events = Counter()
    (queries, kv_heads), (key, value) = heads, sizes
    ring, ulysses = degrees(layout)
    wide, wide_size = ("float64", 8) if dtype == "float64" else ("float32", 4)
    if layout.cp_method == "gather":
        elements = tokens * layout.cp * kv_heads * (key + value)
        events[Event("forward", "cp", "all_gather", dtype, elements * itemsize)] += 1
        events[Event("backward", "cp", "reduce_scatter", wide, elements * wide_size)] += 1
        return events
    if ulysses > 1:
        kv_heads = max(kv_heads, ulysses)
        for phase in ("forward", "backward"):
            for columns in (queries * key + kv_heads * (key + value), queries * value):
                events[Event(phase, "cp", "all_to_all", dtype, tokens * columns * itemsize)] += 1
        kv_heads //= ulysses
    for op in ("send", "recv") if ring > 1 else ():
        elements = tokens * ulysses * kv_heads * (key + value)
        for phase in ("forward", "backward"):
            events[Event(phase, "cp", op, dtype, elements * itemsize)] += ring - 1  # type: ignore[arg-type]
        events[Event("backward", "cp", op, wide, elements * wide_size)] += ring - 1
    return events
