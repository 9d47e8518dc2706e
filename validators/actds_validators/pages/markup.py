"""Pages from templates: one self-contained HTML file without script, under a strict policy.

Every text of a result is anybody's: it is cut, freed of control characters and escaped in one
place, here.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from actds_validators.pages.words import Sentence, clean

if TYPE_CHECKING:
    from jinja2 import Environment


MAX_NBYTES = 1_000_000
_CSV_LINK = re.compile('<a download="[^"]*" href="data:[^"]*"[^>]*>CSV</a>')


def render_page(
    template: str,
    *,
    styles: tuple[str, ...] = ("page.css",),
    max_nbytes: int | None = MAX_NBYTES,
    **values: Any,
) -> str:
    """Return a page: HTML in UTF-8, whose policy lets nothing in but its own style sheet.

    Figures have their numbers as CSV behind a link. Where the page would be too large for them,
    the longest are left out, which the page says.

    Args:
        template: of the folder ``templates``; it writes ``policy`` and ``style`` into its head.
        styles: style sheets of that folder, joined in this order.
        max_nbytes: size up to which the page has the numbers of its figures; None for any.

    Raises:
        ImportError: Jinja2 is not installed (the extra ``audit``).
    """
    environment = _environment()
    loader = environment.loader
    assert loader is not None
    style = "".join(loader.get_source(environment, name)[0] for name in styles)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    page = environment.get_template(template).render(
        style=_exact(style), policy=Sentence(policy), **values
    )
    for link in sorted(_CSV_LINK.findall(page), key=len, reverse=True):
        if max_nbytes is None or len(page.encode()) < max_nbytes:
            break
        page = page.replace(link, "(CSV: too long for this page; --json has the numbers)")
    return page


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("actds_validators.pages", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.globals["long"] = Sentence
    environment.globals["csv_url"] = lambda data: _exact(data.url())
    return environment


def _finalize(value: Any) -> Any:
    """Return what the template writes: text that can do no harm, numbers to a tenth of a pixel."""
    if hasattr(value, "__html__"):  # markup of the template itself
        return value
    if isinstance(value, float):
        return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")
    return clean(value) if isinstance(value, str) else value


def _exact(text: str) -> Any:
    """Return text as markup: a style sheet, whose digest is of these bytes, or a ``data:`` URL."""
    from markupsafe import Markup

    return Markup(text)
