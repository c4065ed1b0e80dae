"""Units: the only place where powers of ten and of two become names, and numbers become text."""

from __future__ import annotations

MICRO, MILLI, KILO, MEGA, GIGA, TERA = 1e-6, 1e-3, 1e3, 1e6, 1e9, 1e12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


def format_bytes(n_bytes: float) -> str:
    """Binary units: `1536` -> `1.5 KiB`."""
    for size, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(n_bytes) >= size:
            return f"{_figures(n_bytes / size)} {name}"
    return f"{n_bytes:.0f} B"


def format_count(n: float) -> str:
    """Decimal units: `1_540_000` -> `1.54 M`."""
    for size, name in ((TERA, "T"), (GIGA, "G"), (MEGA, "M"), (KILO, "k")):
        if abs(n) >= size:
            return f"{_figures(n / size)} {name}"
    return _figures(n)


def format_seconds(seconds: float) -> str:
    """`0.0021` -> `2.1 ms`."""
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= size:
            return f"{_figures(seconds / size)} {name}"
    return f"{_figures(seconds / 1e-6)} us" if seconds else "0 s"


def _figures(x: float) -> str:
    """Three significant figures, or all digits before the point; an exponent only below 0.0001."""
    return f"{x:.3g}" if abs(x) < 999.5 else f"{x:.0f}"
