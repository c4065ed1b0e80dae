"""The text column of Parquet files, read in small batches. Needs the `data` extra (pyarrow)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fivefold.errors import DataError
from fivefold.units import MIB

BATCH_BYTES = MIB
MOST_ROWS = 4096


def parquet_groups(path: Path, column: str) -> tuple[int, ...]:
    """Uncompressed bytes of the column in each row group.

    Raises: DataError where the file is no whole Parquet file, or has no such column (with those it has).
    """
    with _open(path) as file:
        index = _text_column(path, file, column)
        groups = range(file.metadata.num_row_groups)
        return tuple(int(file.metadata.row_group(g).column(index).total_uncompressed_size) for g in groups)


def parquet_rows(path: Path, column: str, start: int, stop: int) -> Iterator[tuple[int, str | None]]:
    """(number of the row in the file, its text) of row groups start..stop-1; None where the row has no text.

    Raises: DataError where the file is damaged.
    """
    import pyarrow as pa

    with _open(path) as file:
        index = _text_column(path, file, column)
        row = sum(file.metadata.row_group(g).num_rows for g in range(start))
        for group in range(start, stop):
            facts = file.metadata.row_group(group)
            each = facts.column(index).total_uncompressed_size / max(1, facts.num_rows)
            rows = int(min(MOST_ROWS, max(1, BATCH_BYTES // max(1, each))))
            batches = file.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False)
            try:
                for batch in batches:
                    for text in batch.column(0).to_pylist():
                        yield row, text
                        row += 1
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path} is damaged at row {row}: {_first_line(error)}") from None


def _open(path: Path) -> Any:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow; install it with: pip install 'fivefold[data]'"
        ) from None
    try:
        return parquet.ParquetFile(path, memory_map=False, buffer_size=BATCH_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is no whole Parquet file: {_first_line(error)}") from None


def _text_column(path: Path, file: Any, column: str) -> int:
    """Number of the leaf column that holds the text."""
    import pyarrow as pa

    schema = file.schema_arrow
    if schema.names.count(column) != 1:
        known = ", ".join(schema.names[:30])
        raise DataError(f"{path} has no column {column!r}; its columns: {known} (choose with --text-column)")
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or str(value) == "string_view"):
        texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        known = ", ".join(texts[:30]) or "none"
        raise DataError(f"{path}: column {column!r} holds {kind}, not text; columns of text: {known}")
    paths = [file.schema.column(n).path for n in range(len(file.schema))]
    return paths.index(column)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
