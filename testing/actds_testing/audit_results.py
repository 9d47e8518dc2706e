"""Results of audits, as they could be: one for each verdict, hostile, enormous and wide ones.

No dataset stands behind them; the report's tests draw them.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import numpy as np

from actds_validators.audit.place import LeftOut, LengthBand, Place, PlaceName, SourceAccount
from actds_validators.audit.places import conclude, unaccounted
from actds_validators.audit.result import (
    Accounting,
    Association,
    Audit,
    Balance,
    Bound,
    BoundPoint,
    CapturedShift,
    ClassesFile,
    Covariate,
    Coverage,
    CoverageCell,
    Difference,
    Estimate,
    Family,
    Finding,
    Group,
    Lag,
    LagBand,
    Level,
    Limits,
    Loss,
    LossCurve,
    Mechanism,
    Missingness,
    Number,
    Occupancy,
    Options,
    Queues,
    Stall,
    Stratum,
    StratumLoss,
    TracePoint,
    Verdict,
    WaterfallStep,
    WeightCell,
    Weighting,
)

COVARIATES: list[tuple[str, str, str, Group]] = [
    ("load", "load, last 8 steps", "tokens/step", "system"),
    ("batch_size", "tokens in the step", "tokens", "system"),
    ("time", "time in the run", "s", "system"),
    ("prompt_length", "prompt length", "tokens", "content"),
    ("position", "position", "tokens", "content"),
    ("decode", "generated (decode)", "", "content"),
    ("source", "source: synthetic/long-context-code", "", "content"),
    ("rarity", "token rarity", "nats", "content"),
    ("norm", "row norm, resid_post.10", "", "values"),
    ("projection_0", "projection 0, resid_post.10", "", "values"),
]
CLASSES = ("special", "system", "user", "assistant", "template", "code")
BANDS = ((0, 16), (16, 64), (64, 256), (256, 1024), (1024, 4096))

Case = tuple[Level, str, float, str, Number, list[str], list[str]]
CASES: dict[str, Case] = {
    "negligible": (
        "PASS",
        "negligible",
        0.0003,
        "0.03 % of the computed tokens were lost: no mean over rows can be off by more than 0.0173 "
        "SD, whatever the reason.",
        Number(
            name="worst-case bias of any mean",
            value=0.0173,
            must="at most",
            limit=0.02,
            unit="SD",
            ok=True,
        ),
        [],
        [],
    ),
    "uncorrelated": (
        "PASS",
        "uncorrelated",
        0.012,
        "1.2 % of the computed tokens were lost, in 212 independent events, and every content "
        "covariate of the lost tokens is equal to all within 0.1 SD.",
        Number(
            name="largest SMD of a content covariate",
            value=0.041,
            must="at most",
            limit=0.1,
            unit="SD",
            ok=True,
        ),
        [],
        [],
    ),
    "load": (
        "WARN",
        "load-dependent",
        0.021,
        "2.1 % of the computed tokens were lost, more of them under load; content covariates are "
        "equal within 0.1 SD.",
        Number(
            name="adjusted p, load of the last 8 steps",
            value=0.0041,
            must="above",
            limit=0.05,
            ok=False,
        ),
        [],
        [
            "Write weights and hand them to the loader: actds audit PATH --weights FILE.parquet",
            "Harvest again with policy block, or with a faster disk: actds plan says how fast.",
        ],
    ),
    "heavy": (
        "FAIL",
        "heavy",
        0.31,
        "31 % of the computed tokens were lost, and which ones depends on load and prompt "
        "length: the dataset is not a sample of what was served.",
        Number(
            name="share of computed tokens lost",
            value=0.31,
            must="at most",
            limit=0.05,
            unit="share",
            ok=False,
        ),
        [],
        [
            "Do not train on this dataset as it is.",
            "Harvest again with policy block; at this load it slows the engine by about half.",
            "If that cannot be done, train with weights and say so: "
            "actds audit PATH --weights weights.parquet",
        ],
    ),
    "few": (
        "INCONCLUSIVE",
        "too few events",
        0.006,
        "0.6 % of the computed tokens were lost in 7 independent events: too few to tell whether "
        "the loss depends on content.",
        Number(name="independent loss events", value=7, must="at least", limit=30, ok=False),
        ["7 independent loss events of 30", "an SMD below 0.42 would not be found with power 0.8"],
        ["Harvest about 5 times as many steps, or treat the loss as content-dependent."],
    ),
    "unexplained": (
        "FAIL",
        "accounting",
        0.004,
        "3,201 accounting mismatches: positions with neither a row nor a reason.",
        Number(
            name="unexplained positions",
            value=3201,
            must="at most",
            limit=0,
            unit="positions",
            ok=False,
        ),
        [],
        ["Run actds validate PATH --level full and fix what it names before any audit."],
    ),
}


def audit(name: str = "load", seed: int = 0, **changes: Any) -> Audit:
    """Return the result of a case of ``CASES``, complete but for what the case rules out."""
    level, kind, loss, sentence, deciding, lacks, steps = CASES[name]
    rng = np.random.default_rng(seed)
    found = name == "unexplained"
    verdict = Verdict(
        level=level,
        kind=kind,
        sentence=sentence,
        deciding=deciding,
        numbers=[deciding, *_numbers(loss)],
        lacks=lacks,
        next_steps=steps,
    )
    verdict = changes.get("verdict", verdict)
    path = "/data/acts/smollm2-harvest"
    judged, answered = list[Place](), unaccounted(verdict)
    if not found:
        judged, answered = conclude(places(verdict, loss), (), path, None)
    parts: dict[str, Any] = {
        "actds": "0.1.0",
        "path": path,
        "dataset": "0192f0c1-5a3e-7c11-9d57-6f2a3c9e10aa",
        "digest": "9f2c" * 16,
        "seal": 3,
        "runs": ["run-0192f0c1"],
        "policies": ["drop_newest"],
        "options": options() if name == "heavy" else Options(),
        "limits": Limits(),
        "verdict": verdict,
        "source": None if found else source(),
        "places": judged,
        "answer": answered,
        "accounting": accounting(loss, found=found),
        "coverage": None if found else coverage(rng, loss),
        "missingness": None if found else missingness(rng, loss, strong=name in ("load", "heavy")),
        "mechanism": None if found else mechanism(rng, rejected=name in ("load", "heavy")),
        "queues": None if found else queues(rng, loss),
        "weighting": weighting() if name in ("load", "heavy") else None,
        "would_not_notice": [
            "losses by a direction that no readout has",
            "tokens that never reached the engine",
        ],
        "duration_s": 3.21,
        "peak_nbytes": 212 << 20,
    }
    return Audit(**{**parts, **changes})


def places(verdict: Verdict, loss: float) -> list[Place]:
    """Return places that all pass, but for queues of a verdict."""
    made = []
    units: dict[PlaceName, str] = {
        "source": "records", "cache": "positions", "rules": "positions", "ends": "positions",
        "values": "rows", "identity": "rows",
    }  # fmt: skip
    for name, unit in units.items():
        made.append(
            Place(name=name, level="PASS", n=0, of=20_000, unit=unit, share=0.0, bias=0.0,
                  limit="worst case of any mean at most 0.02 SD",
                  headline=f"nothing went at {name}", sentence=f"Nothing went at {name}.")
        )  # fmt: skip
    queues = Place(
        name="queues", level=verdict.level, n=round(20_000 * loss), of=20_000, unit="rows",
        share=loss, bias=math.sqrt(loss / (1 - loss)), limit="worst case at most 0.02 SD",
        headline=f"{loss:.2%} of the computed rows were dropped", sentence=verdict.sentence,
        to_do=verdict.next_steps,
    )  # fmt: skip
    return [*made[:4], queues, *made[4:]]


def source() -> SourceAccount:
    """Return the account of a source of which a few long records were skipped."""
    bands = [
        LengthBand(low=2**k - 1, high=2 ** (k + 1) - 2, records=40 * k, served=40 * k - (k > 9),
                   tokens=40 * k * 2**k, served_tokens=(40 * k - (k > 9)) * 2**k)
        for k in range(4, 12)
    ]  # fmt: skip
    n, served = (sum(getattr(b, name) for b in bands) for name in ("records", "served"))
    tokens, served_tokens = (
        sum(getattr(b, name) for b in bands) for name in ("tokens", "served_tokens")
    )
    left = LeftOut(what="skipped", reason="prompt too long (E004)", n=n - served,
                   n_tokens=tokens - served_tokens)  # fmt: skip
    return SourceAccount(
        records=n, served=served, left_out=[left], tokens=tokens, served_tokens=served_tokens,
        unmeasured=0, lengths=bands, length_shift=0.01, interrupted=[],
    )  # fmt: skip


def _numbers(loss: float) -> list[Number]:
    bias = math.sqrt(loss / (1 - loss))
    return [
        Number(
            name="unexplained positions",
            value=0,
            must="at most",
            limit=0,
            unit="positions",
            ok=True,
        ),
        Number(
            name="prefix-cache hits without a stored row",
            value=0.0,
            must="at most",
            limit=0.01,
            unit="share",
            ok=True,
        ),
        Number(
            name="share lost", value=loss, must="at most", limit=0.05, unit="share", ok=loss <= 0.05
        ),
        Number(
            name="worst-case bias of any mean",
            value=bias,
            must="at most",
            limit=0.02,
            unit="SD",
            ok=bias <= 0.02,
        ),
        Number(name="effective rows", value=1_182_114.4, unit="rows"),
    ]


def accounting(loss: float, *, found: bool = False) -> Accounting:
    positions, reused, filtered, aborted, never = 2_000_000, 520_000, 60_000, 1_200, 2_345
    computed = positions - reused - filtered - never
    dropped = max(0, round(computed * loss) - aborted)
    captured = computed - dropped - aborted
    steps = [
        ("positions", None, positions),
        ("cache_ref", None, reused),
        ("filtered", "not_selected", filtered),
        ("never computed", "client_abort", never),
        ("dropped", "queue_full", dropped * 3 // 4),
        ("dropped", "dma_backpressure", dropped - dropped * 3 // 4),
        ("aborted", "client_abort", aborted),
        ("captured", None, captured),
    ]
    finding = Finding(
        code="E401",
        place="runs/run-0192f0c1 request 17 positions [40, 3241)",
        got="neither a row nor a span",
        expected="every position accounted for",
        severity="error",
    )
    return Accounting(
        positions=positions,
        computed=computed,
        captured=captured,
        cache_ref=reused,
        dropped=dropped,
        aborted=aborted,
        never_computed=never,
        never_computed_requests=91,
        filtered=filtered,
        recomputed=311,
        unresolved=0,
        requests=4_120,
        steps=40_000,
        loss_share=(dropped + aborted) / computed,
        waterfall=[
            WaterfallStep(name=n, reason=r, n_positions=k, share=k / positions) for n, r, k in steps
        ],
        findings=[finding] if found else [],
    )


def coverage(rng: np.random.Generator, loss: float) -> Coverage:
    cells = []
    for c, token_class in enumerate(CLASSES):
        for b, (low, high) in enumerate(BANDS):
            total = int(rng.integers(2_000, 90_000)) if (c, b) != (0, 4) else 0
            reused = int(total * max(0.0, 0.8 - 0.2 * b) * (0.9 if c < 2 else 0.4))
            lost = int((total - reused) * min(1.0, loss * 1.5))
            filtered = int(total * 0.03)
            computed = total - reused - lost - filtered
            served = computed + reused + lost  # filtered positions are neither
            cells.append(
                CoverageCell(
                    token_class=token_class,
                    low=low,
                    high=high,
                    stored=computed,
                    reused=reused,
                    lost=lost,
                    filtered=filtered,
                    stored_share=computed / served if served else None,
                )
            )
    shifts = [
        CapturedShift(
            variable=name,
            total_variation=0.21,
            jensen_shannon=0.19,
            weighted_total_variation=0.012,
            weighted_jensen_shannon=0.02,
        )
        for name in ("token class", "position", "token id")
    ]
    return Coverage(
        cells=cells,
        classes_from="the chat template of the tokenizer",
        reused_share=0.26,
        repeated_prefixes=61_220,
        largest_multiplicity=812,
        mean_multiplicity=1.37,
        repeated_multiplicity=5.6,
        once_bias=0.31,
        effective_rows=39_984.0,
        shifts=shifts,
    )


def _estimate(value: float, half: float) -> Estimate:
    return Estimate(value=value, low=value - half, high=value + half)


def missingness(rng: np.random.Generator, loss: float, *, strong: bool) -> Missingness:
    differences = []
    for n, (name, label, unit, group) in enumerate(COVARIATES):
        value = float(rng.normal(0, 0.03)) + (0.34 / (n + 1) if strong else 0)
        half = 0.05 + 0.02 * float(rng.random())
        stored = -value * loss / (1 - loss)
        rates = [max(0.0, loss * (1 + value * (k - 4) * 0.6)) for k in range(8)]
        differences.append(
            Difference(
                covariate=Covariate(name=name, label=label, unit=unit, group=group),
                mean_all=12.5 * (n + 1),
                sd_all=3.0,
                mean_lost=12.5 * (n + 1) + 3 * value,
                smd=_estimate(value, half),
                equivalence=_estimate(value, half * 0.84),
                before_weighting=_estimate(stored, half / 3),
                after_weighting=_estimate(stored / 8, half / 3),
                total_variation=min(1.0, abs(value)),
                jensen_shannon=min(1.0, abs(value) * 1.1),
                strata=[
                    Stratum(
                        label=f"{2**k}–{2 ** (k + 1)}",
                        low=2.0**k,
                        high=2.0 ** (k + 1),
                        n=30_000,
                        n_lost=int(30_000 * min(1.0, rate)),
                        rate=_estimate(min(1.0, rate), loss / 4),
                    )
                    for k, rate in enumerate(rates)
                ],
            )
        )
    shares = [10 ** (k / 10 - 5) for k in range(47)]
    worst = StratumLoss(kind="source", label="synthetic/chat", n=9_000, n_lost=4_100, rate=0.4556,
                        n_blocks=31, adjusted_p=2e-9)  # fmt: skip
    return Missingness(
        differences=differences,
        worst_strata=[worst] if strong else [],
        n_strata=8_112,
        whole_requests=3 if strong else 0,
        bound=Bound(
            loss_share=loss,
            bias=math.sqrt(loss / (1 - loss)),
            curve=[BoundPoint(loss_share=s, bias=math.sqrt(s / (1 - s))) for s in shares],
        ),
        could_ask=["whether losses depend on the values of the rows"],
        could_not_ask=["whether losses depend on the entropy of the model: no table records it"],
    )


def mechanism(rng: np.random.Generator, *, rejected: bool) -> Mechanism:
    tests = []
    for n, (name, label, unit, group) in enumerate(COVARIATES):
        hit = rejected and n in (0, 3)
        p = 0.0004 if hit else float(rng.uniform(0.05, 1))
        tests.append(
            Association(
                name=("shift", "event", "within", "change")[n % 4],
                covariate=Covariate(name=name, label=label, unit=unit, group=group),
                statistic=float(rng.normal()) + 4 * hit,
                p=p,
                adjusted_p=min(1.0, 10 * p),
                rejected=hit,
                n_units=999 if n % 4 == 0 else 212,
                unit="shifts" if n % 4 == 0 else "blocks",
                naive_p=p * 1e-9,
            )
        )
    load = Family(
        question="load", n_tests=len(tests), p=0.0004 if rejected else 0.2,
        adjusted_p=0.0016 if rejected else 0.3, n_draws=40_000,
        drawn="circular shifts of the losses", least_p=1 / 40_000, least_adjusted_p=4 / 40_000,
        could_be_found=True, needed=80,
    )  # fmt: skip
    return Mechanism(
        tests=tests,
        families=[load],
        n_events=212,
        n_steps=40_000,
        n_lost_steps=480,
        n_partial_steps=3,
        n_blocks=50,
        block_steps=800,
        detectable=0.081,
    )


def queues(rng: np.random.Generator, loss: float) -> Queues:
    load = 90 + 60 * np.sin(np.arange(120) / 9) + rng.normal(0, 8, 120)
    computed = (load * 90).astype(int)
    rate = np.clip((load - 100) / 50, 0, 1) ** 2 * loss * 6
    lost = np.minimum(computed, (computed * rate).astype(int))
    trace = [
        TracePoint(t_s=2.5 * k, seconds=2.5, computed=int(c), lost=int(x), load=float(w))
        for k, (c, x, w) in enumerate(zip(computed, lost, load, strict=True))
    ]
    peaks = [2.5 * k for k in range(120) if rate[k] > 0.5 * rate.max()]
    stages = (("staging", 4), ("ring", 64), ("pool", 3))
    return Queues(
        trace=trace,
        stalls=[
            Stall(stage="ring", n=len(peaks), seconds=31.4, marks_s=peaks),
            Stall(stage="pool", n=6, seconds=2.2, marks_s=[20, 21, 80, 160, 161, 240]),
        ],
        occupancy=[
            Occupancy(
                stage=stage, depth=d, capacity=n, seconds=float(100 / (1 + d) + 30 * (d == n))
            )
            for stage, n in stages
            for d in range(n + 1)
        ],
        lags=[
            Lag(steps=k, correlation=0.5 * math.exp(-(((k - 12) / 10) ** 2)))
            for k in range(-40, 41, 2)
        ],
        lag_band=LagBand(low=-0.07, high=0.11, n_shifts=40_000, n_effective=412.5),
        loss_by_load=_points(loss, 12),
        loss_by_step=[
            LossCurve(
                covariate=Covariate(name=name, label=label, unit="tokens", group="system"),
                direction="increasing",
                points=_points(loss, width),
            )
            for name, label, width in (
                ("batch_tokens", "tokens in the step", 50),
                ("max_seq_len", "longest context of the step", 200),
            )
        ],
    )


def _points(loss: float, width: int) -> list[Loss]:
    return [
        Loss(
            load=40 + width * k,
            rate=_estimate(loss * k / 5, loss * 0.3),
            fitted=loss * max(k - 1, 0) / 5,
        )
        for k in range(10)
    ]


def weighting() -> Weighting:
    return Weighting(
        n_cells=25,
        n_rows=1_390_000,
        effective_rows=1_182_114.4,
        largest=4.1,
        complexity="token rarity",
        cells=[
            WeightCell(
                load_low=30.0 * k,
                load_high=30.0 * (k + 1),
                label=f"{2 * n}–{2 * n + 2} nats",
                n=27_800,
                n_lost=27_800 * k * (n + 5) // 50,
                rate=k * (n + 5) / 50,
                weight=1 / (1 - k * (n + 5) / 50),
            )
            for k in range(5)
            for n in range(5)
        ],
        balance=[
            Balance(group="system", before=0.083, after=0.004),
            Balance(group="content", before=0.021, after=0.023),
            Balance(group="values", before=0.04, after=0.012),
        ],
        claim="MAR-consistent after weighting on load × token rarity",
    )


def options() -> Options:
    return Options(
        classes=ClassesFile(
            path="/data/classes.parquet",
            sha256="c1a5" * 16,
            n_ranges=20_000,
            n_matching=12_345,
            n_labelled=1_234_567,
            n_positions=2_000_001,
        ),
    )


HOSTILE = "</style></title><script>alert(1)</script>\"'&{{7*7}}{%raw%}\x1b[31m\u202e\x00]]>-->"


def hostile() -> Audit:
    """Return a complete result in which every free text is an attack."""
    return Audit.model_validate(_prefixed(audit("heavy").as_json(), f"{HOSTILE} "))


def enormous(n: int = 1_000, text: str = "<&\x1b>\U000e0001" * 80) -> Audit:
    """Return a result with ``n`` of everything that comes in lists, and texts without end."""
    parts = _prefixed(audit("heavy").as_json(), text)
    parts = {k: _grown(v, n, 0 if k == "drift" else 250) for k, v in parts.items()}
    # Cells of maps that cover each other would be drawn once.
    for k, cell in enumerate(parts["weighting"]["cells"]):
        cell |= {
            "load_low": k // 25 / 3,
            "load_high": (k // 25 + 1) / 3,
            "label": f"{k % 25}{text}",
        }
    for k, cell in enumerate(parts["coverage"]["cells"]):
        cell |= {"token_class": f"{k % 25}{text}", "low": k // 25, "high": k // 25 + 1}
    for k, cell in enumerate(parts["queues"]["occupancy"]):
        cell |= {"stage": f"{k // 40}{text}", "depth": k % 40, "capacity": 30}
    return Audit.model_validate(parts)


def _prefixed(value: Any, text: str, key: str = "") -> Any:
    """Return the value with the text before every string that is free."""
    if isinstance(value, dict):
        of_place = value.get("name") if "bias_is" in value else None
        made = {k: _prefixed(v, text, k) for k, v in value.items()}
        return made if of_place is None else made | {"name": of_place}
    if isinstance(value, list):
        return [_prefixed(v, text, key) for v in value]
    fixed = key in (
        "format",
        "version",
        "level",
        "severity",
        "group",
        "must",
        "engine",
        "family",
        "question",
        "direction",
        "decision",
        "place",
        "what",
        "bias_is",
    )
    return value if fixed or not isinstance(value, str) else text + value


def _grown(value: Any, n: int, inner: int) -> Any:
    """Return the value with ``n`` entries in its lists, and ``inner`` in those of its entries."""
    if isinstance(value, dict):
        return {k: _grown(v, n, inner) for k, v in value.items()}
    if isinstance(value, list) and value and n:
        entries = [_grown(one, inner, inner) for one in value]
        return [copy(entries[k % len(entries)]) for k in range(n)]
    return value


HOOK = "layers.29.residual_post"
LABELS = (f"norm at {HOOK}", *(f"projection {k} at {HOOK}" for k in range(8)))
SHARES = (0.0, 3e-7, 0.0009213, 0.0123456, 0.99951, 0.9999999, 1.0)


def wide(**changes: Any) -> Audit:
    """Return a result whose names and numbers take as much room as real ones can."""
    parts = audit("heavy", **changes).as_json()
    _widen_missingness(parts["missingness"])
    for n, test in enumerate(parts["mechanism"]["tests"]):
        test["covariate"]["label"] = LABELS[n % len(LABELS)]
        test["n_units"], test["unit"] = 1_234_567, "requests"
        test["statistic"] = -1.2345e-05
        test["note"] = "0.21% lost before 70 s, 1.33% after" if n % 2 else ""
    _widen_coverage(parts["coverage"])
    _widen_weighting(parts["weighting"])
    for row in parts["queues"]["occupancy"]:
        row["capacity"] = 1_048_576
    for step in parts["accounting"]["waterfall"]:
        step["n_positions"] *= 100_000
    return Audit.model_validate(parts)


def _widen_missingness(section: dict[str, Any]) -> None:
    for n, difference in enumerate(section["differences"]):
        covariate = difference["covariate"]
        covariate["label"], covariate["unit"] = LABELS[n % len(LABELS)], "activation units"
        difference["strata"] = [
            {
                "label": f"{2**k - 1:,} to {2 ** (k + 1) - 2:,} activation units",
                "n": 1_000_000,
                "n_lost": 1,
                "rate": dict.fromkeys(("value", "low", "high"), SHARES[(n + k) % len(SHARES)]),
            }
            for k in range(8, 18)
        ]


def _widen_coverage(section: dict[str, Any]) -> None:
    cells = section["cells"][:10]
    for k, cell in enumerate(cells):
        cell |= {"token_class": "reference without a row", "low": 2 ** (k + 7)}
        cell |= {"high": 2 ** (k + 8), "stored_share": SHARES[k % len(SHARES)]}
        cell |= {"stored": 123_456_789}
    section["cells"] = cells


def _widen_weighting(section: dict[str, Any]) -> None:
    cell = section["cells"][0]
    section["cells"] = [
        cell
        | {"load_low": 1234.5 * k, "load_high": 1234.5 * (k + 1), "label": f"rarity {n} to {n + 1}"}
        | {"rate": SHARES[(n + k) % len(SHARES)], "weight": 12345.6 * (k + 1)}
        for k in range(10)
        for n in range(6)
    ]
