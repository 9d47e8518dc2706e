"""Requests with their prefix-cache references resolved, and the tokens around a row."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import actds
from actds.format.readouts import Readouts
from actds_testing.synthetic import make_dataset

HOOKS = ("resid_post.0", "resid_post.1")


class Words:
    """Decodes a token to a word of its number."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f" w{token}" for token in token_ids)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> actds.Dataset:
    folder = tmp_path_factory.mktemp("context") / "acts"
    return actds.open(make_dataset(folder, n_requests=60, seed=3, hooks=HOOKS))


@pytest.fixture(scope="module")
def holes(tmp_path_factory: pytest.TempPathFactory) -> actds.Dataset:
    folder = tmp_path_factory.mktemp("context-holes") / "acts"
    make_dataset(folder, n_requests=40, seed=5, hooks=HOOKS, drops=True, sealed=False)
    return actds.open(
        make_dataset(
            folder, n_requests=40, seed=6, hooks=HOOKS, drops=True, filtered=True, run="r-more",
            readouts=Readouts(1, seed=0),
        )
    )  # fmt: skip


def test_tokens_are_those_whose_digest_the_scheduler_side_recorded(whole: actds.Dataset) -> None:
    n_hits = n_compared = 0
    for line in whole.requests().to_pylist():
        request = whole.request(line["request"])
        n = line["prompt_len"] + max(line["generated_len"] - 1, 0)
        digest = hashlib.sha256(request.token_id[:n].astype("<u4").tobytes()).hexdigest()
        if line["token_digest"] is not None and (request.token_id[:n] >= 0).all():
            n_compared += 1
            assert digest == line["token_digest"]
        hits = request.disposition == "cache_ref"
        assert (request.owner[hits] != line["request"]).all()
        n_hits += int(hits.sum())
        positions, acts = request.acts()
        lost = np.isin(request.disposition, ("aborted", "dropped", "undelivered"))
        assert np.array_equal(positions, np.flatnonzero(~lost))
        assert np.array_equal(acts, whole.array(HOOKS[0])[request.row[positions]])
    assert n_hits > 50 and n_compared > 40


def test_rows_are_of_the_position_and_its_owner(holes: actds.Dataset) -> None:
    tokens = holes.tokens(run=True).to_pylist()
    n_lost = 0
    for run in holes.catalog.run_ids:
        for line in holes.catalog.table("requests", run).to_pylist():
            request = holes.request(line["request"], run=run, hook=HOOKS[1])
            for position, row in enumerate(request.row.tolist()):
                if row < 0:
                    n_lost += 1
                    continue
                stored = tokens[row]
                assert (stored["run"], stored["position"]) == (run, position)
                assert stored["request"] == request.owner[position]
                assert stored["token_id"] == request.token_id[position]
            assert set(request.disposition[request.row >= 0]) <= {"captured", "cache_ref"}
    assert n_lost > 20


def test_tokens_of_lost_rows_come_from_the_readouts(holes: actds.Dataset) -> None:
    known = {run: 0 for run in holes.catalog.run_ids}
    for run in known:
        for line in holes.catalog.table("requests", run).to_pylist():
            request = holes.request(line["request"], run=run)
            known[run] += int(((request.row < 0) & (request.token_id >= 0)).sum())
            n = line["prompt_len"] + max(line["generated_len"] - 1, 0)
            if (request.token_id[:n] >= 0).all() and line["token_digest"] is not None:
                ids = request.token_id[:n].astype("<u4").tobytes()
                assert hashlib.sha256(ids).hexdigest() == line["token_digest"]
    assert known["r-synthetic"] == 0 and known["r-more"] > 0


def test_a_row_leads_to_the_text_around_it(whole: actds.Dataset) -> None:
    n_across = 0
    for row in range(0, len(whole.array(HOOKS[0])), 7):
        found = whole.context(row, before=3, after=2, tokenizer=Words())
        stored = whole.tokens().slice(row, 1).to_pylist()[0]
        assert (found.request, found.position) == (stored["request"], stored["position"])
        at = found.position - found.start
        assert at == min(3, found.position) and found.token_id[at] == stored["token_id"]
        assert f"⟦ w{stored['token_id']}⟧" in found.text
        request = whole.request(found.request)
        stop = found.position + 3
        assert np.array_equal(found.token_id, request.token_id[found.start : stop])
        n_across += (request.owner[found.start : stop] != found.request).any()
    assert n_across > 3
    assert whole.context(-1).pieces is None and whole.context(-1).text == ""


def test_unknown_tokens_are_shown_as_unknown(holes: actds.Dataset) -> None:
    texts = [
        holes.request(line["request"], run="r-synthetic").text(Words())
        for line in holes.catalog.table("requests", "r-synthetic").to_pylist()
    ]
    assert any("�" in text for text in texts) and any("�" not in text for text in texts)


def test_what_is_not_there_is_refused(whole: actds.Dataset, holes: actds.Dataset) -> None:
    with pytest.raises(actds.ActdsError, match=r"E014 request: request 999 of run r-synthetic"):
        whole.request(999)
    with pytest.raises(
        actds.ActdsError, match=r"E014 run: None; expected one of r-synthetic, r-more"
    ):
        holes.request(0)
    with pytest.raises(actds.ActdsError, match="E014"):
        whole.request(0, hook="resid_post.9")
    with pytest.raises(IndexError, match="row 100000"):
        whole.context(100_000)
