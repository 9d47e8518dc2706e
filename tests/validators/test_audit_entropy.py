"""Losses that follow the model's entropy over the next token: counted as pandas counts them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from actds.format import tables
from actds_testing.audit_losses import Tables, lose, rows_of
from actds_testing.audit_tokens import audited, tables_of
from actds_testing.simulate import SCENARIOS, simulate
from actds_validators.audit.result import Difference

ENTROPY = "whether losses depend on the model's entropy over the next token"


@pytest.fixture(scope="module")
def sound() -> Tables:
    """Return a run that lost nothing, with an entropy of each sampled token, in nats."""
    found = tables_of(simulate(replace(SCENARIOS["none"], n_steps=3000), 78))
    return {**found, "sampled": sampled(found)}


def sampled(found: Tables) -> pa.Table:
    about = found["requests"].to_pandas()[["request", "prompt_len", "generated_len"]].astype(int)
    lines = about.loc[about.index.repeat(about["generated_len"])].reset_index(drop=True)
    lines["position"] = lines["prompt_len"] + lines.groupby("request").cumcount()
    rng = np.random.default_rng(6)
    lines["entropy"] = np.minimum(rng.gamma(1.2, 0.9, len(lines)), 8)
    lines = lines.assign(step=0, token_id=7, logprob=-1.0, margin=0.5)
    lines = lines.drop(columns=["prompt_len", "generated_len"])
    return tables.build("sampled", {name: lines[name].to_numpy() for name in lines})


def with_bits(found: Tables) -> pd.DataFrame:
    """Return the rows with the entropy over the token after each, joined by pandas."""
    after = found["sampled"].to_pandas()[["request", "position", "entropy"]].astype(float)
    after["position"] -= 1
    rows = rows_of(found).merge(after, "left", on=["request", "position"])
    return rows.assign(bits=rows["entropy"] / np.log(2))


def following(rows: pd.DataFrame, slope: float) -> np.ndarray:
    odds = np.exp(-5.5 + slope * rows["bits"].fillna(0))
    return np.random.default_rng(9).random(len(rows)) < (odds / (1 + odds)).to_numpy()


def difference(found: Tables) -> Difference:
    missing = audited(found).missingness
    assert missing is not None
    assert ENTROPY in missing.could_ask and not any("entropy" in w for w in missing.could_not_ask)
    return next(one for one in missing.differences if one.covariate.name == "entropy")


def test_the_difference_is_that_of_pandas(sound: Tables) -> None:
    rows = with_bits(sound)
    gone = following(rows, 0.6)
    told = difference(lose(sound, lambda _: gone))
    known = rows["bits"].notna()
    assert 0 < known.sum() < len(rows)  # a prompt has an entropy after its last token alone
    assert told.mean_all == pytest.approx(rows.loc[known, "bits"].mean(), rel=1e-6)
    assert told.sd_all == pytest.approx(rows.loc[known, "bits"].std(ddof=0), rel=1e-6)
    assert told.mean_lost == pytest.approx(rows.loc[known & gone, "bits"].mean(), rel=1e-6)
    bands = rows[known].assign(lost=gone[known]).groupby(np.floor(rows.loc[known, "bits"]))
    wanted = {int(band): (len(some), int(some["lost"].sum())) for band, some in bands}
    assert {int(one.low or 0): (one.n, one.n_lost) for one in told.strata} == wanted
    assert told.smd.low > 0.3


def test_weights_mend_losses_that_follow_the_entropy(sound: Tables) -> None:
    """A rate that is constant within the cells is mended whole, another one for the most part."""
    bits = with_bits(sound)["bits"].to_numpy()
    high = np.random.default_rng(9).random(len(bits)) < np.where(bits >= 2, 0.2, 0.002)
    for gone, left in ((high, 0.1), (following(with_bits(sound), 0.6), 0.4)):
        told = difference(lose(sound, lambda _, gone=gone: gone))  # type: ignore[misc]
        assert told.before_weighting is not None and told.after_weighting is not None
        assert told.before_weighting.value < -0.02
        assert abs(told.after_weighting.value) < -left * told.before_weighting.value


def test_losses_that_do_not_follow_it_are_not_blamed(sound: Tables) -> None:
    told = difference(lose(sound, lambda rows: following(with_bits(sound), 0.0)))
    assert told.smd.low < 0 < told.smd.high


def test_a_run_without_the_table_says_that_it_could_not_ask(sound: Tables) -> None:
    bare = {**sound, "sampled": sound["sampled"].slice(0, 0)}
    missing = audited(lose(bare, lambda rows: following(rows.assign(bits=0.0), 0.0))).missingness
    assert missing is not None
    assert f"{ENTROPY}: the run was not harvested with --entropy" in missing.could_not_ask
    assert all(one.covariate.name != "entropy" for one in missing.differences)
