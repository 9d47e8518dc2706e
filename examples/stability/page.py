"""The page: from the result of ``actds stability`` to figures.json, and from that to README.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Figures = dict[str, Any]
WHAT = {
    "cached": "prefix cache on: each prefix is computed, and stored, once",
    "uncached": "prefix cache off: the shared system prompt is stored with every chat",
    "weighted": "the rows of *cached*, each as often as it was served",
    "dropped": "a disk that is too slow for all rows: what does not fit is lost",
    "hybrid": "the rows of *cached*, half from prompts and half from answers",
}
KINDS = {
    "other seed": "*cached* again, other start and order (floor)",
    "other order": "*cached* again, same start, other order (floor)",
}
LIKENESS = ("matched", "share_70", "share_90")
FEATURES = ("kept", "split", "merged", "gone")


def summary(setting: Figures, result: Figures) -> Figures:
    """Return what the page needs, in six digits.

    Args:
        setting: how the arms were made.
        result: ``actds.stability/1``.
    """
    kept = ("hook", "d_model", "n_features", "n_rows", "n_seen", "chance", "rare", "verdicts",
            "comparisons", "cross", "limits", "arms")  # fmt: skip
    found = {name: _short(result[name]) for name in kept}
    for arm in found["arms"]:
        del arm["words"]  # where the datasets lay
    return {"setting": setting, **found, "pairs": _pairs(result["pairs"])}


def of_corpora(setting: Figures, result: Figures) -> Figures:
    """Return what the page needs of the result on prompts, answers and half of each."""
    names = ("trained_on", "rows_of", "rows", "use", "n_rows", "n_requests", "value", "low", "high",
             "seeds_low", "seeds_high", "difference")  # fmt: skip
    cross = [{name: _short(value[name]) for name in names} for value in result["cross"]]
    kept = ("hook", "n_features", "n_rows", "n_seen", "limits", "label")
    found = {name: _short(result[name]) for name in kept}
    verdicts = [
        {name: v[name] for name in ("arm", "outcome", "sentence")} for v in result["verdicts"]
    ]
    return {"setting": setting, **found, "verdicts": verdicts, "uses": result["answer"]["uses"],
            "arms": [{name: arm[name] for name in ("name", "n_there", "n_scored", "n_requests")}
                     for arm in result["arms"]], "cross": cross}  # fmt: skip


def _pairs(pairs: list[Figures]) -> list[Figures]:
    """Return the mean likeness of the pairs of each arm and kind, with least and largest."""
    names = dict.fromkeys((pair["arm"], pair["kind"]) for pair in pairs)
    found = []
    for arm, kind in names:
        mine = [p["likeness"] for p in pairs if (p["arm"], p["kind"]) == (arm, kind)]
        values = {name: [one[name] for one in mine] for name in LIKENESS}
        features = [one["features"] for one in mine if one["features"] is not None]
        values |= {name: [one[name] for one in features] for name in FEATURES if features}
        found.append({
            "arm": arm, "kind": kind, "n": len(mine),
            **{n: _short([sum(v) / len(v), min(v), max(v)]) for n, v in values.items()},
        })  # fmt: skip
    return found


def _short(value: Any) -> Any:
    """Return a value with its floats in six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list) else value


def page(figures: Figures) -> str:
    """Return README.md."""
    parts = (_head, _experiment, _alike, _cross, _corpora, _limits)
    return "\n\n".join(part(figures) for part in parts) + "\n"


def _head(figures: Figures) -> str:
    lines = [
        "# Does the harvest change the dictionary?",
        "*Written by `run.py` from `figures.json`; do not edit.*",
        "Two dictionaries that are trained on the same rows with other seeds are not the same. So "
        "what a prefix cache, weights, losses or a mixture do to a dictionary means something only "
        "beside what another seed does. Against that floor:",
        "\n".join(f"- {v['sentence']}" for v in figures["verdicts"]),
        _unexplained(figures),
        f"One small model, one hook (`{figures['hook']}`), small dictionaries, few rows, one kind "
        "of text: first numbers of their kind, and not general.",
    ]
    return "\n\n".join(lines)


def _unexplained(figures: Figures) -> str:
    first = figures["arms"][0]["name"]
    found = {
        one["trained_on"]: one["value"]
        for one in figures["cross"]
        if (one["use"], one["rows"], one["rows_of"]) == ("FVU", "all", first)
    }
    told = ", ".join(f"{fvu:.3f} of *{arm}*" for arm, fvu in found.items())
    rows = f"the held-out rows of *{first}*"
    said = f"Of the variance of {rows}, dictionaries leave unexplained: {told}."
    more = {arm: fvu - found[first] for arm, fvu in found.items()}
    if more["uncached"] > 0.01 and abs(more["weighted"] - more["uncached"]) < 0.005:
        said += (
            " *Weighted* rows do what *uncached* ones do: it matters how often the system prompt "
            "is met, and not whether a cache served it."
        )
    return said


def _experiment(figures: Figures) -> str:
    told, limits = figures["setting"], figures["limits"]
    lost = told["lost"]
    share = lost["dropped"] / (lost["captured"] + lost["dropped"])
    took = told["seconds"]
    engine = sum(seconds for name, seconds in took.items() if name != "stability")
    lines = ["## The experiment", "| arm | what it is | rows to train on |", "| --- | --- | ---: |"]
    for arm in figures["arms"]:
        lines.append(f"| *{arm['name']}* | {WHAT[arm['name']]} | {arm['n_there']:,} |")
    facts = [
        f"- **Model and engine**: SmolLM2-135M, vLLM on the CPU; "
        f"{', '.join(f'`{one}`' for one in told['engine'])}.",
        f"- **Chats**: {told['chats']} questions on Python's standard library behind one system "
        f"prompt, answers of up to {told['sampled']} tokens at temperature 1.",
        f"- **Losses**: *dropped* lost {share:.0%} of the rows that it computed.",
        f"- **Dictionaries**: TopK, {figures['n_features']:,} features, {limits['k']} active, "
        f"{limits['seeds']} seeds; each saw {figures['n_seen']:,} rows, {figures['n_rows']:,} of "
        "its arm over and over. Arms of one seed have the same initial weights, and rows that they "
        "share come in the same order.",
        f"- **Scored** on requests that no arm was trained on ({limits['held_out']:.0%}).",
        f"- **Time**: {engine / 60:.0f} minutes of engine, {took['stability'] / 60:.0f} of "
        f"training and scoring, on {told['machine']}"
        + (" that did other work at the same time." if told["busy"] else "."),
        f"- **Again**: `{told['command']}`",
    ]
    return "\n".join([lines[0], "", *lines[1:], "", *facts])


def _alike(figures: Figures) -> str:
    lines = [
        "## How alike are the dictionaries?",
        "",
        "Decoder directions are matched one to one (Hungarian method). Means over seeds, with the "
        f"least and the largest; random directions would match at {figures['chance']:.2f}.",
        "",
        "| second dictionary | mean cosine of matches | matched at 0.7 | at 0.9 |",
        "| --- | --- | --- | --- |",
    ]
    lines += [_likeness(pair, figures, LIKENESS) for pair in _ordered(figures)]
    if any("kept" in pair for pair in figures["pairs"]):
        lines += [
            "",
            "What became of the features of *cached* in the second dictionary: kept when one "
            "feature of it explains 70 % of the variance of their activations, split when several "
            "do, merged when they are parts of one of its features, and gone when none of these.",
            "",
            "| second dictionary | kept | split | merged | gone |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [_likeness(pair, figures, FEATURES) for pair in _ordered(figures)]
    if any(one["p"] is not None for one in figures["comparisons"]):
        lines += ["", *_tests(figures)]
    return "\n".join(lines)


def _ordered(figures: Figures) -> list[Figures]:
    """Return the pairs, those of the floors first."""
    order = {"other order": 0, "other seed": 1}
    return sorted(figures["pairs"], key=lambda p: order.get(p["kind"], 2))


def _likeness(pair: Figures, figures: Figures, names: Sequence[str]) -> str:
    """Return a row of a table: a pair with some of its numbers."""
    name = f"*{pair['arm']}*, {pair['kind']}"
    if pair["arm"] == figures["arms"][0]["name"]:
        name = KINDS[pair["kind"]]
    cells = [_spread(pair.get(n), share=n != "matched") for n in names]
    return f"| {name} | {' | '.join(cells)} |"


def _tests(figures: Figures) -> list[str]:
    lines = [
        "The difference of each arm to the floor, seed by seed (sign test, a family per floor):",
        "",
        "| arm | floor | mean cosine, arm | floor | seeds below | adjusted p | is |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for one in figures["comparisons"]:
        if one["measure"] == "matched":
            p = "" if one["adjusted_p"] is None else f"{one['adjusted_p']:.3f}"
            values = f"{one['of_arm']:.3f} | {one['of_floor']:.3f}"
            below = f"{one['n_below']} of {len(one['differences'])}"
            lines.append(
                f"| *{one['arm']}* | {one['floor']} | {values} | {below} | {p} | "
                f"{one['outcome'] or ''} |"
            )
    return lines


def _spread(found: list[float] | None, *, share: bool) -> str:
    if found is None:
        return ""
    mean, low, high = found
    if share:
        return f"{mean:.0%} [{low:.0%}, {high:.0%}]"
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _cross(figures: Figures) -> str:
    lines = [
        "## What does each leave unexplained, and of whose rows?",
        "",
        "Fraction of variance unexplained of held-out rows, over their own variance; mean over "
        "seeds with the 95 % interval over requests.",
    ]
    for rows in ("all", "prefill", "decode", "rare tokens"):
        known = [one for one in figures["cross"] if one["value"] is not None]
        mine = [one for one in known if (one["use"], one["rows"]) == ("FVU", rows)]
        if not mine:
            continue
        arms = list(dict.fromkeys(one["rows_of"] for one in mine))
        by = {(one["trained_on"], one["rows_of"]): one for one in mine}
        lines += ["", f"**{rows.capitalize()}**", "",
                  f"| trained on | {' | '.join(f'rows of *{a}*' for a in arms)} |",
                  f"| --- |{' --- |' * len(arms)}"]  # fmt: skip
        for trained in dict.fromkeys(one["trained_on"] for one in mine):
            cells = [_fvu(by.get((trained, arm))) for arm in arms]
            lines.append(f"| *{trained}* | {' | '.join(cells)} |")
    rare = figures["rare"]
    most = "once" if rare["most"] == 1 else f"at most {rare['most']} times"
    lines += [
        "",
        f"Rare tokens are those that come {most} in the rows of *cached*, "
        f"{rare['share']:.0%} of these rows.",
    ]
    return "\n".join(lines)


def _fvu(one: Figures | None) -> str:
    if one is None or one["value"] is None:
        return ""
    if one["low"] is None:
        return f"{one['value']:.3f}"
    return f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


def _gap(one: Figures) -> str:
    gap = one["difference"]
    if gap is None:
        return "" if one["value"] is None else "(its own)"
    words = f"{gap['value']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]"
    return f"**{words}**" if gap["outcome"] == "beyond the floor" else words


def _corpora(figures: Figures) -> str:
    """Return the part on prompts, answers, and half of each."""
    told = figures["corpora"]
    setting = told["setting"]
    by: dict[tuple[str, ...], Figures] = {}
    for value in told["cross"]:
        by[value["use"], value["trained_on"], value["rows_of"], value["rows"]] = value
    arms = [arm["name"] for arm in told["arms"]]
    steps = list(
        dict.fromkeys(v["rows"] for v in told["cross"] if v["rows"].startswith("decode step"))
    )
    columns = [("prefill", "all"), ("decode", "all"), *(("decode", step) for step in steps)]
    heads = ["prompts", "answers", *steps]
    took = setting["seconds"]
    lines = [
        "## Prompts, answers, or half of each?",
        "",
        f"The same {setting['chats']} chats, with answers of up to {setting['sampled']} tokens: "
        f"dictionaries of {told['n_features']:,} features, {told['n_rows']:,} rows of each arm, "
        f"each read {told['limits']['epochs']} times (a short training), "
        f"{told['limits']['seeds']} seeds, scored on the {told['limits']['held_out']:.0%} of the "
        f"requests that are held out. {took['long'] / 60:.0f} minutes of engine, "
        f"{took['corpora'] / 60:.0f} of training and scoring, on {setting['machine']}"
        + (" that did other work at the same time." if setting["busy"] else "."),
        "",
        "\n".join(f"- {sentence}" for sentence in told["uses"]),
        "",
        "FVU of held-out prompts and answers, by decode step:",
        "",
        f"| trained on | {' | '.join(heads)} |",
        f"| --- |{' --- |' * len(heads)}",
    ]
    for arm in arms:
        cells = [_fvu(by.get(("FVU", arm, *column))) for column in columns]
        lines.append(f"| *{arm}* | {' | '.join(cells)} |")
    lines += [
        "",
        "The difference to the dictionaries of the rows' own arm, of the same seeds and rows; bold "
        "where it is beyond what seeds differ by:",
        "",
        f"| trained on | {' | '.join(heads)} |",
        f"| --- |{' --- |' * len(heads)}",
    ]
    for arm in arms:
        cells = [
            _gap(by["FVU", arm, *column]) if ("FVU", arm, *column) in by else ""
            for column in columns
        ]
        lines.append(f"| *{arm}* | {' | '.join(cells)} |")
    sizes = [by["FVU", arms[0], *column] for column in columns]
    counts = [f"{one['n_rows']:,} ({one['n_requests']})" for one in sizes]
    lines.append(f"| rows (requests) | {' | '.join(counts)} |")
    lines += [
        "",
        f"AUROC of a probe for `{told['label']}` on the features, by request: the maximum and the "
        "mean of its scores over the held-out rows of a request. *Raw rows* is the same probe "
        "without a dictionary.",
        "",
        "| trained on | prompts, maximum | prompts, mean | answers, maximum | answers, mean |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm in (*arms, "raw rows"):
        cells = [
            _fvu(by.get((use, arm, of, "all")))
            for of in ("prefill", "decode")
            for use in ("AUROC of maxima", "AUROC of means")
        ]
        lines.append(f"| *{arm}* | {' | '.join(cells)} |")
    lines += ["", "What became of the dictionaries themselves:", ""]
    lines += [f"- {verdict['sentence']}" for verdict in told["verdicts"]]
    return "\n".join(lines)


def _limits(figures: Figures) -> str:
    return f"""## What this does and does not say

- {figures["setting"]["chats"]} chats behind one system prompt. Other traffic shares other prefixes,
  and loses other rows.
- With few rows, each read many times, dictionaries of other seeds differ more than those of people
  with billions of rows. So the floor is measured here, and would have to be measured again
  elsewhere.
- *Within the floor* says that a harvest changes a dictionary no more than another seed does. It may
  still change which features are there in a way that no match shows.
- Arms of one seed begin with the same weights and meet shared rows in the same order, so they are
  more alike than dictionaries of two seeds by construction. That is what *other order* is for.
- Prompts and answers differ in who wrote them, in position and in how they were computed. That
  dictionaries of one explain less of the other says nothing on which of these it is
  ([regimes](../regimes/README.md) separates them).
- A probe finds one label that the prompt itself tells, by a ridge regression of one strength; few
  requests are held out, so intervals are wide. It is no monitor, and no sign of what a monitor of
  something rare would lose.
- The losses follow the load of one queue on one disk. Losses of another pattern may do more, or
  less."""
