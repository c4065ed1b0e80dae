"""What may stand in a source file: units and private torch APIs in one place each, nothing dangerous, nothing long."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest
from source_tree import PACKAGE, ROOT, Source, dotted, imports, imports_of, sources

LONGEST_FILE = 500
UNITS = "fivefold.units"
COMPAT = "fivefold.compat"
READS_PICKLES = {"fivefold.runtime.launch"}
"""Ranks are our own children; what they send over their pipe is the only pickle that is ever read."""

BINARY = {2**n for n in (20, 30, 40, 50)}
DECIMAL = {10**n for n in (6, 9, 12, 15)}
"""A power of ten is a unit where it multiplies or divides; elsewhere it may be a limit or a setting."""

TEXT_FILES = ("*.py", "*.md", "*.toml", "*.yaml", "*.txt", "*.html", "*.css", "Makefile", "run")
PLACES = ("src", "tests", "docs", "benchmarks", "examples", ".ci")
FOREIGN = re.compile(
    r"/(?:work|root)/|/home/\w|/Users/\w|https?://(?:localhost|127\.|10\.|192\.168\.)|index-url"
    r"|\b(?:DESIGN|PITFALLS|STYLE)\.md\b|\bdesign document\b|\bthe brief\b|\bissue [0-9]\b"
)
"""Paths and addresses of somebody's machine, and the talk of whoever wrote a file about writing it."""


def unit_faults(source: Source) -> Iterator[str]:
    """Powers of two or ten that turn one unit into another: 2**30, 1 << 30, 1024 * 1024, x / 1e9."""
    if source.module == UNITS:
        return
    for node in ast.walk(source.tree):
        factors = (
            [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, FACTORS) else []
        )
        found = isinstance(node, ast.expr) and _number(node) in BINARY
        if found or any(_number(factor) in DECIMAL for factor in factors):
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)}; take its name from fivefold.units"


FACTORS = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)


def _number(node: ast.expr) -> float | None:
    """The value of a number, or of a power, product or shift of two of them."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) in (int, float) else None
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _number(node.left), _number(node.right)
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Pow) and abs(left) <= 1024 and abs(right) <= 60:
        return left**right
    if isinstance(node.op, ast.LShift) and 0 <= right <= 60:
        return int(left) << int(right)
    return None


def private_torch_faults(source: Source) -> Iterator[str]:
    """Private torch names outside compat.py: modules, functions, and attributes of objects that are not our own."""
    torch_imports = imports_of(source, "torch")
    if source.module == COMPAT or not torch_imports:
        return
    for found in torch_imports:
        if any(part.startswith("_") for part in found.module.split(".")):
            yield f"{source.path}:{found.line}: imports {found.module}"
    own = _own_private_names(source)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            name = dotted(node) or node.attr
            if node.attr not in own and not name.startswith(("os.", "sys.")):
                yield f"{source.path}:{node.lineno}: uses {name}"


def _own_private_names(source: Source) -> set[str]:
    """Private names that the file itself gives: functions, fields, and what it sets on `self`."""
    names = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted(node.value) == "self"
        ):
            names.add(node.attr)
    return names


def danger_faults(source: Source) -> Iterator[str]:
    """Whatever would run text or bytes from outside as code."""
    for found in imports(source):
        if found.module.partition(".")[0] in ("marshal", "shelve", "dill", "cloudpickle"):
            yield f"{source.path}:{found.line}: imports {found.module}"
        if found.module in ("pickle.load", "pickle.loads", "os.system", "os.popen", "yaml.load"):
            yield f"{source.path}:{found.line}: imports {found.module} by its bare name, which hides it from this rule"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and (fault := _call_fault(source, node)):
            yield f"{source.path}:{node.lineno}: {fault}"


def _call_fault(source: Source, call: ast.Call) -> str | None:
    name = dotted(call.func) or ""
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in ("eval", "exec", "compile", "os.system", "os.popen"):
        return f"calls {name}"
    if name in ("pickle.load", "pickle.loads", "pickle.Unpickler") and source.module not in READS_PICKLES:
        return f"calls {name}; only {', '.join(READS_PICKLES)} reads what its own children sent"
    if name == "torch.load" and keywords.get("weights_only") != "True":
        return "calls torch.load without weights_only=True"
    if keywords.get("shell", "False") != "False":
        return f"calls {name} through a shell"
    if name in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"):
        loader = keywords.get("Loader", "")
        if f"class {loader}(yaml.SafeLoader)" not in source.text and loader not in (
            "yaml.SafeLoader",
            "yaml.CSafeLoader",
        ):
            return f"calls {name} without a safe loader"
    return None


def layout_faults(source: Source) -> Iterator[str]:
    """Long files, and code in the `__init__.py` of an inner folder."""
    lines = source.text.count("\n")
    if lines > LONGEST_FILE:
        yield f"{source.path}: {lines} lines, at most {LONGEST_FILE}"
    if source.is_package and source.module != PACKAGE.name and source.text.strip():
        yield f"{source.path}: is not empty"


RULES = (unit_faults, private_torch_faults, danger_faults, layout_faults)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    faults = [fault for source in sources() for fault in rule(source)]
    assert not faults, "\n".join(["", *faults])


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        *(
            (unit_faults, f"x = {value}")
            for value in ("2**30", "1024**3", "1 << 20", "1024 * 1024", "1048576")
        ),
        *((unit_faults, f"x = n {value}") for value in ("/ 1e9", "* 10**9", "// 1_000_000", "/ 1000**3")),
        (private_torch_faults, "import torch._dynamo"),
        (private_torch_faults, "from torch.utils._pytree import tree_leaves"),
        (private_torch_faults, "def f():\n    from torch.distributed import _tensor"),
        (private_torch_faults, "import torch\ntorch._C._get_tracing_state()"),
        (private_torch_faults, "import torch\ntorch._foreach_mul_([], 2.0)"),
        (
            private_torch_faults,
            "from torch import Tensor\ndef f(x: Tensor):\n    return x.untyped_storage()._cdata",
        ),
        (danger_faults, "import pickle\npickle.loads(b'')"),
        (danger_faults, "from pickle import loads"),
        (danger_faults, "eval('1')"),
        (danger_faults, "import os\nos.system('ls')"),
        (danger_faults, "import subprocess\nsubprocess.run('ls', shell=True)"),
        (danger_faults, "import torch\ntorch.load('x')"),
        (danger_faults, "import yaml\nyaml.load('x')"),
        (danger_faults, "import yaml\nclass L(yaml.Loader): ...\nyaml.load('x', Loader=L)"),
        (layout_faults, "\n" * (LONGEST_FILE + 1)),
    ],
)
def test_the_rule_can_fail(rule, text):
    assert list(rule(Source("fivefold.engine.sample", text)))


def test_a_filled_inner_init_is_found():
    assert list(layout_faults(Source("fivefold.engine", "x = 1", is_package=True)))


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nclass A:\n    def f(self, other):\n        self._x = torch.ones(1)\n        other._x",
        "import os, torch\nos._exit(1)",
        "import torch\nmodel = torch.nn.Linear(1, 1)\nmodel.eval()",
        "import yaml\nclass L(yaml.SafeLoader): ...\nyaml.load('x', Loader=L)",
        "eps, theta, most = 1e-6, 1e6, 10**9",
        "size = 2**16 + 1024",
    ],
)
def test_what_is_allowed_passes(text):
    assert not [fault for rule in RULES for fault in rule(Source("fivefold.engine.sample", text))]


def _project_files() -> Iterable[tuple[str, str]]:
    for place in PLACES:
        for pattern in TEXT_FILES:
            for path in sorted((ROOT / place).rglob(pattern)):
                if path.is_file() and "rules" not in path.parts:
                    yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        yield path.name, path.read_text(encoding="utf-8")


def test_the_project_speaks_of_itself_alone():
    faults = [
        f"{name}:{number}: {match[0]!r}"
        for name, text in _project_files()
        for number, line in enumerate(text.splitlines(), 1)
        if (match := FOREIGN.search(line))
    ]
    assert not faults, "\n".join(["", *faults])


def test_no_python_file_is_long():
    files = [path for place in ("tests", "benchmarks") for path in (ROOT / place).rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): n
        for path in files
        if (n := len(path.read_text().splitlines())) > LONGEST_FILE
    }
    assert not long


def test_no_two_test_files_share_a_name():
    """pytest imports the files of folders without `__init__.py` by name alone, and stops at the second."""
    loose = [
        path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()
    ]
    names = [path.name for path in loose]
    assert {name for name in names if names.count(name) > 1} == set()
