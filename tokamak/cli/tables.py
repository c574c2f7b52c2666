"""How does a command show what it knows? Tables of names and values, and of rows, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def show_values(console: Console, title: str, values: Mapping[str, Any]) -> None:
    """A name and a value a line; lists are joined with commas."""
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None
    )
    for name, value in values.items():
        text = ", ".join(str(part) for part in value) if isinstance(value, list) else str(value)
        table.add_row(name, text)
    console.print(table)
    console.print()


def show_rows(
    console: Console, title: str, rows: Sequence[Mapping[str, Any]], columns: tuple[str, ...]
) -> None:
    """These columns of some rows."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)
    console.print()
