"""A picture of what a command prints, as one SVG without fonts or scripts of its own.

    actds check demo/acts |
      python -m actds_testing.terminal_picture 'actds check demo/acts' > docs/answer.svg

Long lines are folded; lines after the first ``More:`` or ``report:`` are left out.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from html import escape

__all__ = ["picture"]

_COLUMNS, _LINE, _CHARACTER = 100, 19, 7.85
_MARKS = {"✓": "good", "!": "warn", "✗": "bad"}
_STYLE = """
    .page { fill: #f6f8fa; stroke: #d0d7de }
    text { fill: #1f2328; white-space: pre;
      font: 13px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace }
    .good { fill: #1a7f37 } .warn { fill: #9a6700 } .bad { fill: #cf222e }
    .command { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      .page { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 }
      .good { fill: #3fb950 } .warn { fill: #d29922 } .bad { fill: #f85149 }
    }
"""


def picture(command: str, printed: Iterable[str]) -> str:
    """Return the SVG of a command and the lines that it printed."""
    lines = [("command", f"$ {command}")]
    for line in printed:
        if line.startswith(("More:", "report:")):
            break
        mark = _MARKS.get(line.strip()[:1], "")
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        folded = textwrap.wrap(line, _COLUMNS, subsequent_indent=indent) or [""]
        lines += [(mark if n == 0 else "", part) for n, part in enumerate(folded)]
    width, height = round(_COLUMNS * _CHARACTER) + 32, len(lines) * _LINE + 30
    rows = [
        f'  <text x="16" y="{26 + n * _LINE}" xml:space="preserve">{_words(name, text)}</text>'
        for n, (name, text) in enumerate(lines)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    page = (
        f'  <rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>'
    )
    title = f"  <title>{escape(command)}: {escape(lines[1][1])}</title>"
    return "\n".join([head, title, f"  <style>{_STYLE}  </style>", page, *rows, "</svg>", ""])


def _words(name: str, text: str) -> str:
    if not name or name == "command":
        return f'<tspan class="{name}">{escape(text)}</tspan>' if name else escape(text)
    at = len(text) - len(text.lstrip())
    return f'{text[:at]}<tspan class="{name}">{text[at]}</tspan>{escape(text[at + 1 :])}'


if __name__ == "__main__":
    sys.stdout.write(picture(sys.argv[1], sys.stdin.read().splitlines()))
