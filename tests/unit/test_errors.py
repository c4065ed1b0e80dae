"""The tree of errors: exit codes and the words that name a nearest choice."""

from __future__ import annotations

import inspect
import pickle

import pytest

from fivefold import errors
from fivefold.errors import FivefoldError, RankFailure, UserError, nearest, nearest_numbers

CLASSES = [
    value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, FivefoldError)
]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    for cls in CLASSES:
        assert cls.__name__ in errors.__doc__


@pytest.mark.parametrize("cls", CLASSES)
def test_exit_codes(cls: type[FivefoldError]) -> None:
    """2 for what a user can mend, 1 for what failed while running."""
    assert cls.exit_code == (2 if issubclass(cls, UserError) else 1)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if issubclass(cls, UserError)])
def test_user_errors_travel_from_a_rank(cls: type[UserError]) -> None:
    error = pickle.loads(pickle.dumps(cls("tp3 does not fit")))  # noqa: S301 - our own bytes
    assert type(error) is cls
    assert str(error) == "tp3 does not fit"


def test_rank_failure_names_the_rank_and_the_cause() -> None:
    error = RankFailure(3, "ValueError: no", "Traceback ...")
    for same in (error, pickle.loads(pickle.dumps(error))):  # noqa: S301 - our own bytes
        assert str(same) == "rank 3 failed first: ValueError: no"
        assert (same.rank, same.cause, same.details) == (3, "ValueError: no", "Traceback ...")


def test_nearest_word() -> None:
    assert nearest("micro_bach", ["micro_batch", "steps"]) == " (did you mean 'micro_batch'?)"
    assert nearest("xyz", ["micro_batch", "steps"]) == ""


@pytest.mark.parametrize(
    ("wanted", "legal", "text"),
    [
        (3, [1, 2, 4, 8], "2 or 4"),
        (3, [8, 4, 2, 1, 4], "2 or 4"),
        (16, [1, 2, 4, 8], "8"),
        (0, [1, 2], "1"),
        (4, [1, 4, 8], "1 or 8"),
        (3, [], "none"),
    ],
)
def test_nearest_numbers(wanted: int, legal: list[int], text: str) -> None:
    assert nearest_numbers(wanted, legal) == text
