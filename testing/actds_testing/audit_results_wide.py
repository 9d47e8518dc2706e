"""Results whose names and numbers take as much room as real ones can; no dataset behind them."""

from __future__ import annotations

from typing import Any

from actds_testing.audit_results import audit
from actds_validators.audit.result import Audit

HOOK = "layers.29.residual_post"
LABELS = (f"norm at {HOOK}", *(f"projection {k} at {HOOK}" for k in range(8)))
FLOOR_NOTE = (
    "floor: 95th percentile of 20 splits of each side's requests in halves; each prefix counts "
    "once, 904 repeats of one left out"
)
SHARES = (0.0, 3e-7, 0.0009213, 0.0123456, 0.99951, 0.9999999, 1.0)


def wide(**changes: Any) -> Audit:
    """Return a result with long hooks, many narrow strata, bands and cells, and notes."""
    parts = audit("heavy", **changes).as_json()
    _missingness(parts["missingness"])
    for n, test in enumerate(parts["mechanism"]["tests"]):
        test["covariate"]["label"] = LABELS[n % len(LABELS)]
        test["n_units"], test["unit"] = 1_234_567, "requests"
        test["statistic"] = -1.2345e-05
        test["note"] = "0.21% lost before 70 s, 1.33% after" if n % 2 else ""
    _coverage(parts["coverage"])
    _weighting(parts["weighting"])
    for row in parts["queues"]["occupancy"]:
        row["capacity"] = 1_048_576
    for section in parts["drift"]:
        for n, measure in enumerate(section["measures"]):
            measure |= {"hook": HOOK, "value": -1.2345e-05, "floor": 0.00054321, "n": 1_234_567}
            measure["note"] = f"measure {n} of the channels; {FLOOR_NOTE}"
    for step in parts["accounting"]["waterfall"]:
        step["n_positions"] *= 100_000
    return Audit.model_validate(parts)


def _missingness(section: dict[str, Any]) -> None:
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


def _coverage(section: dict[str, Any]) -> None:
    cells = section["cells"][:10]
    for k, cell in enumerate(cells):
        cell |= {"token_class": "reference without a row", "low": 2 ** (k + 7)}
        cell |= {"high": 2 ** (k + 8), "stored_share": SHARES[k % len(SHARES)]}
        cell |= {"stored": 123_456_789}
    section["cells"] = cells


def _weighting(section: dict[str, Any]) -> None:
    cell = section["cells"][0]
    section["cells"] = [
        cell
        | {"load_low": 1234.5 * k, "load_high": 1234.5 * (k + 1), "label": f"rarity {n} to {n + 1}"}
        | {"rate": SHARES[(n + k) % len(SHARES)], "weight": 12345.6 * (k + 1)}
        for k in range(10)
        for n in range(6)
    ]
