"""Commands that need no torch do not load it, and start fast; modules that plan, count and record do not load it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
from source_tree import sources
from test_import_levels import is_torch_free

LONGEST_START_S = 0.4
TRIES = 5

COMMANDS = (
    ["--help"],
    ["--version"],
    ["runs", "list"],
    ["runs", "list", "--json"],
    ["model", "--help"],
    ["model", "show", "tiny-llama", "--json"],
    ["train", "--help"],
    ["verify", "--help"],
    ["lab", "--help"],
)

HEAVY = ("torch", "transformers", "matplotlib")


def run_python(code: str, *arguments: str, folder: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FIVEFOLD_RECORDS": os.path.join(folder, "records.sqlite")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=60,
        check=False,
    )


LOADED = f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_command_does_not_load_torch(command, tmp_path):
    code = (
        f"import sys; from fivefold.cli.main import run; code = run(sys.argv[1:]); {LOADED}; sys.exit(code)"
    )
    done = run_python(code, *command, folder=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    assert done.stdout


MISTAKES = (
    ["train", "model=tiny-llama", "layout=tp3"],
    ["train", "model=tiny-llama", "steps=many"],
    ["train", "model=tiny-llama", "global_batch=5", "layout=dp2"],
    ["verify", "--model", "tiny-llama"],
    ["layouts", "--model", "tiny-llama", "--ranks", "many"],
)


@pytest.mark.parametrize("command", MISTAKES, ids=" ".join)
def test_a_mistake_is_told_in_one_line_without_torch(command, tmp_path):
    code = (
        f"import sys; from fivefold.cli.main import run; code = run(sys.argv[1:]); {LOADED}; sys.exit(code)"
    )
    done = run_python(code, *command, folder=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    said, loaded = done.stderr.splitlines()
    assert said.startswith("fivefold: ")
    assert loaded == "[]"


@pytest.mark.parametrize("command", COMMANDS[:6], ids=" ".join)
def test_the_command_starts_fast(command, tmp_path):
    """CPU time, the best of some tries: what a busy machine does to the clock is not the command's."""
    code = "import sys; from fivefold.cli.main import main; sys.argv[0] = 'fivefold'; main()"
    took = []
    for _ in range(TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_python(code, *command, folder=str(tmp_path)).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        if took[-1] < LONGEST_START_S:
            return
    pytest.fail(
        f"`fivefold {' '.join(command)}` takes {min(took):.2f} s of CPU at best; at most {LONGEST_START_S} s"
    )


def test_the_package_does_not_load_torch(tmp_path):
    done = run_python(f"import sys, fivefold; {LOADED}", folder=str(tmp_path))
    assert done.stderr.splitlines()[-1] == "[]"


def test_torch_free_modules_do_not_load_torch(tmp_path):
    """All of them in one process: whoever loads torch, directly or through another, is found by asking one by one."""
    modules = [source.module for source in sources() if is_torch_free(source.module)]
    assert {"fivefold.core.layout", "fivefold.strategies.compose", "fivefold.data.batches"} <= set(modules)
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(name)
"""
    done = run_python(code, folder=str(tmp_path))
    assert done.returncode == 0, f"importing {done.stderr.strip()} loads torch"


def test_this_check_sees_torch(tmp_path):
    assert "'torch'" in run_python(f"import sys, torch; {LOADED}", folder=str(tmp_path)).stderr
