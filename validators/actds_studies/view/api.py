"""A page to look at a dataset from Python: `view`, which the command calls as well."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from actds.errors import ActdsError, not_installed
from actds.text import storable

if TYPE_CHECKING:
    from actds.explore.context import Tokenizer
    from actds.explore.dataset import Dataset

_FRAME_PX = 700
N_TOKENS = 2000
"""Positions of a request that are shown at most, unless another number is given."""


@dataclass(frozen=True)
class View:
    """A page to look at a dataset.

    Args:
        html: the page, self-contained, without script.
    """

    html: str

    def save(self, path: str | Path) -> None:
        """Write the page.

        Raises:
            ActdsError: E503 it cannot be written.
        """
        from actds_validators.audit.outputs import replaced

        with replaced(Path(path)) as new:
            new.write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        # A frame of its own: styles of the notebook stay out of the page, and the page's in it.
        return (
            f'<iframe sandbox="allow-downloads" srcdoc="{escape(self.html)}" '
            f'width="100%" height="{_FRAME_PX}"></iframe>'
        )


def view(
    source: str | Path | Dataset,
    *,
    hook: str | None = None,
    requests: Sequence[int | tuple[str, int]] = (),
    start: int = 0,
    n_tokens: int = N_TOKENS,
    tokenizer: str | Path | Tokenizer | None = None,
    probe: str | Path | None = None,
    sae: str | Path | None = None,
    features: Sequence[int] = (),
    model: str | None = None,
    stats: bool = False,
    i_accept_unprovenanced: bool = False,
) -> View:
    """Return a page: hooks, norms by position, coverage, losses, and the text of requests.

    Args:
        source: path or URI of a dataset, or an open one.
        hook: whose rows tokens are coloured by; None takes the first.
        requests: requests to show, by number, or by run and number where there are several runs;
            evenly spaced ones, and those that lost the most, by default.
        start: first position of each request to show.
        n_tokens: positions of each to show at most; a page holds 12,000.
        tokenizer: what decodes tokens, or a model folder with ``tokenizer.json``.
        probe: ``.npy`` file of directions, ``(d_model,)`` or ``(n_probes, d_model)``.
        sae: a dictionary, as ``actds regimes --sae`` takes it: folder of SAELens, ``params.npz`` of
            Gemma Scope, ``ae.pt`` of dictionary_learning; or a ``.safetensors`` or ``.npz`` file of
            an encoder alone.
        features: which features of ``sae``, or probes of ``probe``; at most 3.
        model: what dictionaries call the rows' model; the name in its runs, if it is one.
        stats: read every row once for the mean norm of each hook; kept under the digest.
        i_accept_unprovenanced: show a sealed dataset whose provenance is missing: an imported one.

    Raises:
        ActdsError: E009 an argument that cannot be used; E011 a package that is not installed;
            E014 no such hook, run or request; E015 a probe or dictionary that does not fit; and as
            ``actds.open``.
    """
    if find_spec("jinja2") is None:
        raise not_installed("jinja2", "audit", "actds view")
    from actds.explore.dataset import Dataset, open_apart
    from actds.explore.show import fates, norm_profile
    from actds_studies.view import page
    from actds_studies.view.requests import read_requests, read_tokenizer, sample
    from actds_studies.view.scores import NORM, read_probe, read_sae

    if probe is not None and sae is not None:
        raise ActdsError("E009", "probe", got="sae as well", expected="one of the two")
    if start < 0 or n_tokens < 1:
        raise ActdsError("E009", "start", got=f"{start}, {n_tokens} tokens", expected="from 0, 1")
    dataset = (
        source
        if isinstance(source, Dataset)
        else open_apart(source, imported=i_accept_unprovenanced)
    )
    chosen = hook or next(iter(dataset.hooks))
    d_model = dataset.array(chosen).shape[1]
    scores = [NORM]
    if probe is not None:
        scores += read_probe(probe, d_model, features)
    elif sae is not None:
        names = {one["name"] for one in dataset.models}
        own = next(iter(names)) if len(names) == 1 else None
        scores += read_sae(sae, d_model, features, chosen, model or own)
    elif features:
        raise ActdsError("E009", "features", got="no file", expected="sae=FILE or probe=FILE")
    words = read_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    wanted = [(None, one) if isinstance(one, int) else one for one in requests]
    shown = list(
        read_requests(
            dataset, chosen, wanted or sample(dataset), scores, words, start, n_tokens
        )
    )  # fmt: skip
    return View(
        page.render(
            dataset,
            chosen,
            [
                norm_profile(dataset.catalog, dataset.array(name))
                for name in list(dataset.hooks)[: page.N_HOOKS]
            ],
            {name: dataset.stats(name) for name in dataset.hooks} if stats else {},
            fates(dataset.catalog),
            scores,
            shown,
            has_text=words is not None,
            command=_command(
                dataset.path,
                hook=[hook],
                request=[number if run is None else f"{run}:{number}" for run, number in wanted],
                start=[start or None],
                tokens=[None if n_tokens == N_TOKENS else n_tokens],
                tokenizer=[tokenizer if isinstance(tokenizer, str | Path) else None],
                probe=[probe],
                sae=[sae],
                feature=features,
                stats=[stats or None],
            ),
        )
    )


def _command(path: str, **options: Sequence[object]) -> str:
    """Return the command that makes this page; an option once for each value that is not None."""
    given = [(f"--{name}", value) for name, some in options.items() for value in some]
    words = [
        word
        for name, value in given
        if value is not None
        for word in ([name] if value is True else [name, str(value)])
    ]
    return storable(shlex.join(["actds", "view", path, *words]))
