"""The source tree as the rules see it: every Python file parsed once, and who imports what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "fivefold"


@dataclass(frozen=True)
class Source:
    """One module of the package, or a text that stands for one."""

    module: str
    """Dotted name: `fivefold.core.layout`; a package has the name of its folder."""
    text: str
    is_package: bool = False

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)

    @property
    def path(self) -> str:
        """For messages: relative to the repository."""
        inner = self.module.replace(".", "/")
        return f"src/{inner}/__init__.py" if self.is_package else f"src/{inner}.py"


@dataclass(frozen=True)
class Import:
    """`module` is imported at `line`, wherever in the file that is: also inside functions and for types only."""

    module: str
    line: int


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def sources() -> tuple[Source, ...]:
    """All modules of the package."""
    return tuple(_read(path) for path in sorted(PACKAGE.rglob("*.py")))


def _read(path: Path) -> Source:
    parts = list(path.relative_to(SRC).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    return Source(module, path.read_text(encoding="utf-8"), is_package)


def imports(source: Source) -> Iterator[Import]:
    """Everything a module imports, as absolute names. `from a import b` counts as `a.b`: b may be a module."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = source.module.split(".")
    keep = len(parts) - node.level + source.is_package
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def imports_of(source: Source, package: str) -> list[Import]:
    """The imports of `package` or of something inside it."""
    return [found for found in imports(source) if f"{found.module}.".startswith(f"{package}.")]


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` for such an expression, else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None
