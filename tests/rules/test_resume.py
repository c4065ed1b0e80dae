"""`make test-all` goes on where it was stopped: what passed with this code is left out, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.resume import code_digest

pytest_plugins = ["pytester"]

SUITE = """
import pathlib
import pytest

def test_passes():
    pass

def test_needs_a_file():
    assert pathlib.Path("there").exists()

def test_skipped():
    pytest.skip("not here")
"""
CONFTEST = """
from tests.resume import Resume
from pathlib import Path

def pytest_configure(config):
    config.pluginmanager.register(Resume(Path("passed.txt")))
"""


def test_only_what_passed_is_left_out(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SUITE)
    pytester.runpytest().assert_outcomes(passed=1, failed=1, skipped=1)
    Path("there").touch()
    pytester.runpytest().assert_outcomes(passed=1, skipped=1, deselected=1)
    assert pytester.runpytest("-k", "passes or file").ret == pytest.ExitCode.OK


def test_any_change_of_the_code_begins_anew(tmp_path: Path) -> None:
    source = tmp_path / "src" / "a.py"
    source.parent.mkdir()
    source.write_text("one = 1\n")
    (tmp_path / "pyproject.toml").touch()
    before = code_digest(tmp_path)
    source.write_text("one = 2\n")
    changed = code_digest(tmp_path)
    source.rename(source.with_name("b.py"))
    assert len({before, changed, code_digest(tmp_path)}) == 3
