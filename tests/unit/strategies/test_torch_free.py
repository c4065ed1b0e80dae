"""What planning needs never imports torch: checked in a fresh interpreter, since this one has it."""

from __future__ import annotations

import subprocess
import sys

MODULES = [
    "fivefold.errors",
    "fivefold.units",
    "fivefold.core.sharding",
    "fivefold.strategies.compose",
    "fivefold.strategies.data.rules",
    "fivefold.estimate.timeline",
    "fivefold.strategies.pipeline.actions",
    "fivefold.strategies.pipeline.check",
    "fivefold.strategies.pipeline.placement",
    "fivefold.strategies.pipeline.rules",
    "fivefold.strategies.pipeline.schedules",
    "fivefold.strategies.tensor.rules",
]


def test_rules_do_not_import_torch() -> None:
    code = "import importlib, sys\n" + "".join(f"importlib.import_module({name!r})\n" for name in MODULES)
    code += "print([n for n in ('torch', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
