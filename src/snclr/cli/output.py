"""Print results: tables and sizes."""

import sys
from collections.abc import Iterable, Sequence


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Print aligned columns: the first `left` columns to the left, the others (numbers) to the right.

    In a terminal, cells are wrapped to its width.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=any(headers), header_style="bold")
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 10_000)  # never wrap lines in a file or pipe
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def split_columns(table: Sequence[Sequence[str]], width: int) -> list[list[tuple[str, ...]]]:
    """Divide the columns of a table into tables of at most `width`; each begins with the first column.

    >>> split_columns([("row", "kNN", "seconds"), ("snclr", "70.1", "12")], 16)
    [[('row', 'kNN'), ('snclr', '70.1')], [('row', 'seconds'), ('snclr', '12')]]
    """
    first, *others = zip(*table, strict=True)
    parts = [[first]]
    for column in others:
        used = sum(2 + max(map(len, each)) for each in parts[-1])
        if used + max(map(len, column)) > width and len(parts[-1]) > 1:
            parts.append([first])
        parts[-1].append(column)
    return [list(zip(*columns, strict=True)) for columns in parts]


def size(megabytes: float) -> str:
    """Format megabytes with the unit that fits.

    >>> size(0.0431), size(12.345), size(999.7), size(4096)
    ('43.1 kB', '12.3 MB', '1.0 GB', '4.1 GB')
    """
    if megabytes < 0.1:
        return f"{megabytes * 1000:.3g} kB"
    return f"{megabytes / 1000:.1f} GB" if megabytes >= 999.5 else f"{megabytes:.3g} MB"
