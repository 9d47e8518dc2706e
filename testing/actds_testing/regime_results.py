"""Results of `actds regimes` made by hand, for tests of its pages: plain, many, and hostile."""

from __future__ import annotations

from typing import Any

from actds_studies.regimes.conclusions import answer_of, verdicts
from actds_studies.regimes.result import (
    About,
    ArmResult,
    ContrastResult,
    DatasetResult,
    Element,
    Limits,
    Outcome,
    Quantiles,
    Regimes,
    Used,
    Value,
)

__all__ = ["contrast", "hostile", "made", "many", "nothing", "result_of", "value"]

BANDS = (
    "1 to 7",
    "8 to 31",
    "32 to 127",
    "128 to 255",
    "256 to 511",
    "512 to 1023",
    "1024 to 2047",
)
STEPS = ("1", "6 to 10", "40 to 60", "160 to 240")
FVU = "FVU over the reference's variance"


def value(
    hook: str,
    found: float | None,
    outcome: Outcome | None,
    *,
    instrument: str = "dictionary",
    measure: str = FVU,
    axis: str = "all",
    stratum: str = "all",
    **changes: Any,
) -> Value:
    """Return a value with an interval of a tenth of it."""
    known: dict[str, Any] = {
        "unit": "difference", "kind": "difference", "n_rows": (1000, 2000), "n_requests": (64, 64),
        "n_effective": (900.0, 1800.0), "n_groups": 32, "limit": 0.02, "floor": 0.01,
    }  # fmt: skip
    if found is not None:
        known |= {"low": found - 0.01, "high": found + 0.01, "error": 0.005, "p": 0.001}
        known |= {"adjusted_p": 0.004, "n_elements": 1}
    else:
        known |= {"short": "3 requests; 8 are needed for an estimate"}
    return Value(
        instrument=instrument, hook=hook, axis=axis, stratum=stratum, measure=measure, value=found,
        outcome=outcome, **(known | changes),
    )  # fmt: skip


def arm(name: str, n_decode: int | None, words: str = "acts") -> ArmResult:
    """Return an arm of 2,000 rows of 64 requests."""
    return ArmResult(
        name=name, words=words, rows="generated tokens, one a step in decode" if n_decode
        else "given tokens, many a step in prefill",
        digest="0" * 64, n_rows=2000, n_requests=64, n_compared=1900,
        n_apart={"bos": 0, "first_position": 64}, n_repeats=12, n_decode=n_decode,
    )  # fmt: skip


def contrast(name: str, hook: str, about: About, gap: float, outcome: Outcome) -> ContrastResult:
    """Return a contrast whose gap grows with the decode step."""
    other, first = name.split("-")
    values = [value(hook, gap, outcome)]
    values += [
        value(hook, gap * (n + 1) / 2, outcome, axis="decode step", stratum=step)
        for n, step in enumerate(STEPS)
    ]
    values += [
        value(hook, gap * n / 3, outcome, axis="position", stratum=band)
        for n, band in enumerate(BANDS)
    ]
    values.append(value(hook, None, None, axis="position", stratum="2048 to 4095"))
    elements = [
        Element(name=str(n), value=n / 60 - 1, error=0.1,
                arms=(0.001 * (n + 1), min(1.0, 0.001 * (n + 1) * 2.718 ** (n / 60 - 1))))
        for n in range(120)
    ]  # fmt: skip
    values.append(
        value(hook, 0.98, outcome, measure="rates of features", unit="ln of the ratio", limit=0.5,
              element="119", elements=elements)
    )  # fmt: skip
    values.append(value(hook, 0.01, "carries over", instrument="moments", measure="variance"))
    quantiles = []
    if about == "computation":
        for n, (axis, stratum) in enumerate((("all", "all"), ("decode step", "1"))):
            quantiles.append(
                Quantiles(hook=hook, axis=axis, stratum=stratum, measure="relative L2",
                          n_pairs=1900, p50=0.004 + n / 1000, p90=0.008, p99=0.02, p100=0.09)
            )  # fmt: skip
    return ContrastResult(
        name=name, hook=hook, about=about, adjusted=about == "both", n_groups=32, coverage=0.95,
        pairing={"computation": "token", "authorship": "position"}.get(about, "unpaired"),  # type: ignore[arg-type]
        n_pairs=0 if about == "both" else 1900, first=arm(first, 0 if first != "G" else 2000),
        second=arm(other, 2000 if other == "G" else 0), values=values, quantiles=quantiles,
        verdicts=verdicts(values, (first, other)),
    )  # fmt: skip


def result_of(contrasts: list[ContrastResult], used: list[Used] | None = None) -> Regimes:
    """Return the result of contrasts, of one dataset."""
    dataset = DatasetResult(
        path="acts", digest="0" * 64, models=["small-135m"], engines=["vllm 0.32.0"],
        hooks=[f"{hook} (576 × bfloat16)" for hook in dict.fromkeys(c.hook for c in contrasts)],
        started_ns=1_790_000_000 * 10**9,
    )  # fmt: skip
    n_tests = sum(value.p is not None for one in contrasts for value in one.values)
    return Regimes(
        limits=Limits(), answer=answer_of(contrasts), n_tests=n_tests, datasets=[dataset],
        used=used or [], contrasts=contrasts,
    )  # fmt: skip


def made(hooks: tuple[str, ...] = ("resid_post.10", "resid_post.20")) -> Regimes:
    """Return the three contrasts of H, R and G: authorship shifts, computation does not."""
    found = []
    for hook in hooks:
        found += [
            contrast("R-H", hook, "authorship", 0.07, "shifts"),
            contrast("G-R", hook, "computation", 0.003, "carries over"),
            contrast("G-H", hook, "both", 0.073, "shifts"),
        ]
    used = Used(hook=hooks[0], kind="dictionary", path="sae/sae_weights.safetensors",
                sha256="ab" * 32, words="topk, 2,304 features, saelens")  # fmt: skip
    return result_of(found, [used])


def nothing(outcome: Outcome = "carries over") -> Regimes:
    """Return two arms of equal tokens of which every value ends alike, with equal rows."""
    one = contrast("B-A", "resid_post.10", "computation", 0.0, outcome)
    values = [v for v in one.values if v.measure == FVU]
    equal = [q.model_copy(update={"p50": 0.0, "p90": 0.0, "p99": 0.0, "p100": 0.0})
             for q in one.quantiles]  # fmt: skip
    one = one.model_copy(
        update={"values": values, "quantiles": equal, "verdicts": verdicts(values)}
    )
    return result_of([one])


def many() -> Regimes:
    """Return more hooks, contrasts and wide numbers than a page has room for."""
    found = made(tuple(f"resid_post.{n}" for n in range(30)))
    wide = [
        contrast(f"ARM{n}x-REFERENCE{n}", "attn_out_post.77", "both", 10.0**n, "undecided")
        for n in range(-7, 9)
        if n >= 0
    ]
    return result_of([*wide, *found.contrasts], found.used)


def hostile() -> Regimes:
    """Return a result whose every text is markup, control characters, or far too long."""
    evil = "<script>alert(1)</script>\x1b[31m" + "w" * 9000
    found = made()
    contrasts = [
        one.model_copy(
            update={
                "name": evil,
                "hook": evil,
                "first": one.first.model_copy(update={"name": evil, "words": evil}),
                "values": [
                    v.model_copy(update={"element": evil, "note": evil}) for v in one.values
                ],
                "verdicts": [
                    v.model_copy(update={"sentence": evil, "short": [evil] * 5, "hook": evil})
                    for v in one.verdicts
                ],
            }
        )
        for one in found.contrasts
    ]
    used = [one.model_copy(update={"path": evil, "words": evil}) for one in found.used]
    return result_of(contrasts, used)
