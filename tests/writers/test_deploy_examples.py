"""The files of examples/deploy: they ask for metrics that are served, and are what they claim."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_metrics import Samples, served
from test_progress import COUNTED, ODD, WITH_LANE, snapshot

from actds_writers.ipc.messages import RunInfo

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"


@pytest.fixture(scope="module")
def samples() -> Samples:
    """Return what a port serves that knows everything but a profile."""
    commits = dataclasses.replace(WITH_LANE.commits, values=ODD)
    of_run = RunInfo("r-1", "tiny", "0123", "live")
    written = dataclasses.replace(WITH_LANE, commits=commits, of_run=of_run)
    return served(snapshot(written, dataclasses.replace(COUNTED, lane_depth=1)))


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DEPLOY / "dashboard.json").read_text())
    return document


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    variables = dashboard()["templating"]["list"]
    found += [v["query"] for v in variables if v["type"] == "query"]
    return found + [rule["expr"] for rule in alerts()]


def test_every_expression_is_of_metrics_and_labels_that_are_served(samples: Samples) -> None:
    labels: dict[str, dict[str, set[str]]] = {}
    for name, pairs in samples:
        known = labels.setdefault(name, {})
        for label, value in pairs:
            known.setdefault(label, set()).add(value)
    of_target = {"job", "instance"}
    for text in expressions():
        asked = re.findall(r"(actds_\w+)(?:\{([^}]*)\})?", text)
        assert asked, text
        for name, selector in asked:
            assert name in labels, f"{name} is not served: {text}"
            for label, sign, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', selector):
                assert label in of_target | set(labels[name]), text
                assert sign == "=~" or value in labels[name][label], text
        kept = of_target.union(*(labels[name] for name, _ in asked))
        for group in re.findall(r"(?:by|on|ignoring|group_left) \(([^)]*)\)", text):
            assert set(group.split(", ")) <= kept, text
        for counter in re.findall(r"(?:rate|increase)\((actds_\w+)", text):
            assert counter.endswith(("_total", "_bucket")), text


def test_the_dashboard_has_a_panel_for_each_thing_to_watch() -> None:
    document = dashboard()
    asked = " ".join(target["expr"] for p in document["panels"] for target in p["targets"])
    for name in (
        *("rows_total", "dropped_tokens_total", "compression_backlog_bytes", "queue_fill_ratio"),
        *("queue_depth", "commit_latency_seconds_bucket", "not_finite_rows_total", "capturing"),
    ):
        assert f"actds_{name}" in asked
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        assert panel["type"] in ("timeseries", "stat", "table") and panel["title"]
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["targets"] and len({t["refId"] for t in panel["targets"]}) == len(
            panel["targets"]
        )
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])


def test_every_alert_has_a_severity_and_says_what_happened() -> None:
    rules = alerts()
    assert {"ActdsCaptureEnded", "ActdsRowsDropped", "ActdsWriterBehind", "ActdsRowsNotFinite"} <= {
        rule["alert"] for rule in rules
    }
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
