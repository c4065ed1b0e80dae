"""The runs table: measured training runs, one a line (JSONL) or a row (CSV), with columns that anyone can fill in.

The file comes from outside: its size, its types and its numbers are checked before anything is computed with them. A
row that cannot be priced is kept with the reason, so that it can be listed and counted.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fivefold.core.layout import Layout
from fivefold.core.regular_file import read_text
from fivefold.errors import LayoutError, RecordError, nearest
from fivefold.units import MIB

MOST_BYTES = 64 * MIB
MOST_ROWS = 200_000
MOST_TEXT = 2000
MOST_UNREAD = 8
LARGEST = 1e15
"""No size, rate or count of a run is larger; a larger number is a damaged table."""

WHOLE = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "experts", "top_k", "shared_experts",
    "moe_ffn_hidden", "shared_expert_ffn_hidden", "dense_layers", "mla_q_lora_rank", "mla_kv_lora_rank",
    "mla_qk_nope_dim", "mla_qk_rope_dim", "mla_v_dim", "seq_len", "num_gpus", "gpus_per_node", "tp", "pp", "dp", "cp",
    "ep", "etp", "zero_stage", "vpp", "micro_batch", "global_batch", "num_microbatches", "attention_layers",
    "mamba_layers", "mamba_heads", "mamba_head_dim", "mamba_state", "mamba_groups", "moe_latent",
)  # fmt: skip
"""Columns that hold whole numbers."""
ZERO_IS_FINE = (
    "experts", "top_k", "shared_experts", "moe_ffn_hidden", "shared_expert_ffn_hidden", "dense_layers",
    "mla_q_lora_rank", "mla_kv_lora_rank", "mla_qk_nope_dim", "mla_qk_rope_dim", "mla_v_dim", "zero_stage",
    "attention_layers", "mamba_layers", "mamba_heads", "mamba_head_dim", "mamba_state", "mamba_groups", "moe_latent",
)  # fmt: skip
MEASURED = (
    "iter_time_s", "tokens_per_s_per_gpu", "samples_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu", "peak_mem_gib",
    "mem_static_gib", "mem_act_gib",
)  # fmt: skip
"""Columns that hold what was measured; no prediction reads them."""
FLAGS = ("gated_mlp", "tied_embeddings", "fsdp", "hsdp", "sequence_parallel", "oom")
WORDS = (
    "source", "source_locator", "dedupe_group", "kind", "task", "phase", "model_name", "model_type", "gpu",
    "interconnect", "pp_schedule", "recompute", "precision", "grad_accum_dtype", "offload", "framework",
    "framework_version", "moe_routing", "tflops_kind", "flops_convention", "tier_time", "tier_mem", "peak_mem_kind",
    "peak_mem_rank", "attention_backend",
)  # fmt: skip
NUMBERS = ("gpu_mem_gib", "params_total_b", *MEASURED)
LAYOUT = "layout"
"""The column that may hold the layout as Fivefold's text, in place of the degrees one by one."""
COLUMNS = frozenset((*WHOLE, *FLAGS, *WORDS, *NUMBERS, LAYOUT))


@dataclass(frozen=True)
class Row:
    """One row as it stands in the table."""

    line: int
    """Line of the file; of CSV: of the row, the header being line 1."""
    values: Mapping[str, Any]
    """Checked values of the known columns; a value that is missing is not there."""
    unread: tuple[str, ...] = ()
    """Its columns that are not known."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.values.get(name)

    @property
    def name(self) -> str:
        """How messages name it."""
        told = [self.values[name] for name in ("source", "model_name") if self.values.get(name)]
        return f"line {self.line}" + (f" ({': '.join(told)})" if told else "")


def read_rows(path: Path) -> list[Row]:
    """All rows of a table in JSONL or CSV (by the end of its name, `.csv`).

    Raises: RecordError, one line that names the file, the line and the column at fault.
    """
    text = read_text(path, MOST_BYTES, "runs table", RecordError)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    records = _csv_records(text, path) if path.suffix.lower() == ".csv" else _jsonl_records(text, path)
    rows: list[Row] = []
    for line, record in records:
        if len(rows) >= MOST_ROWS:
            raise RecordError(f"{path}: more than {MOST_ROWS} rows; at most that many are read")
        values = checked_record(record, f"{path}, line {line}")
        rows.append(Row(line, values, tuple(name for name in record if name not in COLUMNS)))
    if not rows:
        raise RecordError(
            f"{path}: no rows; a runs table has one JSON object a line, or is CSV with a header"
        )
    return rows


def _jsonl_records(text: str, path: Path) -> Iterable[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"

        def not_finite(constant: str, where: str = where) -> NoReturn:
            raise RecordError(f"{where}: {constant}; a runs table holds finite numbers only")

        try:
            record = json.loads(line, parse_constant=not_finite)
        except json.JSONDecodeError as error:
            raise RecordError(f"{where}: not JSON (column {error.colno}: {error.msg})") from None
        except (RecursionError, ValueError):
            raise RecordError(f"{where}: nested too deeply, or a number too long") from None
        yield number, record


def _csv_records(text: str, path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    try:
        reader = csv.DictReader(io.StringIO(text), strict=True)
        for record in reader:
            where = f"{path}, line {reader.line_num}"
            if None in record or None in record.values():
                raise RecordError(f"{where}: has another number of cells than the header")
            yield (
                reader.line_num,
                {key: _cell(key, cell, where) for key, cell in record.items() if cell.strip()},
            )
    except csv.Error as error:
        raise RecordError(f"{path}: not CSV ({error})") from None


def _cell(column: str, text: str, where: str) -> Any:
    text = text.strip()
    if column in FLAGS:
        if text.lower() not in ("true", "false", "1", "0"):
            raise RecordError(f"{where}: {column} is {text[:40]!r}; true or false")
        return text.lower() in ("true", "1")
    if column in WHOLE or column in NUMBERS:
        try:
            number = float(text)
        except ValueError:
            raise RecordError(f"{where}: {column} is {text[:40]!r}; a number") from None
        return int(number) if number.is_integer() else number
    return text


def checked_record(record: Any, where: str) -> dict[str, Any]:
    """The known columns of a row; others are ignored. Raises: RecordError."""
    if not isinstance(record, dict):
        raise RecordError(f"{where}: expected one JSON object, got a {type(record).__name__}")
    found: dict[str, Any] = {}
    for column, value in record.items():
        if value is None:
            continue
        if column in FLAGS and not isinstance(value, bool):
            raise RecordError(f"{where}: {column} is {str(value)[:40]!r}; true or false")
        if column in WORDS and not (isinstance(value, str) and len(value) <= MOST_TEXT):
            raise RecordError(
                f"{where}: {column} is {str(value)[:40]!r}; a text of at most {MOST_TEXT} characters"
            )
        if column in WHOLE or column in NUMBERS:
            _check_number(column, value, where)
        if column in FLAGS or column in WORDS or column in WHOLE or column in NUMBERS:
            found[column] = value
    text = record.get(LAYOUT)
    return found if text in (None, "") else {**_degrees(text, where), **found}


def _degrees(text: Any, where: str) -> dict[str, Any]:
    """The columns that a layout's text stands for. Raises: RecordError."""
    try:
        layout = Layout.parse(str(text))
    except LayoutError as error:
        raise RecordError(f"{where}: {LAYOUT}: {error}") from None
    whole = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "cp", "ep", "etp")}
    of_pipeline = {"pp_schedule": layout.schedule, "vpp": layout.chunks} if layout.pp > 1 else {}
    return {**whole, **of_pipeline, "zero_stage": layout.zero, "sequence_parallel": layout.sequence_parallel}


def unread_columns(rows: list[Row]) -> str | None:
    """One line on the columns that nothing reads, the nearest known one beside each; None where all are read."""
    names = sorted({name for row in rows for name in row.unread})
    if not names:
        return None
    told = [f"{name[:40]}{nearest(name, COLUMNS)}" for name in names[:MOST_UNREAD]]
    more = f" and {len(names) - MOST_UNREAD} more" if len(names) > MOST_UNREAD else ""
    return f"columns that are not read: {', '.join(told)}{more}"


def _check_number(column: str, value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(f"{where}: {column} is {str(value)[:40]!r}; a number")
    shown = str(value)[:40]
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where}: {column} is {shown}; a runs table holds finite numbers only")
    if column in WHOLE and value != int(value):
        raise RecordError(f"{where}: {column} is {shown}; a whole number")
    least = 1 if (column in WHOLE and column not in ZERO_IS_FINE) or column == "gpu_mem_gib" else 0
    if not least <= value <= LARGEST:
        raise RecordError(f"{where}: {column} is {shown}; at least {least} and at most {LARGEST:.0e}")
