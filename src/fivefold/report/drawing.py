"""A matplotlib figure as an inline <svg> that follows the page: its font, and its light or dark colours.

Colours are CSS variables of the page, so one drawing serves both. matplotlib is imported inside functions
only; pyplot (global state, a display) never is.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from fivefold.report.lab_report import printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

PALETTE = {
    # name: (light, dark). Axes: Okabe & Ito; mixtures of axes: Tol "muted". Both are colour-blind safe.
    "ink": ("#1b1f24", "#e6e9ed"),
    "muted": ("#5c6672", "#9ba5b1"),
    "grid": ("#e2e5e9", "#2c323a"),
    "surface": ("#fefefe", "#191d22"),
    "bar": ("#64748b", "#8594aa"),
    "pale": ("#d3d9e1", "#3b4450"),
    "bad": ("#c0350e", "#ff8a65"),
    "dp": ("#0072b2", "#3f9fdc"),
    "tp": ("#e69f00", "#f2b73a"),
    "pp": ("#009e73", "#2bbd93"),
    "cp": ("#cc79a7", "#dd93bb"),
    "ep": ("#d55e00", "#ee7f2d"),
    "etp": ("#b08d57", "#c9aa78"),
    "edp": ("#7b8f3c", "#a3b665"),
    "tie": ("#8a6bb8", "#ab90d6"),
    "world": ("#9aa1ab", "#6f7883"),
    "dp-tp": ("#c2596b", "#e08a98"),
    "dp-pp": ("#3a2e8f", "#9d92ea"),
    "tp-pp": ("#8c8c2e", "#c4c463"),
    "dp-tp-pp": ("#a63f96", "#d67ec8"),
}
INK, MUTED, GRID, SURFACE, BAR, BAD = (
    PALETTE[n][0] for n in ("ink", "muted", "grid", "surface", "bar", "bad")
)
_WIDTH_IN = 9.0
_NAMES = {light: name for name, (light, _) in PALETTE.items()}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a layout's text is never a formula
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}


class Drawing:
    """One figure: the page's style, tips shown on hover, and the SVG in a form that a page can hold.

    Use as a context manager; everything about the figure is drawn inside it.
    """

    def __init__(self, name: str, alt: str, height_in: float) -> None:
        self.name, self.alt, self.height_in = name, alt, height_in
        self._tips: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Drawing:
        import matplotlib.style
        from matplotlib.figure import Figure

        style: list[Any] = ["default", {**_STYLE, "svg.hashsalt": self.name}]
        self._stack.enter_context(matplotlib.style.context(style))
        self._stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's browser has its own fonts
        self.figure = Figure(figsize=(_WIDTH_IN, self.height_in), layout="constrained")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tip(self, artists: Artist | Iterable[Artist], text: str) -> None:
        """Show `text` while the pointer rests on the artists."""
        for artist in artists if isinstance(artists, Iterable) else (artists,):
            key = f"tip{len(self._tips)}"
            artist.set_gid(key)
            self._tips[key] = printable(text)

    def svg(self) -> str:
        """The figure as an <svg> element without namespaces or metadata, with ids of its own."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        root = ElementTree.fromstring(buffer.getvalue())
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
            for child in [c for c in element if c.tag.rpartition("}")[2] in ("metadata", "style")]:
                element.remove(child)
            element.attrib = {k.rpartition("}")[2]: self._attribute(k, v) for k, v in element.attrib.items()}
            tip = self._tips.get(element.get("id", "").removeprefix(f"{self.name}-"))
            if tip:
                title = ElementTree.Element("title")
                title.text = tip
                element.insert(0, title)
        view_box = root.attrib["viewBox"]
        root.attrib = {"viewBox": view_box, "role": "img", "aria-label": self.alt}
        return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)

    def _attribute(self, key: str, value: str) -> str:
        if key == "id":
            return f"{self.name}-{value}"
        if key.endswith("href"):
            return f"#{self.name}-{value.removeprefix('#')}"
        value = value.replace("url(#", f"url(#{self.name}-")
        value = re.sub(
            r"#[0-9a-f]{6}\b", lambda m: f"var(--{_NAMES[m[0]]})" if m[0] in _NAMES else m[0], value
        )
        # the family is the page's own; the shorthand would need it
        return re.sub(r"font: ([\d.]+px)[^;]*", r"font-size: \1", value)


class Legend(dict[str, Any]):
    """Text to artist, each once; drawn above the plot, where it never covers a bar."""

    def draw(self, axes: Axes) -> None:
        if self:
            place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderpad": 0}
            axes.legend(list(self.values()), list(self), ncols=len(self), **place)
