"""The names that other people's code relies on. A name that goes away or changes its meaning breaks them."""

from __future__ import annotations

import inspect

import pytest

import fivefold
from fivefold import errors

ERRORS = {
    "FivefoldError": ("Exception", 1),
    "UserError": ("FivefoldError", 2),
    "ConfigError": ("UserError", 2),
    "LayoutError": ("UserError", 2),
    "ModelError": ("UserError", 2),
    "ClusterError": ("UserError", 2),
    "WorkloadError": ("UserError", 2),
    "DataError": ("UserError", 2),
    "LaunchError": ("UserError", 2),
    "RecordError": ("UserError", 2),
    "CheckpointError": ("UserError", 2),
    "RankFailure": ("FivefoldError", 1),
}
"""Class -> (its base, the exit code of a command that ends with it)."""

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and value.__module__ == errors.__name__
}


def test_errors_are_these_and_no_others():
    assert {name: (cls.__bases__[0].__name__, cls.exit_code) for name, cls in CLASSES.items()} == ERRORS


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_says_what_it_means(name):
    own = vars(CLASSES[name]).get("__doc__") or ""
    assert own.strip().endswith("."), f"{name} has no docstring of its own"


def test_the_tree_at_the_top_of_the_file_names_every_error():
    drawn = errors.__doc__ or ""
    assert all(name in drawn for name in ERRORS)


NAMES = (
    "Layout", "OptimizerConfig", "Parallel", "empty_parameters", "parallelize", "run_ranks", "verify_model",
)  # fmt: skip


def test_the_package_has_these_names():
    assert sorted(NAMES) == sorted(set(fivefold.__all__) - {"__version__"})
    assert all(getattr(fivefold, name).__name__ == name for name in NAMES)
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        fivefold.paralelize  # noqa: B018


def test_the_version_is_a_version():
    assert [part.isdigit() for part in fivefold.__version__.split(".")] == [True] * 3
