"""A page to look at a dataset: hooks, norms by position, coverage, losses, the text of requests."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from actds.dataset.fates import NEVER, WATERFALL
from actds.dataset.info import sample_of_run
from actds.errors import ActdsError, not_installed
from actds.explore.dataset import Dataset, open_apart
from actds.explore.requests import Tokenizer
from actds.explore.show import Fates, NormProfile, fates, norm_profile
from actds.explore.stats import Stats
from actds.format.labels import label_words
from actds.format.tables import DISPOSITIONS
from actds.loader.filters import SINK_NORM
from actds.store.folders import replaced
from actds.text import counted, format_nbytes, storable
from actds.version import __version__
from actds_studies.view.requests import (
    NORM,
    Score,
    ShownRequest,
    read_probe,
    read_requests,
    read_sae,
    read_tokenizer,
    sample,
)
from actds_validators.audit.result import CoverageCell, WaterfallStep
from actds_validators.pages.accounting import map_of, waterfall_of
from actds_validators.pages.answer import Part, dataset_facts, render_page
from actds_validators.pages.svg import WIDTH, FigureData, Frame, Picture, axes, legend, span, ticks
from actds_validators.pages.words import Sentence, number, percent, short, table_of
from actds_validators.sections import about

N_HOOKS = 8
"""Hooks whose norms are drawn."""
_N_SHADES = 7
_CUT = 0.02  # share of the scores beyond each end of the shades
_FATE_WORDS = {
    "captured": "captured",
    "cache_ref": "prefix-cache hit",
    "dropped": "dropped",
    "aborted": "aborted",
    "filtered": "filtered",
    "undelivered": "undelivered",
    "thinned": "not drawn",
}
_CLASSES = ("prompt", "generated")
_LETTERS = "abcd"  # of what tokens are coloured by


def _render(
    dataset: Dataset,
    hook: str,
    scores: Sequence[Score],
    requests: Sequence[ShownRequest],
    has_text: bool,
    has_stats: bool,
    command: str,
) -> str:
    ends = [_ends(requests, k) for k in range(len(scores))]
    names = list(dataset.hooks)[:N_HOOKS]
    profiles = [norm_profile(dataset.catalog, dataset.array(name)) for name in names]
    stats = {n: dataset.stats(n) for n in dataset.hooks if has_stats and dataset.shards_of(n)}
    outcomes = fates(dataset.catalog)
    return render_page(
        "view.html.j2",
        styles=("page.css", "view.css"),
        max_nbytes=None,
        path=Sentence(dataset.path),
        facts=list(_facts(dataset, command)),
        sections=[_hooks_part(dataset, stats), _norms_part(profiles), _fates_part(outcomes)],
        lead=_lead(dataset, hook, len(requests), has_text=has_text),
        colours=[
            {
                "letter": letter,
                "name": score.name,
                "words": score.words,
                "low": short(low),
                "high": short(high),
            }
            for letter, score, (low, high) in zip(_LETTERS, scores, ends, strict=False)
        ],
        texts=[_text(request, scores, ends) for request in requests],
        actds=__version__,
    )


def _facts(dataset: Dataset, command: str) -> Iterator[tuple[str, str]]:
    seal = dataset.seal
    runs, shards = counted(len(dataset.runs), "run"), counted(len(dataset.shards), "shard")
    known = about(dataset.catalog, command)
    yield from dataset_facts(known, f"{dataset.n_rows:,} in {shards} of {runs}")
    yield "Seal", "not sealed" if seal is None else f"{seal.n}, digest {dataset.digest}"
    yield "Command", command


def _hooks_part(dataset: Dataset, stats: dict[str, Stats]) -> Part:
    def median(name: str) -> str:
        if name not in stats:
            return "-"
        return f"{number(stats[name].mean_norm)} ({number(stats[name].norms[0.5])})"

    rows = {name: len(dataset.array(name)) for name in dataset.hooks}
    tables = table_of(
        "Hooks",
        (
            ("hook", lambda h: h.name),
            ("kind", lambda h: h.kind),
            ("layer", lambda h: str(h.layer)),
            ("rows", lambda h: f"{rows[h.name]:,}"),
            ("channels", lambda h: f"{h.d_model:,}"),
            ("type", lambda h: h.dtype),
            *((("mean norm (median)", lambda h: median(h.name)),) if stats else ()),
        ),
        list(dataset.hooks.values()),
        frozenset({0, 1, 5}),
    )
    by_phase = ", ".join(
        f"{sum(s.n_rows for s in dataset.shards if s.phase == phase):,} {phase}"
        for phase in dataset.phases
    )
    stored = sum(entry.nbytes for shard in dataset.shards for entry in shard.manifest.files)
    lead = f"Rows by phase: {by_phase or 'none'}. Stored: {format_nbytes(stored)}."
    if not stats:
        lead += " Moments of all rows: actds view --stats."
    for run in dataset.runs:
        if (sample := sample_of_run(dataset.catalog, run)) is not None:
            lead += (
                f" Run {run} is a sample: {sample}, if each has the weight 1 / inclusion, as in "
            )
            lead += "moments; norms by position that are read from rows count them alike."
    return Part("hooks", "Hooks", lead, tables)


def _norms_part(profiles: Sequence[NormProfile]) -> Part:
    words = {"readouts": "readouts, which lost rows have too", "rows": "a sample of the rows"}
    sources = " and ".join(sorted({f"{p.n_rows:,} {words[p.source]}" for p in profiles}))
    lead = f"From {sources or 'nothing'}. The band is 10 to 90 %, the line the median."
    pictures = [p for n in profiles if (p := _norms(n)) is not None]
    return Part("norms", "Norms by position", lead, pictures=pictures)


def _norms(profile: NormProfile) -> Picture | None:
    usable = np.isfinite(profile.quantiles).all(axis=0) & (profile.quantiles > 0).all(axis=0)
    if not usable.any():
        return None
    norms, low = profile.quantiles[:, usable], profile.low[usable]
    logs = np.log10(norms)
    n = len(low)
    p = Picture(
        f"norms-{profile.hook}",
        f"Norms of {profile.hook} by position",
        f"Median and 10 to 90 % of {profile.n_rows:,} {profile.source}, by band of positions; the "
        "axis of norms is logarithmic.",
        WIDTH,
        270,
        FigureData(("first position", "last position", "10 %", "50 %", "90 %", "rows")),
    )
    f = Frame(70, 30, 770, 180, (-0.5, n - 0.5), span([*logs.ravel()], zero=False))
    low_norm, high_norm = (10**end for end in f.y_range)
    if high_norm > 10 * low_norm:
        marks = [(float(v), short(10**v)) for v in ticks(*f.y_range, 4)]
    else:
        marks = [(math.log10(v), short(v)) for v in ticks(low_norm, high_norm, 4)]
    every = max(1, math.ceil(n / 12))
    axes(
        p,
        f,
        "first position of the band",
        "norm",
        y_marks=marks,
        x_marks=[(k, short(float(low[k]))) for k in range(0, n, every)],
    )
    legend(p, 70, 16, [("band", "10 to 90 %"), ("stored", "median")])
    upper = [(f.x(k), f.y(logs[2, k])) for k in range(n)]
    lower = [(f.x(k), f.y(logs[0, k])) for k in range(n)]
    p.polygon([*upper, *reversed(lower)], "band")
    p.path([(f.x(k), f.y(logs[1, k])) for k in range(n)], "curve")
    bands = zip(low.tolist(), profile.high[usable].tolist(), profile.count[usable], strict=True)
    for k, (start, stop, count) in enumerate(bands):
        three = norms[:, k].tolist()
        p.data.rows.append((start, stop - 1, *three, count))
        words = ", ".join(map(short, three))
        where = f"position {start:,}" + (f" to {stop - 1:,}" if stop - start > 1 else "")
        p.dot(f.x(k), f.y(logs[1, k]), "mark stored-mark", f"{where}: {words} ({count:,} rows)", 3)
    return p


def _fates_part(outcomes: Fates) -> Part:
    total = max(outcomes.total, 1)
    by = dict(zip(DISPOSITIONS, outcomes.count.sum(axis=(0, 2)).tolist(), strict=True))
    shares = ", ".join(
        f"{n:,} {_FATE_WORDS[name]} ({percent(n / total)})"
        for name, n in by.items()
        if n or name not in ("undelivered", "thinned")
    )
    reasons = sorted(outcomes.reasons.items(), key=lambda item: -item[1])
    without = ("dropped", "aborted", NEVER, "filtered", "undelivered", "thinned")
    losses = [(key, n) for key, n in reasons if key[0] in without]
    tables = table_of(
        "Positions without a row",
        (
            ("what became of them", lambda loss: loss[0][0]),
            ("reason", lambda loss: loss[0][1] or "none given"),
            ("positions", lambda loss: f"{loss[1]:,}"),
            ("of all", lambda loss: percent(loss[1] / total)),
        ),
        losses,
        frozenset({0, 1}),
    )
    lead = f"{outcomes.total:,} positions: {shares}."
    pictures = _fates_pictures(outcomes)
    return Part("coverage", "Coverage and losses", lead, tables, pictures=pictures)


def _fates_pictures(outcomes: Fates) -> list[Picture]:
    total = outcomes.total
    steps = [WaterfallStep(name="positions", n_positions=total, share=1.0 if total else 0.0)]
    steps += [
        WaterfallStep(name=name, reason=reason, n_positions=n, share=n / total)
        for name in WATERFALL
        for (kind, reason), n in sorted(outcomes.reasons.items(), key=lambda item: str(item[0]))
        if kind == name and n
    ]
    cells = []
    bands = list(zip(outcomes.low.tolist(), outcomes.high.tolist(), strict=True))
    for phase, band in np.ndindex(len(_CLASSES), len(bands)):
        stored, reused, dropped, aborted, filtered, *_ = outcomes.count[phase, :, band].tolist()
        external = int(outcomes.external[phase, band])
        reused, lost, (low, high) = reused - external, dropped + aborted, bands[band]
        seen = stored + reused + lost
        if seen or filtered or external:
            cells.append(
                CoverageCell(
                    token_class=_CLASSES[phase], low=low, high=high, stored=stored, reused=reused,
                    lost=lost, filtered=filtered, external=external,
                    stored_share=stored / seen if seen else None,
                )
            )  # fmt: skip
    pictures = (waterfall_of(steps) if total else None, map_of(cells))
    return [p for p in pictures if p is not None]


def _lead(dataset: Dataset, hook: str, n_shown: int, *, has_text: bool) -> str:
    tables = dataset.catalog.parts.items()
    n = sum(p.n_rows for (_, table), parts in tables if table == "requests" for p in parts)
    lead = (
        f"{counted(n_shown, 'request')} of {n:,}, with the rows of {hook}; positions that "
        "the prefix cache served show the row of the request that computed them. Point at a token "
        "for all that is known of it. Other requests: actds view --request N."
    )
    return lead if has_text else f"{lead} Text instead of numbers: --tokenizer FOLDER."


def _ends(requests: Sequence[ShownRequest], k: int) -> tuple[float, float]:
    """Return the scores at both ends of the shades; those of sinks lie beyond."""
    if not requests:
        return 0.0, 0.0
    values = np.concatenate([request.scores for request in requests], axis=1)
    norms, values = values[0], values[k]
    finite = np.isfinite(norms) & np.isfinite(values)
    if not finite.any():
        return 0.0, 0.0
    usual = finite & (norms <= SINK_NORM * np.median(norms[finite]))
    low, high = np.quantile(values[usual], (_CUT, 1 - _CUT)).tolist()
    # A feature that hardly ever fires: its few values are what is looked for.
    return (low, high) if high > low else (low, float(values[usual].max()))


def _text(
    shown: ShownRequest, scores: Sequence[Score], ends: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    rows, n = shown.rows, len(shown.rows)
    owed = rows.disposition
    counts = ", ".join(
        f"{count:,} {words}"
        for kind, words in _FATE_WORDS.items()
        if (count := int((owed == kind).sum()))
    )
    facts = f"{n:,} positions: {counts or 'none'}; prompt of {shown.prompt_len:,} tokens."
    if shown.source is not None:
        facts += f" Source: {shown.source}."
    if rows.labels:
        facts += f" Labels: {', '.join(label_words(rows.labels))}."
    if len(shown) < n:
        stop = shown.start + len(shown)
        facts += f" Shown: positions {shown.start:,} to {stop - 1:,}." if len(shown) else " None."
    return {
        "title": f"Request {rows.request} of {rows.run}: {shown.external_id} ({shown.finish})",
        "facts": facts,
        "pieces": [_piece(shown, k, scores, ends) for k in range(len(shown))],
    }


def _piece(
    shown: ShownRequest, k: int, scores: Sequence[Score], ends: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Return a token on the page: its text, its classes, and everything that is known of it."""
    rows, position = shown.rows, shown.start + k
    fate, owner, row = str(rows.disposition[position]), rows.owner[position], rows.row[position]
    generated = position >= shown.prompt_len
    kinds = ["t", f"is-{fate}", "gen" if generated else "", "special" if shown.special[k] else ""]
    known = [
        f"position {position:,}",
        f"token {rows.token_id[position]}" if rows.token_id[position] >= 0 else "token not known",
        str(rows.role[position]) or _CLASSES[generated],
        _FATE_WORDS[fate] + (f" of request {owner}" if fate == "cache_ref" and owner >= 0 else ""),
        *(["special"] if shown.special[k] else []),
        f"row {row:,}" if row >= 0 else "no row",
    ]
    values = shown.scores[:, k].tolist()
    for letter, score, value, (low, high) in zip(_LETTERS, scores, values, ends, strict=False):
        if row >= 0:
            known.append(f"{score.name} {short(value, 4) if math.isfinite(value) else value}")
        if math.isfinite(value):
            share = (value - low) / (high - low) if high > low else 0.0
            kinds.append(f"{letter}{max(0, min(_N_SHADES - 1, int(share * _N_SHADES)))}")
    text = shown.pieces[k]
    return {
        "text": text.replace("\n", "↵") or "∅",
        "kinds": " ".join(filter(None, kinds)),
        "title": ", ".join(known),
        "breaks": "\n" in text,
    }


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
    if probe is not None and sae is not None:
        raise ActdsError("E009", "probe", got="sae as well", expected="one of the two")
    if start < 0 or n_tokens < 1:
        raise ActdsError("E009", "start", got=f"{start}, {n_tokens} tokens", expected="from 0, 1")
    if not isinstance(source, Dataset):
        source = open_apart(source, imported=i_accept_unprovenanced)
    dataset = source
    chosen = hook or next(iter(dataset.hooks))
    d_model = dataset.array(chosen).shape[1]
    scores = [NORM]
    if probe is not None:
        scores += read_probe(probe, d_model, features)
    elif sae is not None:
        names = {request["name"] for request in dataset.models}
        model = model or (names.pop() if len(names) == 1 else None)
        scores += read_sae(sae, d_model, features, chosen, model)
    elif features:
        raise ActdsError("E009", "features", got="no file", expected="sae=FILE or probe=FILE")
    words = read_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    wanted = [(None, request) if isinstance(request, int) else request for request in requests]
    shown = read_requests(
        dataset, chosen, wanted or sample(dataset), scores, words, start, n_tokens
    )
    command = _command(
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
    )
    return View(_render(dataset, chosen, scores, list(shown), words is not None, stats, command))


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
