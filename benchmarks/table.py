"""The table of a run in Markdown: the host's seconds, and how many times that each column takes."""

from __future__ import annotations

import statistics
import subprocess

from benchmarks.columns import Column, Columns
from benchmarks.turns import Cell


class Table:
    """Cells as they come; medians, ratios, and below the table why a cell has none."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns.found
        self._rows: dict[str, dict[str, list[Cell]]] = {}
        self._notes: list[str] = [f"{name} is not there: {why}" for name, why in columns.failed.items()]

    def add(self, column: Column, row: str, cell: Cell) -> None:
        """One measurement; without a row it is a note."""
        if row:
            self._rows.setdefault(row, {}).setdefault(column.name, []).append(cell)
        else:
            self.note(f"{column.name}, {cell}")

    def note(self, text: str) -> None:
        """A line below the table, once."""
        if text not in self._notes:
            self._notes.append(text)

    def markdown(self) -> str:
        """The table and its notes."""
        host, *others = self._columns
        kind = subprocess.run(["df", "--output=fstype", host.path], capture_output=True, text=True, check=True)
        heads = ["row", f"host ({kind.stdout.split()[-1]}), s", *(column.name for column in others)]
        lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for row, cells in self._rows.items():
            base = self._seconds(row, host.name, cells)
            line = f"| {row} | {base:.4f} " if base is not None else f"| {row} | failed "
            for column in others:
                if column.name not in cells:
                    line += "| - "
                    continue
                seconds = self._seconds(row, column.name, cells)
                line += (
                    "| failed " if seconds is None else f"| {seconds / base:.1f} " if base else f"| {seconds:.4f} s "
                )
            lines.append(line + "|")
        notes = "".join(f"- {note}\n" for note in self._notes)
        return "\n".join(lines) + "\n" + (f"\n{notes}" if notes else "")

    def _seconds(self, row: str, column: str, cells: dict[str, list[Cell]]) -> float | None:
        """The median; None, with a note, when one round failed."""
        taken = cells.get(column, [])
        if why := next((cell for cell in taken if isinstance(cell, str)), None):
            self.note(f"{column}, {row}: {why}")
            return None
        return statistics.median(cell for cell in taken if isinstance(cell, float)) if taken else None
