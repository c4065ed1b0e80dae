"""A folder imports only folders of a lower level, and itself. Imports inside functions and for types count as well."""

from __future__ import annotations

import ast

import pytest
from source_tree import PACKAGE, Source, imports, imports_of, sources

LEVELS = {
    "errors": 0,
    "units": 0,
    "compat": 0,
    "core": 1,
    "catalog": 2,
    "records": 2,
    "frameworks": 2,
    "data": 2,
    "nn": 3,
    "runtime": 3,
    "strategies": 4,
    "estimate": 5,
    "engine": 5,
    "report": 5,
    "plan": 6,
    "train": 6,
    "dryrun": 6,
    "verify": 6,
    "lab": 7,
    "cli": 8,
    "__main__": 9,
}
"""Folder or file of the package -> level. A new one is entered here before anything may import it."""

TORCH_FREE = (
    "fivefold.errors",
    "fivefold.units",
    "fivefold.core",
    "fivefold.catalog",
    "fivefold.records",
    "fivefold.frameworks",
    "fivefold.data",
    "fivefold.estimate",
    "fivefold.report",
    "fivefold.plan",
    "fivefold.strategies.compose",
    "fivefold.strategies.legal",
    "fivefold.strategies.pipeline.actions",
    "fivefold.strategies.pipeline.check",
    "fivefold.strategies.pipeline.schedules",
    "fivefold.strategies.pipeline.placement",
    "fivefold.strategies.expert.placement",
    "fivefold.strategies.expert.replicas",
)
"""Modules and folders whose source does not name torch at all; so do the `rules.py` of every strategy."""

LAUNCHERS = {"fivefold.cli.main"}
"""Where a module may be imported by a name that is computed."""


def unit(module: str) -> str:
    """The folder or file of the package that a module belongs to; the package itself has none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def strategy(module: str) -> str | None:
    """`tensor` for `fivefold.strategies.tensor.linear`; None for what is outside the strategies."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[1] == "strategies" else None


def level_faults(source: Source) -> list[str]:
    """Imports of the same or a higher level. The package itself imports when a name is asked for, not before."""
    here = unit(source.module)
    if here == "":
        started = {node.lineno for node in source.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))}
        found_at_start = [one for one in imports_of(source, "fivefold") if one.line in started]
        return [f"{source.path}:{one.line}: imports {one.module} at its start" for one in found_at_start]
    faults = []
    for found in imports_of(source, "fivefold"):
        there = unit(found.module)
        if there == here or there not in LEVELS:
            continue  # `from fivefold import __version__` names no folder
        if LEVELS[there] >= LEVELS[here]:
            where = f"{source.path}:{found.line}"
            faults.append(f"{where}: {here} (level {LEVELS[here]}) imports {there} ({LEVELS[there]})")
    return faults


def strategy_faults(source: Source) -> list[str]:
    """Imports from one strategy to another, or to `compose` and `legal`, which stand above them."""
    here = strategy(source.module)
    if here in (None, "compose", "legal"):
        return []
    others = [(found, strategy(found.module)) for found in imports_of(source, "fivefold.strategies")]
    return [
        f"{source.path}:{found.line}: strategy {here} imports {there or 'strategies'}"
        for found, there in others
        if there != here
    ]


def is_torch_free(module: str) -> bool:
    by_name = any(f"{module}.".startswith(f"{free}.") for free in TORCH_FREE)
    return by_name or (strategy(module) is not None and module.endswith(".rules"))


def torch_faults(source: Source) -> list[str]:
    """Imports of torch, or of a folder that needs it, where neither may be."""
    if not is_torch_free(source.module):
        return []
    forbidden = ("torch", "fivefold.compat", "fivefold.nn", "fivefold.runtime", "fivefold.engine")
    return [
        f"{source.path}:{found.line}: {source.module} is torch-free but imports {found.module}"
        for package in forbidden
        for found in imports_of(source, package)
    ]


def model_faults(source: Source) -> list[str]:
    """Models know nothing of ranks: nn/ imports neither the runtime nor torch.distributed."""
    if unit(source.module) != "nn":
        return []
    found = [*imports_of(source, "torch.distributed"), *imports_of(source, "fivefold.runtime")]
    mentions = [f"{source.path}: names torch.distributed"] if "torch.distributed" in source.text else []
    return mentions + [f"{source.path}:{one.line}: nn imports {one.module}" for one in found]


def hidden_import_faults(source: Source) -> list[str]:
    """Imports by a computed name, which the rules above cannot see."""
    if source.module in LAUNCHERS:
        return []
    return [
        f"{source.path}:{found.line}: imports by name; only {', '.join(LAUNCHERS)} may"
        for found in imports(source)
        if f"{found.module}.".startswith("importlib.") and not f"{found.module}.".startswith(DATA_FILES)
    ] + ([f"{source.path}: calls __import__"] if "__import__(" in source.text else [])


DATA_FILES = ("importlib.resources.", "importlib.metadata.")
"""Parts of importlib that import nothing."""

RULES = (level_faults, strategy_faults, torch_faults, model_faults, hidden_import_faults)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    faults = [fault for source in sources() for fault in rule(source)]
    assert not faults, "\n".join(["", *faults])


def test_every_folder_has_a_level():
    units = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert units - {"__init__"} <= LEVELS.keys()


@pytest.mark.parametrize(
    ("rule", "module", "text"),
    [
        (level_faults, "fivefold.core.layout", "from fivefold.strategies import compose"),
        (level_faults, "fivefold.core.layout", "def f():\n    import fivefold.nn.mlp"),
        (
            level_faults,
            "fivefold.core.layout",
            "from typing import *\nif TYPE_CHECKING:\n    from fivefold import lab",
        ),
        (level_faults, "fivefold.nn.mlp", "from fivefold.runtime.mesh import Axis"),
        (level_faults, "fivefold.engine.build", "from ..report import plots"),
        (level_faults, "fivefold.units", "from . import errors"),
        (level_faults, "fivefold", "from fivefold.core.layout import Layout"),
        (strategy_faults, "fivefold.strategies.tensor.linear", "from fivefold.strategies.data import rules"),
        (strategy_faults, "fivefold.strategies.data.apply", "from fivefold.strategies import compose"),
        (strategy_faults, "fivefold.strategies.data.apply", "from ..pipeline.schedules import Action"),
        (torch_faults, "fivefold.core.layout", "def f():\n    from torch import nn"),
        (torch_faults, "fivefold.strategies.tensor.rules", "import torch.distributed as dist"),
        (torch_faults, "fivefold.strategies.compose", "from fivefold.runtime.mesh import Mesh"),
        (torch_faults, "fivefold.data.batches", "from fivefold import compat"),
        (model_faults, "fivefold.nn.mlp", "from torch import distributed"),
        (model_faults, "fivefold.nn.mlp", "import torch\ntorch.distributed.get_rank()"),
        (hidden_import_faults, "fivefold.core.layout", "from importlib import import_module"),
        (hidden_import_faults, "fivefold.core.layout", "x = __import__('torch')"),
    ],
)
def test_the_rule_can_fail(rule, module, text):
    assert rule(Source(module, text, is_package=module == "fivefold"))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "fivefold.core.layout",
            "from fivefold.core.value import Value\nfrom fivefold.errors import LayoutError",
        ),
        ("fivefold.strategies.tensor.linear", "import torch\nfrom fivefold.strategies.tensor import rules"),
        ("fivefold.strategies.compose", "from fivefold.strategies.data import rules"),
        ("fivefold.cli.main", "import importlib\nfrom fivefold import __version__"),
        ("fivefold.nn.mlp", "import torch\nfrom torch import nn\nfrom . import layers"),
        ("fivefold.catalog.models", "from importlib import resources"),
    ],
)
def test_what_is_allowed_passes(module, text):
    assert not [fault for rule in RULES for fault in rule(Source(module, text))]
