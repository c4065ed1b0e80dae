"""Whether lists of actions, our own or a user's, are a training step: complete, in order, free of deadlock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from fivefold.core.layout import Layout
from fivefold.errors import LayoutError
from fivefold.strategies.pipeline.actions import (
    COMPUTATIONS,
    Action,
    Edge,
    Lists,
    Product,
    incoming,
    outgoing,
)


def check_actions(lists: Lists, layout: Layout, microbatches: int) -> None:
    """Refuse lists that are no training step of this layout. They may hold messages (`lower`) or computations only.

    1  every chunk and microbatch has one F, and one B or one I and one W, on the rank that holds the chunk
    2  B and I come after their F, W after its I
    3  with messages: sends follow and receives precede their computation, in the same order on both ends of an edge
    4  no rank waits for ever, if sends are asynchronous and a computation waits for what it reads

    Time: O(actions). Raises: LayoutError naming rank and action; for a deadlock, who waits for whom.
    """
    if len(lists) != layout.pp:
        raise LayoutError(
            f"the actions have {len(lists)} pipeline ranks, {layout} has {layout.pp}; write one line for each rank"
        )
    _check_chunks(lists, layout)
    for rank, actions in enumerate(lists):
        _check_rank(rank, actions, layout, microbatches)
    if any(action.kind not in COMPUTATIONS for actions in lists for action in actions):
        _check_messages(lists, layout)
    if stuck := deadlock(lists, layout.stages):
        raise LayoutError(f"the actions of {layout} deadlock: {stuck}")


def _check_chunks(lists: Lists, layout: Layout) -> None:
    stages = max((action.chunk for actions in lists for action in actions), default=-1) + 1
    chunks, rest = divmod(stages, layout.pp)
    if stages == layout.stages:
        return
    if rest or not stages:
        raise LayoutError(
            f"the actions have {stages} chunks, {layout} has {layout.stages}; "
            f"each of the {layout.pp} ranks needs as many"
        )
    fits = f"pp{layout.pp}:custom" + (f"*{chunks}" if chunks > 1 else "")
    raise LayoutError(f"the actions have {stages} chunks, {layout} has {layout.stages}; nearest: {fits}")


def _check_rank(rank: int, actions: Sequence[Action], layout: Layout, microbatches: int) -> None:
    own = layout.virtual_stages_of(rank)
    done: set[tuple[str, int, int]] = set()
    for action in actions:
        kind, chunk, j = action
        if kind not in COMPUTATIONS:
            continue
        if chunk not in own:
            raise LayoutError(
                f"rank {rank}: {action.text} is of a chunk that rank {layout.owner_of(chunk)} of {layout} holds; "
                f"rank {rank} holds chunk {' and '.join(map(str, own))}"
            )
        if j >= microbatches:
            raise LayoutError(
                f"rank {rank}: {action.text} is of microbatch {j}, but there are {microbatches}, "
                f"0 to {microbatches - 1}; change the actions or the global batch"
            )
        if (kind, chunk, j) in done:
            raise LayoutError(f"rank {rank}: {action.text} stands twice; keep one")
        clash = {"B": "IW", "I": "B", "W": "B"}.get(kind, "")
        if other := next((c for c in clash if (c, chunk, j) in done), None):
            raise LayoutError(
                f"rank {rank}: {chunk}{other}{j} and {action.text}: a backward is one B, or one I and one W"
            )
        needs = {"B": "F", "I": "F", "W": "I"}.get(kind)
        if needs and (needs, chunk, j) not in done:
            raise LayoutError(f"rank {rank}: {action.text} comes before {chunk}{needs}{j}, which it needs")
        done.add((kind, chunk, j))
    for chunk in own:
        for j in range(microbatches):
            if ("F", chunk, j) not in done:
                raise LayoutError(f"rank {rank}: {chunk}F{j} is missing; every chunk runs every microbatch")
            if ("B", chunk, j) not in done and ("W", chunk, j) not in done:
                missing = (
                    f"{chunk}W{j}"
                    if ("I", chunk, j) in done
                    else f"{chunk}B{j} (or {chunk}I{j}, {chunk}W{j})"
                )
                raise LayoutError(f"rank {rank}: {missing} is missing; every forward needs its backward")


def _check_messages(lists: Lists, layout: Layout) -> None:
    """Both ends of every edge: what is due, in which order, and on the right side of its computation."""
    sent: dict[Edge, list[int]] = {}
    received: dict[Edge, list[int]] = {}
    for rank, actions in enumerate(lists):
        seen: set[Action] = set()
        wanted: Counter[Action] = Counter()
        for action in actions:
            kind, chunk, j = action
            if kind in COMPUTATIONS:
                edge = incoming(action, layout.owner_of, layout.stages)
                if edge and Action(f"RECV_{edge.way}", chunk, j) not in seen:  # type: ignore[arg-type]
                    raise LayoutError(f"rank {rank}: {action} reads a message before it is received")
                edge = outgoing(action, layout.owner_of, layout.stages)
                if edge:
                    wanted[Action(f"SEND_{edge.way}", chunk, j)] += 1  # type: ignore[arg-type]
            elif kind.startswith("SEND"):
                if not wanted[action]:
                    raise LayoutError(f"rank {rank}: {action} sends what was not made yet, or twice")
                wanted[action] -= 1
                step = 1 if kind == "SEND_F" else -1
                sent.setdefault(Edge(kind[-1], chunk, chunk + step), []).append(j)
            elif kind.startswith("RECV"):
                step = 1 if kind == "RECV_F" else -1
                received.setdefault(Edge(kind[-1], chunk - step, chunk), []).append(j)
            seen.add(action)
        if unsent := next((action for action, n in wanted.items() if n), None):
            raise LayoutError(f"rank {rank}: {unsent} is missing")
    for edge in sent.keys() | received.keys():
        if sent.get(edge) != received.get(edge):
            raise LayoutError(
                f"messages {edge.way} from chunk {edge.source} to {edge.target}: sent are microbatches "
                f"{sent.get(edge, [])[:20]}, received {received.get(edge, [])[:20]}; both ends need the same order"
            )


def deadlock(lists: Lists, stages: int) -> str | None:
    """Who waits for whom, for ever; None where every rank comes to its end. For lists that are complete.

    Each rank runs its computations in order and waits for what the next one reads; a product that is made is there.
    """
    runs = [[action for action in actions if action.kind in COMPUTATIONS] for actions in lists]
    position = [0] * len(runs)
    made: set[Product] = set()
    waiting: dict[Product, list[int]] = {}
    ready = deque(range(len(runs)))
    while ready:
        rank = ready.popleft()
        while position[rank] < len(runs[rank]):
            action = runs[rank][position[rank]]
            needed = Product.for_(action, stages)
            if needed and needed not in made:
                waiting.setdefault(needed, []).append(rank)
                break
            made.add(Product.of(action))
            ready.extend(waiting.pop(Product.of(action), ()))
            position[rank] += 1
    stuck = {rank: runs[rank][at] for rank, at in enumerate(position) if at < len(runs[rank])}
    return _cycle(runs, stuck, stages) if stuck else None


def _cycle(runs: Lists, stuck: dict[int, Action], stages: int) -> str:
    makers = {Product.of(action): (rank, action) for rank, actions in enumerate(runs) for action in actions}
    chain: list[int] = [min(stuck)]
    waits: list[str] = []
    while True:
        rank = chain[-1]
        needed = Product.for_(stuck[rank], stages)
        assert needed is not None, "a first forward waits for nothing"
        maker, action = makers[needed]
        where = "its own list, further on" if maker == rank else f"rank {maker}"
        waits.append(f"rank {rank} waits at {stuck[rank].text} for {action.text} of {where}")
        if maker in chain:
            return ", ".join(waits[chain.index(maker) :])
        chain.append(maker)
