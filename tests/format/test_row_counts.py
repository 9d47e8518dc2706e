"""Counts of rows that are not finite or zero: those of numpy, in every maker of a shard."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import actds
from actds.cli import cli
from actds.dataset.commit import ShardRows, commit_shard
from actds.dataset.info import describe
from actds.dataset.ledger import Chain
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.format.encoding import ArrayEncoder, encode_array
from actds.format.schema import RowCounts
from actds.rewrite.recompression import recompress
from actds.rewrite.shuffling import shuffle
from actds.store.local import LocalStore
from actds_testing import forge, independent, synthetic
from actds_testing.synthetic import make_dataset
from actds_validators.validate.validation import validate

Bits = np.ndarray[Any, Any]
HOOKS = ("resid_post.0", "resid_post.1")
NONE = RowCounts(not_finite=0, zero=0)
ODD = {"E601", "E602"}


def numpy_counts(bits: Bits, dtype: str) -> RowCounts:
    """Count by the values that numpy and ml_dtypes see, not by their bits."""
    values = bits.view(DTYPES[dtype].native)
    with np.errstate(invalid="ignore"):
        finite, zero = np.isfinite(values).all(axis=1), (values == 0).all(axis=1)
        infinite = ~finite & ~np.isnan(values).any(axis=1)
    return RowCounts(
        not_finite=int((~finite).sum()), zero=int(zero.sum()), infinite=int(infinite.sum())
    )


def special_values(dtype: str) -> dict[str, Bits]:
    """Return bits by what they are: NaN payloads of both signs, and what is next to them."""
    kind = DTYPES[dtype]
    sign, one = kind.magnitude + 1, kind.exponent & -kind.exponent
    positive = {
        "infinity": [kind.exponent],
        "NaN": [kind.exponent + 1, kind.exponent | one >> 1, kind.magnitude],
        "largest finite": [kind.exponent - 1],
        "second largest exponent": [kind.exponent - one],
        "smallest normal": [one],
        "subnormal": [1, one - 1],
        "zero": [0],
    }
    return {
        name: np.array([*bits, *(bit | sign for bit in bits)], kind.bits)
        for name, bits in positive.items()
    }


def test_special_values_are_what_they_are_called() -> None:
    for dtype, kind in DTYPES.items():
        of = {name: bits.view(kind.native) for name, bits in special_values(dtype).items()}
        with np.errstate(invalid="ignore"):  # ml_dtypes asks signalling NaNs too
            assert np.isnan(of.pop("NaN")).all() and np.isinf(of.pop("infinity")).all()
        assert (of.pop("zero") == 0).all()
        assert all(np.isfinite(values).all() and (values != 0).all() for values in of.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("raw", [False, True])
def test_every_pattern_of_16_bits_counts_as_numpy_has_it(dtype: str, raw: bool) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    alone = patterns[:, None]
    assert encode_array(alone, dtype, raw=raw).counts == numpy_counts(alone, dtype)
    # Each pattern as the only odd value of a chunk: what is looked at first must not miss it.
    for channel in (0, 2):
        for pattern in special_values(dtype).values():
            for bits in pattern:
                rows = np.full((2, 3), 0x3C00, np.uint16)
                rows[1, channel] = bits
                assert encode_array(rows, dtype, raw=raw).counts == numpy_counts(rows, dtype)


def random_row(rng: np.random.Generator, dtype: str, d_model: int) -> Bits:
    return rng.integers(0, 2 * DTYPES[dtype].magnitude + 2, d_model).astype(DTYPES[dtype].bits)


def finite_row(rng: np.random.Generator, dtype: str, d_model: int) -> Bits:
    values = rng.standard_normal(d_model).astype(DTYPES[dtype].native)
    return values.view(DTYPES[dtype].bits)


def zero_row(rng: np.random.Generator, dtype: str, d_model: int) -> Bits:
    return rng.choice(special_values(dtype)["zero"], d_model)


ROWS: dict[str, Callable[[np.random.Generator, str, int], Bits]] = {
    "random": random_row, "finite": finite_row, "zero": zero_row,
}  # fmt: skip


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_counts_are_those_of_numpy_in_every_geometry(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    # From one padded chunk to some chunks of 1 to 8 rows, the last one of every length.
    d_model = data.draw(st.sampled_from([1, 2, 3, 17, 64, 1 << 16, (1 << 17) + 1, 1 << 19]))
    n_rows = data.draw(st.integers(1, 21 if d_model < 1 << 18 else 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits = np.stack([
        ROWS[data.draw(st.sampled_from(list(ROWS)))](rng, dtype, d_model) for _ in range(n_rows)
    ])  # fmt: skip
    odd = special_values(dtype)
    for name in data.draw(st.lists(st.sampled_from(list(odd)), max_size=6)):
        row = data.draw(st.integers(0, n_rows - 1))
        channel = data.draw(st.sampled_from([0, d_model // 2, d_model - 1]))
        bits[row, channel] = rng.choice(odd[name])
    expected = numpy_counts(bits, dtype)
    raw = data.draw(st.booleans())
    assert encode_array(bits, dtype, raw=raw).counts == expected
    encoder = ArrayEncoder(bits, dtype, order=rng.permutation(n_rows), raw=raw)
    out = np.empty(encoder.capacity, np.uint8)
    for index in rng.permutation(encoder.n_chunks):
        encoder.encode(int(index), out)
    assert encoder.counts == expected


def test_threads_count_every_chunk_once() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (1000, 2048), np.uint16)
    bits[::3] &= 0x3FFF
    bits[::7] = 0
    with ThreadPoolExecutor(4) as pool:
        counts = encode_array(bits, "bfloat16", pool=pool).counts
    assert counts == numpy_counts(bits, "bfloat16") and counts.not_finite and counts.zero == 143


# ---- makers of shards


def odd_dataset(path: Path, *, raw: bool = False, **options: Any) -> Path:
    """Write a dataset in which rows of one hook are not finite, and of the other zero."""

    def commit(store: Any, writer: Any, rows: ShardRows, **named: Any) -> Any:
        hooks = {hook: bits.copy() for hook, bits in rows.hooks.items()}
        broken, zero = hooks[HOOKS[0]], hooks[HOOKS[1]]
        broken[::4, 3], broken[1::8, 0], zero[::5] = 0x7FC0, 0xFF80, 0x8000
        return commit_shard(store, writer, replace(rows, hooks=hooks), raw=raw, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "commit_shard", commit)
        return make_dataset(path, **options)


def counts_of(path: Path) -> dict[str, RowCounts]:
    return RowCounts.by_hook(manifest.values for manifest in read_catalog(LocalStore(path)).shards)


def decoded(path: Path) -> dict[str, RowCounts]:
    """Return the counts of the rows that a reader gets."""
    dataset = actds.open(path)
    arrays = {hook: dataset.array(hook) for hook in HOOKS}
    return {h: numpy_counts(a.bits(0, len(a)), "bfloat16") for h, a in arrays.items()}


def codes(path: Path) -> set[str]:
    return {finding.code for finding in validate(path, "deep").findings}


def test_a_shard_counts_its_rows_with_any_threads(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 16, (64, 32), np.uint16)
    bits[5:9] = 0
    columns = {"request": np.zeros(64), "position": np.arange(64), "token_id": np.arange(64),
               "step": np.arange(64), "attempt": np.zeros(64), "chunk": np.zeros(64),
               "flags": np.zeros(64)}  # fmt: skip
    tokens = {name: column.astype(np.int64) for name, column in columns.items()}
    rows = ShardRows(dict.fromkeys(HOOKS, bits), dict.fromkeys(HOOKS, "bfloat16"), tokens,
                     "prefill", 0, 63)  # fmt: skip
    store = LocalStore(tmp_path)
    chain = Chain.begin(store, "0" * 32, "r-1", "writer", "test")
    for n_threads in (0, 3):
        manifest = commit_shard(store, chain, rows, shard=f"s-{n_threads}", run="r-1",
                                order="permuted", seed=1, n_threads=n_threads)  # fmt: skip
        assert manifest.values == dict.fromkeys(HOOKS, numpy_counts(bits, "bfloat16"))


def test_recompression_keeps_the_counts(tmp_path: Path) -> None:
    path = odd_dataset(tmp_path / "d", raw=True)
    before = counts_of(path)
    assert before == decoded(path) and before[HOOKS[0]].not_finite and before[HOOKS[1]].zero
    assert recompress(path).shards
    assert counts_of(path) == before and "E604" not in codes(path)


def test_a_shuffled_copy_counts_the_rows_of_each_new_shard(tmp_path: Path) -> None:
    path = odd_dataset(tmp_path / "d", n_requests=30)
    shuffle(path, tmp_path / "copy", rows_per_shard=64)
    assert len(read_catalog(LocalStore(tmp_path / "copy")).shards) > 3
    assert counts_of(tmp_path / "copy") == counts_of(path) == decoded(path)
    assert codes(tmp_path / "copy") == ODD


def test_rows_are_not_recompressed_under_false_counts(tmp_path: Path) -> None:
    path = odd_dataset(tmp_path / "d", raw=True)
    manifest = min(path.glob("shards/*/shard.json"))
    clean = {hook: NONE.model_dump() for hook in HOOKS}
    forge.edit(manifest, lambda document: document.update(values=clean))
    forge.relink(path)
    assert codes(path) == ODD | {"E604"}
    with pytest.raises(ActdsError, match=f"E604 shards/{manifest.parent.name}/shard.json"):
        recompress(path)
    assert manifest.parent.name in {m.shard for m in read_catalog(LocalStore(path)).shards}


FALSE: dict[str, tuple[str, Callable[[dict[str, Any], int], object]]] = {
    "one more": ("E604", lambda values, n: values[HOOKS[0]].update(zero=1)),
    "one less": (
        "E604",
        lambda values, n: values[HOOKS[0]].update(not_finite=values[HOOKS[0]]["not_finite"] - 1),
    ),
    "infinity as NaN": ("E604", lambda values, n: values[HOOKS[0]].pop("infinite")),
    "NaN as infinity": (
        "E604",
        lambda values, n: values[HOOKS[0]].update(infinite=values[HOOKS[0]]["not_finite"]),
    ),
    "more infinite than not finite": (
        "E103",
        lambda values, n: values[HOOKS[0]].update(infinite=values[HOOKS[0]]["not_finite"] + 1),
    ),
    "hooks swapped": (
        "E604",
        lambda values, n: values.update({HOOKS[0]: values[HOOKS[1]], HOOKS[1]: values[HOOKS[0]]}),
    ),
    "all rows": ("E604", lambda values, n: values[HOOKS[1]].update(not_finite=n, zero=0)),
    "too many rows": ("E103", lambda values, n: values[HOOKS[1]].update(not_finite=n)),
    "no hook": ("E103", lambda values, n: values.pop(HOOKS[1])),
    "another hook": ("E103", lambda values, n: values.update({"mlp_in.0": values[HOOKS[0]]})),
    "no count": ("E103", lambda values, n: values[HOOKS[1]].pop("zero")),
    "another count": ("E103", lambda values, n: values[HOOKS[1]].update(nan=0)),
    "negative": ("E103", lambda values, n: values[HOOKS[1]].update(not_finite=-1)),
    "no number": ("E103", lambda values, n: values[HOOKS[1]].update(not_finite=False)),
    "empty": ("E103", lambda values, n: values.clear()),
}


@pytest.mark.parametrize("name", FALSE)
def test_both_validators_refuse_false_counts(name: str, tmp_path: Path) -> None:
    code, lie = FALSE[name]
    path = odd_dataset(tmp_path / "d", n_requests=4)
    assert {f.code for f in independent.validate(path, deep=True)} == codes(path) == ODD
    manifest = min(path.glob("shards/*/shard.json"))
    forge.edit(manifest, lambda document: lie(document["values"], document["n_rows"]))
    forge.relink(path)
    found = [{f.code for f in independent.validate(path, deep=True)}, codes(path)]
    assert all(code in one and not one - ODD - {code} for one in found), found


# ---- what people see


def test_info_and_card_say_by_hook_what_the_rows_hold(tmp_path: Path) -> None:
    path = odd_dataset(tmp_path / "d")
    counts, n_rows = counts_of(path), len(actds.open(path).array(HOOKS[0]))
    n_broken, n_zero = counts[HOOKS[0]].not_finite, counts[HOOKS[1]].zero
    broken = f"{n_broken} of {n_rows} rows of resid_post.0 are not finite (NaN or infinity)\n"
    zero = f"{n_zero} of {n_rows} rows of resid_post.1 are zero in every channel\n"
    page = CliRunner().invoke(cli, ["info", str(path)]).output
    assert f"  {broken}" in page and f"  {zero}" in page
    card = (path / "README.md").read_text().replace("\\", "")
    assert f"- {broken}" in card and f"- {zero}" in card
    hooks = describe(read_catalog(LocalStore(path))).hooks
    assert [(h.n_not_finite, h.n_zero) for h in hooks] == [(n_broken, 0), (0, n_zero)]


def test_rows_that_a_cast_made_infinite_are_said_of_the_hooks_and_runs_that_have_it(
    tmp_path: Path,
) -> None:
    """ml_dtypes casts the rows: counted are those that it makes infinite."""
    path = odd_dataset(tmp_path / "d")
    counts = counts_of(path)[HOOKS[0]]
    assert 0 < counts.infinite < counts.not_finite  # some rows have both, or NaN alone
    lost = f"; {counts.infinite} overflowed in the cast float32 to bfloat16, nearest even"
    for cast, words in {
        "none": "",
        "float16 to bfloat16, nearest even": "",  # whatever float16 holds has a place in bfloat16
        "float32 to bfloat16, nearest even": lost,
        f"{HOOKS[0]}: float32 to bfloat16, nearest even; {HOOKS[1]}: none": lost,
        f"{HOOKS[0]}: none; {HOOKS[1]}: float32 to bfloat16, nearest even": "",
    }.items():
        for record in path.glob("runs/*.json"):
            fact = {"value": cast, "origin": "declared", "reason": None}
            forge.edit(record, lambda d, fact=fact: d["fields"].update({"capture.cast": fact}))
        forge.relink(path)
        page = CliRunner().invoke(cli, ["info", str(path)]).output
        assert f"of {HOOKS[0]} are not finite (NaN or infinity){words}\n" in page
        facts = describe(read_catalog(LocalStore(path))).hooks
        assert [h.n_overflowed for h in facts] == [counts.infinite if words else 0, 0]


def test_of_finite_rows_nothing_is_said(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d")
    page = CliRunner().invoke(cli, ["info", str(path)]).output
    for words in ("not finite", "NaN", "every channel"):
        assert words not in page and words not in (path / "README.md").read_text()
