"""Pages from templates: one self-contained HTML file without script, under a strict policy.

Every text of a result is anybody's: it is cut, freed of control characters and escaped in one
place, here.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

from actds_validators.report.words import Sentence, clean

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(template: str, *, styles: tuple[str, ...] = ("page.css",), **values: Any) -> str:
    """Return a page: HTML in UTF-8, whose policy lets nothing in but its own style sheet.

    Args:
        template: of the folder ``templates``; it writes ``policy`` and ``style`` into its head.
        styles: style sheets of that folder, joined in this order.
        values: of the template.

    Raises:
        ImportError: Jinja2 is not installed (the extra ``audit``).
    """
    environment = _environment()
    loader = environment.loader
    assert loader is not None
    style = "".join(loader.get_source(environment, name)[0] for name in styles)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return environment.get_template(template).render(
        style=_exact(style), policy=Sentence(policy), **values
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("actds_validators.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.globals["long"] = Sentence
    return environment


def _finalize(value: Any) -> Any:
    """Return what the template writes: text that can do no harm, numbers to a tenth of a pixel."""
    if hasattr(value, "__html__"):  # markup of the template itself
        return value
    if isinstance(value, float):
        return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")
    return clean(value) if isinstance(value, str) else value


def _exact(style: str) -> Any:
    """Return the style sheet as markup: its digest is of these bytes, unescaped."""
    from markupsafe import Markup

    return Markup(style)
