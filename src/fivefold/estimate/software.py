"""Software eras: what a training stack and its age mean for the speed of a step. Keys of coefficients."""

from __future__ import annotations

import re

ERAS = {
    "megatron-classic": "Megatron-LM and Megatron-DeepSpeed until 2023: unfused attention, nothing overlaps",
    "megatron-core": "Megatron-Core up to 0.11, NeMo 24.x: Transformer Engine, flash attention",
    "megatron-2025": "Megatron-Core from 0.12, Megatron-Bridge 25.x",
    "megatron-2026": "Megatron-Bridge 26.02 to 26.04",
    "megatron-2026b": "Megatron-Bridge from 26.06: on Blackwell, experts launched in one graph and fused with dispatch",
    "fsdp": "PyTorch FSDP until 2025: Composer, torchtitan, accelerate",
    "fsdp-2026": "PyTorch FSDP2 from 2026",
    "deepspeed": "DeepSpeed ZeRO without Megatron's model parallelism",
    "deepspeed-2021": "the same until 2021: ZeRO-3's owner of each parameter sends it to all, over one adapter",
    "other": "anything else",
}
"""Era -> what is in it."""

_YEAR = re.compile(r"20[12]\d")
_CONTAINER = re.compile(r"(?<!\d)(2\d)\.(\d\d)(?!\d)")
_CORE = re.compile(r"(?<![\d.])r?v?0\.(\d+)")


FIRST_YEAR = {
    "V100": 2021.0,
    "A100": 2022.0,
    "H100": 2024.0,
    "MI300": 2024.5,
    "B200": 2025.5,
    "GB200": 2025.5,
}
"""When software of unknown age was probably built, by the family of the device that it ran on."""


def era(framework: str, year: float | None) -> str:
    """The era of a framework as a runs table names it; `other` where nothing is known of it."""
    name = framework.lower()
    if any(word in name for word in ("fsdp", "titan", "composer", "automodel", "accelerate", "torchtune")):
        return "fsdp" if year is None or year < 2025.7 else "fsdp-2026"
    if any(word in name for word in ("megatron", "nemo", "primus")):
        if "zero-3" in name:
            return "deepspeed-2021" if year is not None and year < 2022 else "deepspeed"
        if "core" not in name and "nemo" not in name and "bridge" not in name and "primus" not in name:
            return "megatron-classic" if year is None or year < 2024 else "megatron-core"
        if year is None:
            return "megatron-2025"
        return (
            "megatron-core"
            if year < 2025
            else "megatron-2025"
            if year < 2026
            else "megatron-2026"
            if year < 2026.4
            else "megatron-2026b"
        )
    return "deepspeed" if "deepspeed" in name else "other"


def release_year(framework: str, version: str) -> float | None:
    """When the software was released, in years: `26.04 NeMo Container` -> 2026.25. None where nothing says it."""
    for text in (version, framework):
        if match := _CONTAINER.search(text):
            return 2000 + int(match[1]) + (int(match[2]) - 1) / 12
        if match := _YEAR.search(text):
            return float(match[0])
        if (match := _CORE.search(text)) and "deepspeed" not in framework.lower():
            return 2023.0 + int(match[1]) / 8  # Megatron-Core: 0.8 came in 2024, 0.12 in the middle of 2025
    return None
