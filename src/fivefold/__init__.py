"""Fivefold: the five parallel strategies of large language models, from plan to record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.core.layout import Layout as Layout
    from fivefold.core.optimizer import OptimizerConfig as OptimizerConfig
    from fivefold.engine.parallelize import Parallel as Parallel
    from fivefold.engine.parallelize import parallelize as parallelize
    from fivefold.nn.own_values import empty_parameters as empty_parameters
    from fivefold.runtime.launch import run_ranks as run_ranks
    from fivefold.verify.own import verify_model as verify_model

__version__ = "0.1.0"

__all__ = [
    "Layout", "OptimizerConfig", "Parallel", "__version__", "empty_parameters", "parallelize", "run_ranks",
    "verify_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names of other folders, imported when they are asked for: `import fivefold` alone does not load torch."""
    if name == "Layout":
        from fivefold.core.layout import Layout

        return Layout
    if name == "OptimizerConfig":
        from fivefold.core.optimizer import OptimizerConfig

        return OptimizerConfig
    if name == "Parallel":
        from fivefold.engine.parallelize import Parallel

        return Parallel
    if name == "empty_parameters":
        from fivefold.nn.own_values import empty_parameters

        return empty_parameters
    if name == "parallelize":
        from fivefold.engine.parallelize import parallelize

        return parallelize
    if name == "run_ranks":
        from fivefold.runtime.launch import run_ranks

        return run_ranks
    if name == "verify_model":
        from fivefold.verify.own import verify_model

        return verify_model
    raise AttributeError(f"module 'fivefold' has no attribute {name!r}")
