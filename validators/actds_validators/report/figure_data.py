"""The numbers behind a figure as CSV, which a page offers as a link below the figure."""

from __future__ import annotations

import base64
import csv
import io
import re
from dataclasses import dataclass, field
from urllib.parse import quote

from actds_validators.report.words import clean

Cell = str | int | float | None
# What a spreadsheet takes for a formula where a cell begins, also with the separators of other
# locales and in full width: owasp.org/www-community/attacks/CSV_Injection.
_FORMULA = re.compile(r"""(^|[,;"])(\s*)(?=[=+\-@＝＋－＠])""")
_SAFE = ",:;/()[]"  # of the characters of a URL that need no escape here


@dataclass
class FigureData:
    """What a figure draws.

    Args:
        header: names of the columns, with their units.
        rows: a cell per column; numbers at full precision, None for none.
    """

    header: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)

    def csv(self) -> str:
        """Return the rows below their header: RFC 4180, numbers as Python writes them.

        A text that a spreadsheet could take for a formula has an apostrophe before the sign.
        """
        text = io.StringIO()
        writer = csv.writer(text)  # quotes where it must, ends lines with CR LF
        writer.writerow(map(_cell, self.header))
        writer.writerows([_cell(cell) for cell in row] for row in self.rows)
        return text.getvalue()

    def url(self) -> str:
        """Return the CSV as a ``data:`` URL of ASCII without quotes or markup."""
        text = self.csv()
        plain = quote(text, safe=_SAFE)
        encoded = ";base64," + base64.b64encode(text.encode()).decode()
        return "data:text/csv;charset=utf-8" + min(f",{plain}", encoded, key=len)


def _cell(cell: Cell) -> Cell:
    return _FORMULA.sub(r"\1\2'", clean(cell)) if isinstance(cell, str) else cell
