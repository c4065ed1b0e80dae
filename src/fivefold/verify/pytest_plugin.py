"""A pytest fixture, so that a project verifies its layouts in its own tests; pytest finds it by itself.

def test_our_layout(fivefold_verify):
    fivefold_verify("config.json", "dp2 tp2 pp2")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fivefold.verify.verify import Verdict


@pytest.fixture(scope="session")
def fivefold_verify() -> Callable[..., Verdict]:
    """`fivefold_verify(model, layout, against="dp1", shrink=False, **options)`: fails the test with the cause.

    `model`: a preset, a path of a config.json, or a ModelSpec; `options`: those of `fivefold.verify.verify.verify`.
    Returns the verdict where it passes. Raises: UserError for what cannot be run.
    """
    from fivefold.catalog.models import resolve
    from fivefold.core.layout import Layout
    from fivefold.core.model_spec import ModelSpec
    from fivefold.verify.verify import verify
    from fivefold.verify.workload import shrink as shrunk

    def check(
        model: str | ModelSpec, layout: str, against: str = "dp1", *, shrink: bool = False, **options: Any
    ) -> Verdict:
        spec = model if isinstance(model, ModelSpec) else resolve(model)
        verdict = verify(
            shrunk(spec) if shrink else spec, Layout.parse(layout), Layout.parse(against), **options
        )
        if not verdict.passed:
            pytest.fail(
                f"{verdict.layout} is not the model of {verdict.against}: {verdict.cause}", pytrace=False
            )
        return verdict

    return check
