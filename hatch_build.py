"""What a package index shows: README.md with links that work there, and the project's addresses.

The repository's address stands once, in ``pyproject.toml``. While it is empty, links into the
repository become plain words and pictures are left out: a broken link is worse than none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\((?!\w+:|#)([^)\s]+)\)")


class IndexPage(MetadataHookInterface):
    """Hatchling's hook for the dynamic fields ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both fields of the project's metadata."""
        repository = self.config["repository"].rstrip("/")
        text = Path(self.root, "README.md").read_text("utf-8")
        page = index_page(text, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
        if repository:
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{repository}/blob/HEAD/docs/README.md",
                "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }


def index_page(text: str, repository: str) -> str:
    """Return Markdown whose links into the repository are absolute, or words without a link."""

    def absolute(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if repository:
            return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/HEAD/{target})"
        return "" if picture else words

    return _LINK.sub(absolute, text)
