"""The page of attention: shares by depth, role, entropy and jump, jumps and entropy, the proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actds.format.tables import ROLES
from actds_studies.attention.result import Attention, AttentionValue, LayerAttention, Trace
from actds_validators.audit.place import Level
from actds_validators.audit.result import Estimate
from actds_validators.pages.answer import AnswerPage, Part, head_facts
from actds_validators.pages.svg import WIDTH, FigureData, Frame, Picture, axes, legend, span
from actds_validators.pages.words import (
    Columns,
    Fact,
    Table,
    count,
    or_dash,
    percent,
    short,
    table_of,
    thousandths,
)

PARTS = ("position 0", "prompt", "generated", "sinks")
_ROLES = tuple(f"role {role}" for role in ROLES)
_LOOKS = (
    ("stored", "stored-mark mark", "stored-line"),
    ("lost", "lost-mark mark", "lost-line"),
    ("reused", "reused-mark mark", "reused-line"),
    ("floor", "floor mark", "axis"),
    ("ended", "ended mark", "limit"),
    ("all", "all mark", "link"),
)
_MAX_PANELS, _MAX_TRACES = 4, 2
_SHARES = "share of the attention"
Place = tuple[str, str, str]
"""Axis, stratum, and what a chart calls it."""


def page(result: Attention, command: str) -> AnswerPage:
    """Return what the page says; ``command`` made it, as it was typed."""
    is_proved = result.answer.is_proved
    level: Level = "PASS" if is_proved else "INCONCLUSIVE"
    return AnswerPage(
        subject="attention",
        question="Where does generated text look, and does certainty change where it jumps?",
        level=level,
        answer=("" if is_proved else "NOT PROVED. ") + result.answer.words,
        boxes=_boxes(result),
        introduction="Each decode step spreads an attention of 1 over the keys in its reach, in "
        "every head. It is computed from queries and keys, stored or looked at, and "
        + ("proved: it gives the stored outputs of heads." if is_proved else "not proved."),
        next_steps=result.answer.next_steps or ["Nothing is missing."],
        facts=_facts(result, command),
        sections=[_depth(result), _against(result), _jumps(result), _proof(result)],
        on_terminal=("depth", "jumps", "proof"),
    )


def _boxes(result: Attention) -> list[Fact]:
    proofs = [layer.proof for layer in result.layers]
    distances = [proof.largest for proof in proofs if proof.largest is not None]
    largest = f"{max(distances):.1g}" if distances else "while it was served"
    n = count(sum(proof.n for proof in proofs))
    note = f"largest distance of softmax(q k) v from the stored z, over {n} heads of steps"
    is_proved = result.answer.is_proved
    boxes = [Fact("Self-proof", largest if is_proved else "not proved", note, is_proved)]
    known = [
        (j.difference.value, layer.layer, j)
        for layer in result.layers
        if (j := layer.jumps).difference and j.after_jumps and j.after_matched
    ]
    if not known:
        reason = result.layers[0].jumps.reason or "too few"
        return [*boxes, Fact("Jumps at a change", "not known", reason, is_known=False)]
    _, layer, jumps = max(known, key=lambda of: of[:2])
    shares = [percent(of.value) for of in (jumps.after_jumps, jumps.after_matched) if of]
    note = f"of large jumps at layer {layer} are at a large change of entropy, "
    note += f"{or_dash(jumps.difference, _points)} points more than of matched steps"
    return [*boxes, Fact("Jumps at a change", f"{shares[0]}, matched {shares[1]}", note)]


def _facts(result: Attention, command: str) -> list[tuple[str, str]]:
    n_steps = sum(layer.n_steps for layer in result.layers)
    steps = f"{count(n_steps)} with numbers, {percent(result.share)} of the decode steps; "
    steps += f"{count(result.n_requests)} requests in {result.n_groups} groups"
    known = "as on record" if result.model_checked else "not on record: not compared"
    layers = ", ".join(f"{layer.layer}" for layer in result.layers)
    head = head_facts(result, Configuration=known, Layers=layers, Steps=steps)
    return [*head, ("Command", command)]


def _bands(result: Attention) -> list[str]:
    values = (value for layer in result.layers for value in layer.values)
    bands = {v.stratum for v in values if v.axis == "decode step"}
    return sorted(bands, key=lambda band: int(band.split()[0]))


def _known(layers: Sequence[LayerAttention], measures: Sequence[str]) -> list[str]:
    return [
        measure
        for measure in measures
        for values in [[layer.value(measure, "all", "all") for layer in layers]]
        if any(v is not None and (v.value or measure not in _ROLES) for v in values)
    ]


def _places(bands: Sequence[str]) -> list[Place]:
    return [("decode step", band, short(float(band.split()[-1]))) for band in bands]


def _charts(
    result: Attention, name: str, title: str, places: Sequence[Place], masses: Sequence[str]
) -> list[Picture]:
    layers = result.layers[:_MAX_PANELS]
    shown = _known(layers, masses)
    if not shown or not places:
        return []
    height = 190.0
    label = "decode step, up to" if places[0][0] == "decode step" else ""
    p = Picture(
        name,
        title,
        "Mean share of the attention, heads together, with its 95 % interval over groups of "
        f"requests; a panel per layer, {_MAX_PANELS} at most.",
        WIDTH,
        44 + len(layers) * (height + 80),
        FigureData(("layer", "of", "axis", "stratum", "share", "low", "high", "steps")),
    )
    legend(
        p, 90, 20, [(_LOOKS[n][0], words.removeprefix("role ")) for n, words in enumerate(shown)]
    )
    for n, layer in enumerate(layers):
        f = Frame(90, 60 + n * (height + 80), 740, height, (-0.5, len(places) - 0.5), (0, 1))
        p.text(f.left, f.top - 10, f"layer {layer.layer}", kind="bold")
        marks = [(float(at), words) for at, (*_, words) in enumerate(places)]
        axes(p, f, label, _SHARES, x_marks=marks, y_text=percent)
        for look, mass in zip(_LOOKS, shown, strict=False):
            _line(p, f, layer, mass, places, look)
    return [p]


def _line(
    p: Picture,
    f: Frame,
    layer: LayerAttention,
    mass: str,
    places: Sequence[Place],
    look: tuple[str, str, str],
) -> None:
    before: tuple[float, float, str] | None = None
    for at, (axis, stratum, _) in enumerate(places):
        value = layer.value(mass, axis, stratum)
        if value is None:
            before = None
            continue
        low, high = value.low, value.high
        p.data.rows.append(
            (layer.layer, mass, axis, stratum, value.value, low, high, value.n_steps)
        )
        x, y = f.x(at), f.y(value.value)
        if before is not None and before[2] == axis:
            p.line(before[0], before[1], x, y, f"{look[2]} whisker")
        if low is not None and high is not None:
            p.line(x, f.y(low), x, f.y(high), f"{look[2]} whisker")
        p.dot(x, y, look[1], f"{mass}, {axis} {stratum}: {_interval(value)}")
        before = x, y, axis


def _interval(value: AttentionValue | Estimate | None) -> str:
    if value is None:
        return "-"
    words = thousandths(value.value)
    if value.low is None or value.high is None:
        return words
    return f"{words} [{thousandths(value.low)}, {thousandths(value.high)}]"


_Stratum = tuple[LayerAttention, str, str]


def _table(caption: str, rows: list[_Stratum], measures: Sequence[str]) -> list[Table]:
    def interval(measure: str) -> Callable[[_Stratum], str]:
        return lambda row: _interval(row[0].value(measure, *row[1:]))

    def counted(name: str) -> Callable[[_Stratum], str]:
        return lambda row: count(getattr(row[0].value("entropy", *row[1:]), name))

    columns: Columns[_Stratum] = [
        ("layer", lambda row: str(row[0].layer)),
        ("steps of", lambda row: f"{row[1]} {row[2]}"),
        *(
            (name.removeprefix("role "), interval(name))
            for name in _known([row[0] for row in rows], measures)
        ),
        ("steps", counted("n_steps")),
        ("requests", counted("n_requests")),
    ]
    rows = [row for row in rows if row[0].value("entropy", *row[1:])]
    return table_of(caption, columns, rows, frozenset({0, 1}))


def _depth(result: Attention) -> Part:
    bands = _bands(result)
    lead = (
        "The prompt has less of the attention the more text there is, for that alone: the log-odds "
        "are those of the prompt without position 0 against generated text, less those of an even "
        "attention over the keys in reach. Entropy is in bits, and over the logarithm of the keys; "
        "a jump is 1 - Jaccard of the 8 keys with the largest shares since the step looked at "
        "before. Decode step 1 is the first generated token that was fed. A value is the mean over "
        "steps, heads together; its 95 % interval leaves out a group of requests at a time."
    )
    rows = [(layer, "decode step", band) for layer in result.layers for band in bands]
    measures = (*PARTS, "prompt odds", "entropy", "relative entropy", "jump")
    charts = _charts(result, "depth", "Attention by decode step", _places(bands), PARTS)
    table = _table("By decode step", rows, measures)
    return Part("depth", "By depth", lead, table, pictures=charts)


def _against(result: Attention) -> Part:
    bands = _places(_bands(result))
    entropy = [("entropy", f"quintile {n}", f"quintile {n}") for n in range(1, 6)]
    jump = [("jump", "large", "large jump"), ("jump", "others", "other steps")]
    known = _known(result.layers, _ROLES)
    masses = known or PARTS
    axes_shown = [
        *((axis, name) for axis, name, _ in (*entropy, *jump)),
        *(("role", r) for r in ROLES),
    ]
    rows = [(layer, *place) for layer in result.layers for place in axes_shown]
    lead = (
        "Whose text has the attention, against the entropy of the token that is sampled after the "
        "step (quintile 5: the least certain), against jumps, and by the role of the token fed. A "
        "jump is large when it is among the largest tenth of its answer. Position 0 is in no role: "
        "many models leave there what they have no use for."
    )
    measures = (*PARTS, *known, "entropy", "jump")
    table = _table("By entropy, jump and role of the token fed", rows, measures)
    charts = _charts(result, "roles", "Attention by role and decode step", bands, known)
    charts += _charts(
        result, "against", "Attention against entropy and jumps", [*entropy, *jump], masses
    )
    return Part("against", "By role, entropy and jump", lead, table, pictures=charts)


def _points(value: Estimate) -> str:
    return f"{100 * value.value:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"


_JUMPS: Columns[LayerAttention] = (
    ("layer", lambda row: str(row.layer)),
    ("changes at jumps", lambda row: row.jumps.outcome),
    ("jumps", lambda row: count(row.jumps.n_jumps)),
    ("matched", lambda row: count(row.jumps.n_matched)),
    ("at a large change", lambda row: _interval(row.jumps.after_jumps)),
    ("matched steps", lambda row: _interval(row.jumps.after_matched)),
    ("difference, points", lambda row: or_dash(row.jumps.difference, _points)),
    ("a window later, points", lambda row: or_dash(row.jumps.later, _points)),
    ("size, nats", lambda row: _interval(row.jumps.size)),
    ("direction, nats", lambda row: _interval(row.jumps.direction)),
)


def _jumps(result: Attention) -> Part:
    limits = result.limits
    lead = (
        f"A change at a step is the mean entropy of the {limits.window} tokens sampled after it "
        "less that of as many before it, its own left out; it is large when its size is among the "
        f"largest {percent(limits.largest)} of all. Large jumps are compared with other steps of "
        "the same answer in the same band of depth and quintile of entropy. The difference of "
        "shares is at 95 % for all layers at once, the size of changes and their direction (above "
        "0: less certain after the jump) at 95 % each. A window later: the same for changes that "
        "begin after the jump; near 0 the change comes with the jump, and not later. None of it is "
        "cause."
    )
    notes = [
        f"Layer {layer.layer}: {layer.jumps.reason}."
        for layer in result.layers
        if layer.jumps.reason
    ]
    caption = "Large jumps beside matched steps"
    table = table_of(caption, _JUMPS, result.layers, frozenset({0, 1}))
    traces = [(layer, trace) for layer in result.layers for trace in layer.traces if trace.marked]
    traces.sort(key=lambda pair: -len(pair[1].marked))
    pictures = [_trace(*pair, n) for n, pair in enumerate(traces[:_MAX_TRACES])]
    return Part("jumps", "Jumps and entropy", lead, table, notes, pictures=pictures)


def _trace(layer: LayerAttention, trace: Trace, n: int) -> Picture:
    p = Picture(
        f"trace{n}",
        f"An answer at layer {layer.layer}",
        "Above the jump of each step, below the entropy of the token sampled after it, in nats. "
        "Diamonds and dashed lines mark large jumps at a large change of entropy.",
        WIDTH,
        400,
        FigureData(("request", "step", "jump", "entropy", "prompt share", "marked")),
        [],
    )
    x_range = (float(trace.steps[0]) - 1, float(trace.steps[-1]) + 1)
    entropies = [value for value in trace.entropy if value is not None]
    panels = [
        (Frame(90, 30, 740, 130, x_range, (0, 1)), trace.jump, "jump"),
        (Frame(90, 200, 740, 130, x_range, span(entropies)), trace.entropy, "entropy"),
    ]
    for f, values, words in panels:
        points = [
            (f.x(s), f.y(v)) for s, v in zip(trace.steps, values, strict=True) if v is not None
        ]
        axes(p, f, "decode step" if words == "entropy" else "", words, y_text=short)
        p.path(points, "curve")
        for step in trace.marked:
            p.line(f.x(step), f.top, f.x(step), f.bottom, "limit")
    f, jumps, _ = panels[0]
    for step, value in zip(trace.steps, jumps, strict=True):
        if step in trace.marked and value is not None:
            p.diamond(f.x(step), f.y(value), "lost-mark mark", f"step {step}: jump {value:.2f}")
    p.text(90, 18, f"request {trace.request}", kind="bold")
    rows = zip(trace.steps, trace.jump, trace.entropy, trace.prompt, strict=True)
    p.data.rows += [(trace.request, *row, int(row[0] in trace.marked)) for row in rows]
    return p


_PROOF: Columns[LayerAttention] = (
    ("layer", lambda row: str(row.layer)),
    ("outcome", lambda row: row.proof.outcome),
    ("largest distance", lambda row: or_dash(row.proof.largest, lambda v: f"{v:.2g}")),
    ("limit", lambda row: or_dash(row.proof.limit, lambda v: f"{v:g}")),
    ("mean", lambda row: or_dash(row.proof.mean, lambda v: f"{v:.2g}")),
    ("heads of steps", lambda row: count(row.proof.n)),
    ("attention", lambda row: row.scheme),
)


def _proof(result: Attention) -> Part:
    lead = (
        "At every head of every step, softmax(q k) v is compared with the stored z. The distance "
        "is over the sum of shares times lengths of values, the most that a head can give out. A "
        "key that the prefix cache served is that of the request which computed it. A step of "
        "which a key is not stored has no number: shares are never made to add up without it."
    )
    notes = [
        f"Layer {layer.layer}: {count(n)} steps have no number: {reason}."
        for layer in result.layers
        for reason, n in layer.absent.items()
    ]
    notes += [
        f"Layer {layer.layer} is NOT PROVED: {layer.proof.reason}."
        for layer in result.layers
        if layer.proof.reason
    ]
    tables = table_of("Proof of each layer", _PROOF, result.layers, frozenset({0, 1, 6}))
    return Part("proof", "Proof, and steps without numbers", lead, tables, notes)
