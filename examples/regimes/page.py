"""The page: from the results of ``actds regimes`` to figures.json, and from that to README.md."""

from __future__ import annotations

from typing import Any

FVU = "FVU over the reference's variance"
OWN = "FVU over the arm's own variance"
L0 = "active features of a row"
ABOUT = {
    "R-H": "author, both read in prefill",
    "G-R": "computation, equal tokens",
    "G-H": "both",
    "D-H": "computation, equal tokens",
}
RUNGS = {
    "G-R": "decode instead of prefill",
    "D-H": "documents at one token a step",
    "restart": "the same again, in a new process",
    "neighbours": "the same requests in another order",
    "chunk": "at most 64 tokens a step instead of 512",
    "alone": "one request at a time, no prefix cache",
    "one_a_step": "one token of a request a step, as in decode",
    "bfloat16": "bfloat16 instead of float32",
}
SPEARMAN = "order of features by rate, Spearman"
DISTANCE, DRIFT = "relative L2", "drift over the dictionary's error"
SWITCHED, EQUAL = "features that switch", "equal to the bit"
ALONG = ("decode step", "position")
OF_LADDER = (EQUAL, DISTANCE, DRIFT, SWITCHED)
OF_ARMS = (FVU, OWN, L0, SPEARMAN, "mean", "variance", *OF_LADDER)
KEPT = ("axis", "stratum", "measure", "value", "low", "high", "floor", "limit", "outcome", "arms",
        "element", "n_elements", "n_requests", "unit")  # fmt: skip
Figures = dict[str, Any]


def summary(setting: Figures, fits: list[Figures], found: dict[str, Figures]) -> Figures:
    """Return what the page needs of the results, in six digits.

    Args:
        setting: how the arms were made.
        fits: how each dictionary was fitted.
        found: results (``actds.regimes/1``) of the arms, of both ladders and of the two types.
    """
    ladder = [
        {"dtype": name, **_contrast(one, OF_LADDER)}
        for name, result in found.items() if name != "arms"
        for one in result["contrasts"]
    ]  # fmt: skip
    return {
        "setting": setting,
        "dictionaries": [_short(fit) for fit in fits],
        "n_tests": found["arms"]["n_tests"],
        "arms": [_contrast(one, OF_ARMS) for one in found["arms"]["contrasts"]],
        "ladder": ladder,
    }


def _contrast(one: Figures, measures: tuple[str, ...]) -> Figures:
    """Return a contrast with some values over all rows, and its FVU by step and position."""
    values = [
        {name: _short(value[name]) for name in KEPT}
        for value in one["values"]
        if (value["axis"] == "all" and value["measure"] in measures)
        or (value["axis"] in ALONG and value["measure"] == FVU and FVU in measures)
    ]
    quantiles = {(q["axis"], q["measure"]): q for q in one["quantiles"]}
    told = quantiles.get(("all", DISTANCE), {})
    return {
        "name": one["name"], "hook": one["hook"], "pairing": one["pairing"],
        "about": one["about"], "n_pairs": one["n_pairs"],
        "verdicts": {v["instrument"]: v["outcome"] for v in one["verdicts"]},
        "values": values,
        "distance": {p: _short(told[p]) for p in ("p50", "p90", "p99", "p100") if told},
    }  # fmt: skip


def _short(value: Any) -> Any:
    """Return a value with its floats in six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list | tuple) else value


def page(figures: Figures) -> str:
    """Return README.md."""
    parts = [_head(figures), _method(figures), _authorship(figures), _verdicts(figures),
             _ladder(figures), _limits(figures)]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _head(figures: Figures) -> str:
    said = []
    for hook in _hooks(figures):
        whole, author, computed = (
            _value(_of(figures, name, hook), FVU) for name in ("G-H", "R-H", "G-R")
        )
        said.append(
            f"- `{hook}`: {_number(whole['arms'][0])} on the documents' own text, "
            f"{_number(whole['arms'][1])} on sampled text. The difference is "
            f"{_interval(whole)}; authorship (R-H) {_interval(author)}, computation (G-R) "
            f"{_interval(computed)}. Authorship: *{author['outcome']}*; computation: "
            f"*{computed['outcome']}*."
        )
    said += _in_bfloat16(figures)
    return "\n".join(
        [
            "# Authorship or computation?",
            "",
            "*Written by `run.py` from `figures.json`; do not edit.*",
            "",
            "A dictionary is fitted on documents and used on what a model says. Does it fit as "
            "well there? If not, is it because the model wrote the text, or because it was "
            "computed one token a step? The fraction of variance unexplained (FVU), with 95 % "
            "intervals:",
            "",
            *said,
            "",
            "These are first numbers of their kind, of one small model, one small dictionary per "
            "hook, one kind of text and one CPU. They are not general.",
        ]
    )


def _in_bfloat16(figures: Figures) -> list[str]:
    """Return what the computation does in the type that people serve in, by the ladder."""
    found = [one for one in figures["ladder"] if one["name"] == "one_a_step-bfloat16"]
    moved = ", and ".join(
        f"a row at `{one['hook']}` by {100 * _value(one, DISTANCE)['value']:.1f} % of its length, "
        f"where {100 * _value(one, SWITCHED)['value']:.1f} % of its active features switch"
        for one in found
    )
    said = f"- That is in float32. In bfloat16, one token a step instead of prefill moves {moved}."
    return [said] * bool(found)


def _method(figures: Figures) -> str:
    s, fits = figures["setting"], figures["dictionaries"]
    took = s["seconds"]
    engine = sum(n for name, n in took.items() if not name.startswith(("regimes", "dictionary")))
    rest = sum(took.values()) - engine
    (features, k, steps) = (fits[0][name] for name in ("features", "k", "steps"))
    fvu = ", ".join(f"{_number(fit['fvu_last'])} at `{fit['hook']}`" for fit in fits)
    last = s["given"] + s["sampled"] - 2
    return "\n".join(
        [
            "## The experiment",
            "",
            f"- **Model and engine**: SmolLM2-135M ({s['model']}), vLLM on the CPU; "
            + ", ".join(f"`{option}`" for option in s["engine"])
            + ". The four arms compute and store float32.",
            f"- **Documents**: {s['documents']} topics of the help of Python {s['python']} "
            f"(`pydoc_data.topics`, part of every Python). {s['given']} tokens of each are given; "
            f"the rows compared are those of positions {s['given']} to {last}.",
            f"- **H**: the next tokens are the document's own, read in prefill. **G**: up to "
            f"{s['sampled']} tokens sampled at temperature {s['temperature']:g}, one a step. "
            "**R**: the tokens of G, read again in prefill. **D**: the tokens of H, one a step.",
            f"- **Dictionaries**: TopK, {features:,} features, {k} active, {steps} batches of "
            f"{fits[0]['batch']} rows of H, about half of its requests held out; "
            f"FVU of the last batches {fvu}, in sample. They are small, and fitted on few rows, "
            "each read many times.",
            f"- **Comparison**: `actds regimes`, held-out requests of H and their continuations; "
            f"{figures['n_tests']:,} tests are one family. The requests are the unit of evidence.",
            f"- **Time**: {engine / 60:.0f} minutes of engine and {rest / 60:.0f} of fitting and "
            f"comparing, on {s['machine']}"
            + (" that did other work at the same time." if s["busy"] else "."),
            f"- **Again**: `{s['command']}`",
        ]
    )


def _authorship(figures: Figures) -> str:
    rows = []
    for one in figures["arms"]:
        value = _value(one, FVU)
        rows.append(
            f"| {one['name']} | {ABOUT[one['name']]} | `{one['hook']}` | {one['n_pairs']:,} | "
            f"{value['n_requests'][0]} | {_number(value['arms'][0])} | "
            f"{_number(value['arms'][1])} | {_interval(value)} | {_number(value['floor'])} | "
            f"{value['outcome']} |"
        )
    limit = _number(_value(figures["arms"][0], FVU)["limit"])
    lines = [
        "## How large, and which of the two?",
        "",
        "| contrast | what differs | hook | pairs | requests | FVU, reference | FVU, other | "
        "difference | floor | is |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        "The reference is the arm after the dash, and its variance the denominator. Differences up "
        f"to {limit} count as none. The *floor* is what halves of the reference differ by (95 %): "
        "a difference below it is no larger than that between documents. R-H pairs equal positions "
        "of the same document. G-R has all requests, since none of its rows was fitted on.",
    ]
    for axis, words in zip(ALONG, ("decode step", "position"), strict=True):
        lines += _along(figures, axis, words)
    lines += [
        "",
        "A stratum has few rows of each request: an interval that holds 0 does not show that "
        "nothing changes. Decode steps count from the position of the first token that the model "
        "sampled, in every arm.",
    ]
    return "\n".join(lines)


def _along(figures: Figures, axis: str, words: str) -> list[str]:
    """Return the table of the FVU's differences along an axis."""
    found = [
        (one, {v["stratum"]: _interval(v) for v in one["values"] if v["axis"] == axis})
        for one in figures["arms"] if one["name"] in ("R-H", "G-R")
    ]  # fmt: skip
    names = list(dict.fromkeys(name for _, values in found for name in values))
    lines = [
        "", f"The same difference by {words}:", "",
        f"| contrast | hook | {' | '.join(names)} |",
        f"| --- | --- |{' --- |' * len(names)}",
    ]  # fmt: skip
    for one, values in found:
        cells = " | ".join(values.get(name, "–") for name in names)
        lines.append(f"| {one['name']} | `{one['hook']}` | {cells} |")
    return lines


def _verdicts(figures: Figures) -> str:
    instruments = list(dict.fromkeys(n for one in figures["arms"] for n in one["verdicts"]))
    lines = [
        "## What carries over?",
        "",
        f"| contrast | hook | {' | '.join(instruments)} |",
        f"| --- | --- |{' --- |' * len(instruments)}",
    ]
    for one in figures["arms"]:
        said = " | ".join(one["verdicts"].get(name, "not asked") for name in instruments)
        lines.append(f"| {one['name']} | `{one['hook']}` | {said} |")
    lines += [
        "",
        "*Carries over*: every tested value is shown to lie within its limit. *Shifts*: a test "
        "finds a difference that is not shown to lie within it. *Undecided*: neither; more "
        "requests are needed. Some of the values behind the verdicts on authorship:",
        "",
        "| measure | hook | value | floor | limit | is |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in figures["arms"]:
        for value in one["values"]:
            if one["name"] != "R-H" or value["axis"] != "all" or value["measure"] == FVU:
                continue
            farthest = ", farthest channel" if value["n_elements"] > 1 else ""
            lines.append(
                f"| {value['measure']}{farthest}; {value['unit']} | `{one['hook']}` | "
                f"{_interval(value)} | {_number(value['floor'])} | {_number(value['limit'])} | "
                f"{value['outcome']} |"
            )
    lines += [
        "",
        "The order of features is to be as alike between the arms as between halves of the "
        "reference, its floor, less the limit. A TopK dictionary has the same number of active "
        "features in every row by construction, unless fewer are above 0.",
    ]
    return "\n".join(lines)


def _ladder(figures: Figures) -> str:
    n = figures["setting"]["ladder_requests"]
    lines = [
        "## How far do equal tokens move?",
        "",
        "The distance is relative L2, by row. The first lines are G-R and D-H from above; "
        f"the other rungs are {n} requests of G, replayed in prefill and "
        "compared with the replay with the settings above, in the same type.",
        "",
        "| compute | what changed | hook | pairs | equal to the bit | 50 % | 90 % | 99 % | largest "
        "| mean | drift over the dictionary's error | features that switch |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    same = [{"dtype": "float32", **one} for one in figures["arms"] if one["name"] in ("G-R", "D-H")]
    for one in (*same, *figures["ladder"]):
        quantiles = " | ".join(_small(q) for q in one["distance"].values())
        rest = " | ".join(
            _interval(_value(one, measure), _small) for measure in (DISTANCE, DRIFT, SWITCHED)
        )
        rung = RUNGS[one["name"] if one in same else one["name"].rsplit("-", 1)[0]]
        dtype = "both" if one["dtype"] == "dtype" else one["dtype"]
        lines.append(
            f"| {dtype} | {rung} | `{one['hook']}` | {one['n_pairs']:,} | "
            f"{100 * _value(one, EQUAL)['value']:.1f} % | {quantiles} | {rest} |"
        )
    lines += [
        "",
        "The reference in float32 is R itself, where more requests were in company. These are "
        "distances of one engine's kernels on one CPU; those of GPUs add in another order, and "
        "were not measured here.",
    ]
    return "\n".join(lines)


def _limits(figures: Figures) -> str:
    s = figures["setting"]
    return "\n".join(
        [
            "## What this does and does not say",
            "",
            f"- {s['documents']} documents of one kind, which the model may have read in training; "
            "about half are held out. The intervals are about such documents, not about text.",
            f"- R-H is the authorship of this model at temperature {s['temperature']:g}. Greedy "
            "text is another regime, and was not sampled. What a small model writes may drift away "
            "from documentation: *author* here includes that.",
            "- A sampled text that ends early has no rows after its end: late steps are those of "
            "texts that went on.",
            "- A dictionary fits the text that it was fitted on best: the gap of one fitted on few "
            "documents includes how far sampled text is from these. A larger or better one has "
            "another error, and may carry over otherwise.",
            "- The four arms were computed in float32. The ladder shows how far rows move in "
            "bfloat16 on this CPU, and nothing of a GPU.",
            "- Nothing here says whether a feature means the same in both arms.",
        ]
    )


def _hooks(figures: Figures) -> list[str]:
    return list(dict.fromkeys(one["hook"] for one in figures["arms"]))


def _of(figures: Figures, name: str, hook: str) -> Figures:
    return next(one for one in figures["arms"] if (one["name"], one["hook"]) == (name, hook))


def _value(one: Figures, measure: str) -> Figures:
    """Return a measure over all rows of a contrast."""
    found: Figures = next(
        v for v in one["values"] if v["axis"] == "all" and v["measure"] == measure
    )
    return found


def _interval(value: Figures, number: Any = None) -> str:
    """Return value and interval in words; what is not estimated is a dash."""
    show = number or _number
    if value["value"] is None:
        return "–"
    if value["low"] is None:
        return str(show(value["value"]))
    return f"{show(value['value'])} [{show(value['low'])}, {show(value['high'])}]"


def _number(value: float | None) -> str:
    """Return a number in three decimals, or in two digits where these would be zeros."""
    if value is None:
        return "–"
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.0005 else f"{value:.1e}"


def _small(value: float | None) -> str:
    """Return a number in two digits."""
    if value is None:
        return "–"
    return f"{value:.2g}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"
