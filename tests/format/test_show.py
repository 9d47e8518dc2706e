"""Datasets and loaders in a notebook, and a dataset at a glance: true numbers, harmless text."""

from __future__ import annotations

import builtins
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.explore import show
from actds.explore.show import fates, norm_profile
from actds.format.readouts import Readouts
from actds.format.tables import DISPOSITIONS
from actds_testing.synthetic import make_dataset

HOOKS = ("resid_post.0", "resid_post.1")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> actds.Dataset:
    """Return a dataset of two runs with losses, the second of which has readouts."""
    path = tmp_path_factory.mktemp("show") / "a<script>alert(1)</script>&b"
    make_dataset(path, n_requests=30, seed=1, hooks=HOOKS, drops=True, sealed=False)
    return actds.open(
        make_dataset(path, n_requests=30, seed=2, hooks=HOOKS, drops=True, filtered=True, run="r-b")
    )


@pytest.fixture(scope="module")
def read_out(tmp_path_factory: pytest.TempPathFactory) -> actds.Dataset:
    """Return a dataset with readouts, and first positions of a great norm."""
    path = tmp_path_factory.mktemp("show-readouts") / "acts"
    return actds.open(
        make_dataset(path, n_requests=40, drops=True, readouts=Readouts(1, seed=0), sinks=True)
    )


class Cells(HTMLParser):
    """The cells of tables by row, and every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_a_dataset_shows_its_hooks_rows_phases_runs_and_seal(dataset: actds.Dataset) -> None:
    shown = Cells(dataset._repr_html_())
    facts = {row[0]: row[1:] for row in shown.rows}
    n = dataset.n_rows
    assert facts["runs"] == [f"2 runs, {len(dataset.shards)} shards"]
    assert facts["state"] == [f"seal 1, {dataset.digest[:16]}"]
    assert facts["model"] == ["synthetic-2-layers"]
    phases = dataset.tokens(run=True)["phase"].to_pylist()
    assert facts["phases"] == [
        f"{phases.count('prefill'):,} prefill, {phases.count('decode'):,} decode"
    ]
    for hook in HOOKS:
        assert facts[hook][:3] == [f"{n:,}", "16", "bfloat16"] and facts[hook][3] != "0 B"


def test_names_of_a_dataset_are_text_and_no_markup(dataset: actds.Dataset) -> None:
    with actds.Loader(dataset, HOOKS[0], batch=8, where="position > 2") as loader:
        for text in (dataset._repr_html_(), loader._repr_html_()):
            shown = Cells(text)
            assert shown.tags == {"div", "strong", "table", "tbody", "tr", "th", "td"}
            assert "a<script>alert(1)</script>&b" in "".join(c for row in shown.rows for c in row)


def test_an_unsealed_dataset_says_so(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", sealed=False)
    with pytest.warns(UserWarning, match="E306"):
        opened = actds.open(path, i_accept_unsealed=True)
    assert ["state", "not sealed"] in Cells(opened._repr_html_()).rows


def test_a_loader_shows_its_selection_counts_batches_and_epoch(dataset: actds.Dataset) -> None:
    with actds.Loader(
        dataset, HOOKS[0], batch=16, where="position > 2", exclude="first_position", epochs=3
    ) as loader:
        next(loader)
        facts = {row[0]: row[1] for row in Cells(loader._repr_html_()).rows}
        assert facts["rows"] == f"{loader.n_rows:,} of {dataset.n_rows:,}"
        assert "position > 2" in facts["selection"] and "first_position" in facts["selection"]
        assert facts["left out"] == f"{loader.excluded['first_position']:,} first_position"
        assert (
            facts["batches"]
            == f"{loader.batches_per_epoch:,} of 16 rows an epoch, which leaves out 9 rows"
        )
        assert facts["now"] == f"epoch 0, batch 1 of {loader.batches_per_epoch:,}"
        assert facts["epochs"] == "3" and facts["hooks"] == f"{HOOKS[0]} as bfloat16"


@pytest.mark.parametrize("name", ["dataset", "read_out"])
def test_norms_by_position_are_those_of_the_rows(name: str, request: pytest.FixtureRequest) -> None:
    opened = request.getfixturevalue(name)
    hook = next(iter(opened.hooks))
    profile = norm_profile(opened.catalog, opened.array(hook))
    if name == "read_out":
        readouts = opened.readouts()
        mine = readouts.filter(readouts["hook"].to_numpy(zero_copy_only=False) == hook)
        position, norm = mine["position"].to_numpy(), mine["norm"].to_numpy().astype(float)
        assert len(norm) > opened.n_rows  # lost rows have them, too
    else:
        position = opened.tokens(hook, run=True)["position"].to_numpy()
        norm = np.linalg.norm(opened.array(hook)[:].astype(float), axis=1)
    assert profile.source == ("readouts" if name == "read_out" else "rows")
    assert profile.n_rows == len(norm) == profile.count.sum()
    assert profile.low[0] == 0 and (profile.high[:4] - profile.low[:4] == 1).all()
    assert (profile.low[1:] >= profile.high[:-1]).all() and profile.high[-1] > position.max()
    for k, (low, high) in enumerate(zip(profile.low, profile.high, strict=True)):
        there = norm[(position >= low) & (position < high)]
        assert len(there) == profile.count[k]
        assert np.allclose(profile.quantiles[:, k], np.quantile(there, (0.1, 0.5, 0.9)), rtol=1e-6)


def test_many_rows_are_sampled_from_every_shard(
    dataset: actds.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "SAMPLED_ROWS", 100)
    monkeypatch.setattr(show, "BLOCK_ROWS", 2)
    profile = norm_profile(dataset.catalog, dataset.array(HOOKS[0]))
    assert profile.source == "rows" and 0 < profile.n_rows <= 150 < dataset.n_rows
    assert len(profile.low) > 5


def test_fates_are_those_of_every_position(dataset: actds.Dataset) -> None:
    found = fates(dataset.catalog)
    wanted: dict[tuple[str, str, int], int] = {}
    for run in dataset.catalog.run_ids:
        prompt = {
            line["request"]: line["prompt_len"]
            for line in dataset.catalog.table("requests", run).to_pylist()
        }
        for span in dataset.catalog.table("spans", run).to_pylist():
            for position in range(span["start"], span["stop"]):
                phase = "prefill" if position < prompt[span["request"]] else "decode"
                key = phase, span["disposition"], (position + 1).bit_length() - 1
                wanted[key] = wanted.get(key, 0) + 1
    got = {
        (phase, kind, band): int(found.count[p, d, band])
        for p, phase in enumerate(("prefill", "decode"))
        for d, kind in enumerate(DISPOSITIONS)
        for band in range(len(found.low))
        if found.count[p, d, band]
    }
    assert got == wanted
    assert sum(found.reasons.values()) == found.total == sum(wanted.values())
    assert found.low.tolist()[:4] == [0, 1, 3, 7] and (found.high[:-1] == found.low[1:]).all()


@pytest.mark.standard  # the first figure of a machine asks fc-list for its fonts
def test_plots_are_figures_that_can_be_drawn(
    dataset: actds.Dataset, read_out: actds.Dataset, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra actds[plot]")
    for opened in (dataset, read_out):
        norms, coverage = opened.plot_norms(), opened.plot_coverage()
        lines = norms.axes[0].get_lines()
        assert [line.get_label() for line in lines] == list(opened.hooks)
        profile = norm_profile(opened.catalog, opened.array(next(iter(opened.hooks))))
        assert np.allclose(lines[0].get_ydata(), profile.quantiles[1])
        assert f"{fates(opened.catalog).total:,} positions" in coverage.axes[0].get_title()
        # Every bar is whole: the shares of a band add up to 1.
        widths = [bar.get_width() for bars in coverage.axes[0].containers for bar in bars]
        assert np.isclose(sum(widths), len(coverage.axes[0].get_yticks()))
        for name, figure in (("norms", norms), ("coverage", coverage)):
            figure.savefig(tmp_path / f"{name}.png")
    assert len(read_out.plot_norms(HOOKS[1]).axes[0].get_lines()) == 1


def test_without_matplotlib_a_plot_says_what_to_install(
    dataset: actds.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    for plot in (dataset.plot_norms, dataset.plot_coverage):
        with pytest.raises(actds.ActdsError, match=r"E011 .*(?s:.*)pip install '\.\[plot\]'"):
            plot()


def test_a_hook_that_is_not_there_is_named(dataset: actds.Dataset) -> None:
    with pytest.raises(actds.ActdsError, match="E014"):
        dataset.plot_norms("mlp_out.3")
