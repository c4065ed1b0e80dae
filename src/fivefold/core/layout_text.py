"""The text form of a layout: `dp2 tp4 pp4:1f1b*2@flops cp2:ring ep8 zero1` to fields and back.

dpN  tpN  ppN[:gpipe|1f1b|bfs|zbh1|zbv|dualpipev|custom][*chunks][@even|@flops|@measured|@9+11+10]
cpN[:ring|ulysses|gather|ringAxulyssesB]  epN  etpN  zeroK[/G]  nosp  order=tp-cp-dp-pp
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, get_args

from fivefold.errors import LayoutError, nearest

if TYPE_CHECKING:
    from fivefold.core.layout import Layout

MeshAxis = Literal["tp", "cp", "dp", "pp"]
Schedule = Literal["gpipe", "1f1b", "bfs", "zbh1", "zbv", "dualpipev", "custom"]
DEFAULT_ORDER: tuple[MeshAxis, ...] = ("tp", "cp", "dp", "pp")
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
V_SCHEDULES = ("zbv", "dualpipev")
"""Schedules that go down the ranks and back up: two chunks a rank, first and last stage on rank 0."""

_NAMES = ("dp", "tp", "pp", "cp", "ep", "etp", "zero")
_PLACEMENTS = ("even", "flops", "measured")
_NUMBER = r"[0-9]{1,9}"
_MAX_TEXT = 10_000


def print_layout(layout: Layout) -> str:
    """The canonical text: fixed token order, defaults left out."""
    tokens = [f"{axis}{getattr(layout, axis)}" for axis in ("dp", "tp") if getattr(layout, axis) > 1]
    if layout.pp > 1:
        tokens.append(pipeline_token(layout))
    if layout.cp > 1:
        method = layout.cp_method
        both = f"ring{layout.cp_ring}xulysses{layout.cp_ulysses}"
        tokens.append(f"cp{layout.cp}:{both if method == 'ring_ulysses' else method}")
    tokens = tokens or ["dp1"]
    tokens += [f"{axis}{getattr(layout, axis)}" for axis in ("ep", "etp") if getattr(layout, axis) > 1]
    if layout.zero:
        tokens.append(f"zero{layout.zero}" + (f"/{layout.zero_group}" if layout.zero_group else ""))
    if not layout.sp:
        tokens.append("nosp")
    if layout.order != DEFAULT_ORDER:
        tokens.append("order=" + "-".join(layout.order))
    return " ".join(tokens)


def pipeline_token(layout: Layout) -> str:
    """The `pp` token, such as `pp4:1f1b*2@flops`."""
    token = f"pp{layout.pp}"
    if layout.schedule != "1f1b" or layout.chunks > 1:
        token += f":{layout.schedule}"
    if layout.chunks > 1 and layout.schedule not in V_SCHEDULES:
        token += f"*{layout.chunks}"
    if isinstance(layout.placement, tuple):
        return token + "@" + "+".join(map(str, layout.placement))
    return token + ("" if layout.placement == "even" else f"@{layout.placement}")


_TOKEN = re.compile(r"(dp|tp|pp|cp|etp|ep|zero)([0-9]+)(.*)|(nosp)|order=(.*)", re.DOTALL)


def read_layout(text: str) -> dict[str, Any]:
    """Fields of the text form; every token once."""
    if len(text) > _MAX_TEXT:
        raise LayoutError(f"layout text has {len(text)} characters; at most {_MAX_TEXT} are read")
    if not text.split():
        raise LayoutError("empty layout; one device is 'dp1'")
    fields: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for token in text.split():
        match = _TOKEN.fullmatch(token)
        if match is None or match[3]:
            _refuse_joined(token)
        if match is None:
            raise _unknown_token(token)
        name, number, rest, nosp, order = match.groups()
        key = name or nosp or "order"
        if key in seen:
            raise LayoutError(f"{key} is given twice: {seen[key]!r} and {token!r}; keep one")
        seen[key] = token
        if nosp:
            fields["sp"] = False
        elif name is None:
            fields["order"] = _read_order(token, order)
        else:
            if len(number) > 9:
                raise LayoutError(f"layout token {token[:20]!r}: {len(number)} digits; at most 9 are read")
            fields |= {name: int(number), **_read_rest(token, name, rest)}
    return fields


_PIECE = re.compile(
    r"(?:dp|tp|pp|cp|etp|ep|zero)[0-9]+(?:[:*@/](?:(?!(?:dp|e?tp|pp|cp|ep|zero)[0-9]|nosp|,).)*)?|nosp"
)


def _refuse_joined(token: str) -> None:
    """Raises: LayoutError for tokens without spaces between them: `dp2tp2`, `dp2,tp2`, `dp2xtp2`."""
    pieces = _PIECE.findall(token)
    between = _PIECE.sub("", token)
    joined = len(pieces) > 1 and not between.strip(",;+-_x&")
    if joined or (len(pieces) == 1 and between in (",", ";")):
        raise LayoutError(
            f"layout token {token[:40]!r}: tokens are separated by spaces; write {' '.join(pieces)[:80]!r}"
        )


def _unknown_token(token: str) -> LayoutError:
    if token in _NAMES:
        return LayoutError(f"layout token {token!r} needs a number, such as {token}2")
    number = "".join(re.findall("[0-9]", token))[:9]
    candidates = [*(f"{name}{number or 2}" for name in _NAMES), "nosp", "order=tp-cp-dp-pp"]
    hint = (
        nearest(token[:40].lower(), candidates)
        or f"; known: {', '.join(_NAMES)} with a number, nosp, order=..."
    )
    return LayoutError(f"unknown layout token {token[:40]!r}{hint}")


def _read_rest(token: str, name: str, rest: str) -> dict[str, Any]:
    """What follows the number of a token."""
    if name == "pp":
        return _read_pipeline(token, rest)
    if not rest:
        return {}
    if name == "zero" and re.fullmatch(rf"/{_NUMBER}", rest):
        return {"zero_group": int(rest[1:])}
    if name == "cp" and rest.startswith(":"):
        return _read_cp_method(token, rest[1:])
    forms = {"zero": "zeroK/G", "cp": "cpN:method"}
    plain = token.removesuffix(rest)
    raise LayoutError(
        f"layout token {token!r}: cannot read {rest!r}; write {forms.get(name, plain)} (nearest: {plain})"
    )


def _read_cp_method(token: str, method: str) -> dict[str, Any]:
    if method in ("ring", "ulysses", "gather"):
        return {"cp_method": method}
    if both := re.fullmatch(rf"ring({_NUMBER})xulysses({_NUMBER})", method):
        return {"cp_method": "ring_ulysses", "cp_ring": int(both[1]), "cp_ulysses": int(both[2])}
    hint = nearest(method, ("ring", "ulysses", "gather", "ring2xulysses2"))
    raise LayoutError(f"layout token {token!r}: unknown cp method {method!r}{hint}")


def _read_pipeline(token: str, rest: str) -> dict[str, Any]:
    match = re.fullmatch(r"(?::([^*@]*))?(?:\*([^*@]*))?(?:@([^*@]*))?", rest)
    if match is None:
        raise LayoutError(
            f"layout token {token!r}: write ppN:schedule*chunks@placement, such as pp4:1f1b*2@flops"
        )
    schedule, chunks, placement = match.groups()
    fields: dict[str, Any] = {}
    if schedule is not None:
        if schedule not in SCHEDULES:
            raise LayoutError(
                f"layout token {token!r}: unknown schedule {schedule!r}{nearest(schedule, SCHEDULES)}"
            )
        fields["schedule"] = schedule
    if chunks is not None:
        if not re.fullmatch(_NUMBER, chunks) or int(chunks) < 2:
            raise LayoutError(
                f"layout token {token!r}: chunks are a number of at least 2, got {chunks!r}; nearest: *2"
            )
        if schedule in V_SCHEDULES:
            raise LayoutError(f"layout token {token!r}: {schedule} implies 2 chunks; leave out *{chunks}")
        fields["chunks"] = int(chunks)
    if placement is not None:
        fields["placement"] = _read_placement(token, placement)
    return fields


def _read_placement(token: str, placement: str) -> str | tuple[int, ...]:
    if placement in _PLACEMENTS:
        return placement
    if re.fullmatch(rf"{_NUMBER}(\+{_NUMBER})*", placement):
        return tuple(map(int, placement.split("+")))
    hint = nearest(placement, _PLACEMENTS) or "; write @even, @flops, @measured or layers such as @9+11"
    raise LayoutError(f"layout token {token!r}: unknown placement {placement!r}{hint}")


def _read_order(token: str, order: str) -> tuple[str, ...]:
    axes = tuple(order.split("-"))
    if sorted(axes) != sorted(DEFAULT_ORDER):
        raise LayoutError(
            f"layout token {token!r}: order needs tp, cp, dp and pp once each; default: order=tp-cp-dp-pp"
        )
    return axes
