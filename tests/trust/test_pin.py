"""A pinned seal: what it covers is read, and nothing else passes for it."""

from __future__ import annotations

import functools
import json
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import google_crc32c
import numpy as np
import pytest
from click.testing import CliRunner

import actds
from actds.cli import cli
from actds.dataset.commit import commit_shard
from actds.errors import ActdsError
from actds.explore.show import norm_profile
from actds.format import canonical
from actds.rewrite.recompression import recompress
from actds_testing.remote_servers import web_server
from actds_testing.synthetic import make_dataset
from actds_validators.validate.validation import Validation, validate


def digest_of(acts: Path, n: int = 1) -> str:
    return canonical.digest((acts / f"seal/{n:04d}.json").read_bytes())


def grow(acts: Path, seed: int = 9, run: str = "r-second") -> str:
    """Add a run and seal again; return the digest of the new seal."""
    make_dataset(acts, n_requests=4, seed=seed, run=run)
    return actds.open(acts).digest


def code_of(function: Callable[..., object], *args: Any, **options: Any) -> str:
    with pytest.raises(ActdsError) as caught:
        function(*args, **options)
    return caught.value.code


def codes(found: Validation) -> set[str]:
    return {finding.code for finding in found.errors}


def content(dataset: actds.Dataset) -> tuple[Any, ...]:
    rows = {hook: np.asarray(dataset.array(hook)[:]).view(np.uint8) for hook in dataset.hooks}
    names = ("requests", "steps", "spans", "drops")
    tables = [getattr(dataset, name)(run=True).to_pylist() for name in names]
    return rows, tables, dataset.tokens(run=True).to_pylist(), list(dataset.runs)


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    rows, others = one[0], other[0]
    return one[1:] == other[1:] and all(np.array_equal(rows[k], others[k]) for k in rows)


def test_a_pin_opens_what_it_covers_whatever_was_added_since(acts: Path) -> None:
    pin, before = digest_of(acts), content(actds.open(acts))
    assert same(before, content(actds.open(acts, seal=f"sha256:{pin}")))
    second = grow(acts)
    assert second != pin and not same(before, content(actds.open(acts)))
    pinned = actds.open(acts, seal=pin)
    assert pinned.digest == pin and pinned.seal is not None and pinned.seal.n == 1
    assert same(before, content(pinned))
    make_dataset(acts, n_requests=3, seed=11, run="r-third", sealed=False)
    assert code_of(actds.open, acts) == "E306"
    assert same(before, content(actds.open(acts, seal=pin))), "a run that is not sealed yet"
    assert actds.open(acts, seal=second).digest == second


def test_batches_of_a_pin_are_the_same_after_the_dataset_grew(acts: Path) -> None:
    torch = pytest.importorskip("torch")

    def batches(**options: Any) -> list[Any]:
        with actds.Loader(acts, "resid_post.0", batch=8, **options) as loader:
            return [batch.clone() for batch in loader]

    pin, before = digest_of(acts), batches()
    grow(acts)
    assert len(batches()) > len(before)
    after = batches(seal=pin)
    assert len(before) == len(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    for source in ([acts], {acts: 1.0}, actds.open(acts)):
        assert code_of(actds.Loader, source, seal=pin) == "E014"


def test_a_stream_of_a_pin_reads_the_pinned_rows(acts: Path) -> None:
    pytest.importorskip("datasets")
    pin = digest_of(acts)
    n_rows = actds.open(acts).n_rows
    grow(acts)
    stream = actds.load_dataset(acts, streaming=True, seal=pin)
    assert sum(1 for _ in stream) == n_rows


def test_a_validation_proves_that_the_dataset_extends_the_pin(acts: Path) -> None:
    pin = digest_of(acts)
    assert (validate(acts, seal=pin).pinned, validate(acts).pinned) == (1, None)
    second = grow(acts)
    found = validate(acts, seal=f"sha256:{pin}")
    assert (found.pinned, found.seal, codes(found)) == (1, 2, set())
    shown = CliRunner().invoke(cli, ["validate", str(acts), "--seal", f"sha256:{pin}"])
    assert shown.exit_code == 0 and "extends the pinned seal 1" in shown.stdout
    told = CliRunner().invoke(cli, ["validate", str(acts), "--seal", second, "--json"])
    assert json.loads(told.stdout)["pinned"] == 2


def rolled_back(acts: Path) -> tuple[Path, str]:
    old = Path(shutil.copytree(acts, acts.parent / "old"))
    return old, grow(acts)


def seal_removed(acts: Path) -> tuple[Path, str]:
    pin = grow(acts)
    for file in (acts / "seal").glob("0002*"):
        file.unlink()
    return acts, pin


def forked(acts: Path) -> tuple[Path, str]:
    other = Path(shutil.copytree(acts, acts.parent / "fork"))
    pin = grow(acts, seed=9)
    assert grow(other, seed=10) != pin
    return other, pin


def fork_that_went_on(acts: Path) -> tuple[Path, str]:
    fork, pin = forked(acts)
    grow(fork, seed=12, run="r-third")
    return fork, pin


def another_dataset(acts: Path) -> tuple[Path, str]:
    return make_dataset(acts.parent / "other", n_requests=3, seed=5), digest_of(acts)


@pytest.mark.parametrize(
    "make", [rolled_back, seal_removed, forked, fork_that_went_on, another_dataset],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_a_rollback_or_a_fork_is_refused(
    make: Callable[[Path], tuple[Path, str]], acts: Path
) -> None:
    path, pin = make(acts)
    assert code_of(actds.open, path, seal=pin) == "E804"
    assert code_of(actds.Loader, path, seal=pin) == "E804"
    assert code_of(actds.load_dataset, path, streaming=True, seal=pin) == "E804"
    found = validate(path, seal=pin)
    assert "E804" in codes(found) and found.pinned is None and found.exit_code() == 1


def rewrite_history(acts: Path) -> None:
    """Change the first seal; everything else stays as it was."""
    file = acts / "seal/0001.json"
    document = json.loads(file.read_bytes())
    file.write_bytes(canonical.dump(document | {"sealed_ns": document["sealed_ns"] + 1}))


def remove_a_chain(acts: Path) -> None:
    heads = json.loads((acts / "seal/0001.json").read_bytes())["heads"]
    shutil.rmtree(acts / "ledger" / sorted(heads)[0])


def shorten_a_chain(acts: Path) -> None:
    heads = json.loads((acts / "seal/0001.json").read_bytes())["heads"]
    sorted((acts / "ledger" / sorted(heads)[0]).iterdir())[-1].unlink()


def lengthen_a_chain(acts: Path) -> None:
    heads = json.loads((acts / "seal/0001.json").read_bytes())["heads"]
    last = sorted((acts / "ledger" / sorted(heads)[0]).iterdir())[-1]
    shutil.copy(last, last.with_name(f"{int(last.stem) + 1:08d}.json"))


def change_the_genesis(acts: Path) -> None:
    file = acts / "actds.json"
    file.write_bytes(canonical.dump(json.loads(file.read_bytes()) | {"writer": "another"}))


def number_a_seal_anew(acts: Path) -> None:
    """Put the pinned seal in the place of the second one."""
    shutil.copy(acts / "seal/0001.json", acts / "seal/0002.json")
    rewrite_history(acts)


CHANGES = {
    rewrite_history: "E804",
    remove_a_chain: "E301",
    shorten_a_chain: "E307",
    lengthen_a_chain: "E303",
    change_the_genesis: "E307",
    number_a_seal_anew: "E307",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_pin_covers_cannot_change(change: Callable[[Path], None], acts: Path) -> None:
    pin = digest_of(acts)
    grow(acts)
    change(acts)
    assert code_of(actds.open, acts, seal=pin) == CHANGES[change]
    found = validate(acts, seal=pin)
    assert found.exit_code() in (1, 3) and codes(found)


def test_what_is_no_digest_is_no_pin(acts: Path) -> None:
    pin = digest_of(acts)
    for text in ("", pin[:-1], f"{pin}\n", pin.upper(), f"md5:{pin}", f"sha256:{pin}0", "latest"):
        for use in (actds.open, validate, actds.Loader):
            assert code_of(use, acts, seal=text) == "E009", text
    shown = CliRunner().invoke(cli, ["validate", str(acts), "--seal", "x"])
    assert shown.exit_code == 2 and shown.stderr.startswith("E009 --seal")


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Return a sealed dataset whose shards were written raw."""
    writing = functools.partial(commit_shard, raw=True)
    with mock.patch("actds_testing.synthetic.commit_shard", writing):
        return make_dataset(tmp_path / "raw", n_requests=8, seed=3)


def test_rows_that_were_replaced_since_are_not_those_that_were_pinned(raw: Path) -> None:
    pin, before = digest_of(raw), content(actds.open(raw))
    recompress(raw, keep=True)
    found = validate(raw, seal=pin)
    assert codes(found) == {"E805"} and found.pinned is None and not validate(raw).errors
    pinned = actds.open(raw, seal=pin)
    assert {shard.manifest.compression for shard in pinned.shards} == {"raw"}
    assert same(before, content(pinned)), "the shards themselves are there, and are read"
    now = digest_of(raw, 2)
    assert validate(raw, seal=now).pinned == 2, "who pins the new seal has what it covers"
    recompress(raw)
    assert code_of(actds.open, raw, seal=pin) == "E805"


def test_a_replacement_of_rows_that_came_later_leaves_the_pin_alone(raw: Path) -> None:
    recompress(raw)
    pin = digest_of(raw, 2)
    writing = functools.partial(commit_shard, raw=True)
    with mock.patch("actds_testing.synthetic.commit_shard", writing):
        grow(raw)
    recompress(raw)
    found = validate(raw, seal=pin)
    assert (found.pinned, found.seal, codes(found)) == (2, 4, set())


def test_a_pin_holds_where_nothing_can_be_listed(acts: Path) -> None:
    pytest.importorskip("obstore")
    pin, before = digest_of(acts), content(actds.open(acts))
    grow(acts)
    with web_server(acts.parent) as port:
        uri = f"http://127.0.0.1:{port}/{acts.name}"
        assert same(before, content(actds.open(uri, seal=pin)))
        assert code_of(actds.open, uri, seal="0" * 64) == "E804"


def forge(acts: Path, hook: str = "resid_post.0") -> tuple[Path, bytes, bytes]:
    """Change one value of a chunk, and make its checksum right.

    Returns:
        The file, its bytes as they were committed, and as they are now.
    """
    file = sorted(acts.glob(f"shards/*/acts.zarr/{hook}/c/0/0"))[0]
    meta = json.loads((file.parents[2] / "zarr.json").read_text())
    n_chunks = -(-meta["shape"][0] // meta["codecs"][0]["configuration"]["chunk_shape"][0])
    whole = file.read_bytes()
    index = np.frombuffer(whole[-16 * n_chunks - 4 : -4], "<u8").reshape(-1, 2)
    offset, length = (int(number) for number in index[0])
    before = np.asarray(actds.open(acts).array(hook)[:])
    for at in range(length - 6, 40, -1):
        forged = bytearray(whole)
        forged[offset + at] ^= 0x55
        body = bytes(forged[offset : offset + length - 4])
        crc = int(google_crc32c.value(body)).to_bytes(4, "little")
        forged[offset + length - 4 : offset + length] = crc
        file.write_bytes(forged)
        try:
            after = np.asarray(actds.open(acts).array(hook)[:])
        except ActdsError:
            continue
        if (after != before).any():
            return file, whole, bytes(forged)
    raise AssertionError("no byte changes a value")


def first_batch(path: Path | str, **options: Any) -> Any:
    with actds.Loader(path, "resid_post.0", batch=8, **options) as loader:
        return next(loader)


def mapped(path: Path | str, **options: Any) -> Any:
    return len(actds.load_dataset(path, cache_dir=f"{path}-cache", **options))


def exported(path: Path | str, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        actds.export(actds.open(path, **options), f"{folder}/out", to="safetensors")


DOORS: dict[str, Callable[..., object]] = {
    "slice": lambda path, **options: actds.open(path, **options).array("resid_post.0")[:],
    "row": lambda path, **options: actds.open(path, **options).array("resid_post.0")[-1],
    "loader": first_batch,
    "stream": lambda path, **o: list(actds.load_dataset(path, streaming=True, **o)),
    "map": mapped,
    "stats": lambda path, **options: actds.open(path, **options).stats("resid_post.0"),
    "scale": functools.partial(first_batch, normalize="norm"),
    "export": exported,
    "norms": lambda path, **o: norm_profile(
        (dataset := actds.open(path, **o)).catalog, dataset.array("resid_post.0")
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_forged_value_is_refused_at_every_door_of_a_pin(acts: Path, door: str) -> None:
    pin = digest_of(acts)
    file, sound, forged = forge(acts)
    DOORS[door](acts)  # without a pin the checksum of the chunk is all that there is, and is right
    assert code_of(DOORS[door], acts, seal=pin) == "E202"
    file.write_bytes(sound)
    DOORS[door](acts, seal=pin)
    file.write_bytes(forged)
    if door not in ("map", "stats"):  # which keep what they made of the sound bytes
        assert code_of(DOORS[door], acts, seal=pin) == "E202"


def test_the_audit_reads_no_array_and_no_table_that_changed(acts: Path) -> None:
    pytest.importorskip("scipy")
    forge(acts)
    actds.audit(acts)
    table = sorted(acts.glob("shards/*/tokens.parquet"))[0]
    data = bytearray(table.read_bytes())
    data[len(data) // 3] ^= 1
    table.write_bytes(data)
    assert code_of(actds.audit, acts) == "E202"


def test_a_file_that_changes_while_it_is_open_is_refused(acts: Path) -> None:
    array = actds.open(acts, seal=digest_of(acts)).array("resid_post.0")
    array[:]
    forge(acts)
    assert code_of(array.__getitem__, slice(None)) == "E202"


def test_a_worker_of_another_process_is_as_strict(acts: Path) -> None:
    pytest.importorskip("obstore")
    pin = digest_of(acts)
    with web_server(acts.parent) as port:
        for uri in (acts, f"http://127.0.0.1:{port}/{acts.name}"):
            for seal, binds in ((None, False), (pin, True)):
                store = actds.open(uri, seal=seal).catalog.store
                assert pickle.loads(pickle.dumps(store)).binds is binds


def test_results_of_forged_rows_are_not_those_of_a_pin(acts: Path) -> None:
    pin, right = digest_of(acts), actds.open(acts).array("resid_post.0")[:].astype(np.float64)
    file, sound, _ = forge(acts)
    wrong = actds.open(acts).stats("resid_post.0").mean
    assert not np.allclose(wrong, right.mean(0), rtol=1e-12)
    file.write_bytes(sound)
    np.testing.assert_allclose(actds.open(acts, seal=pin).stats("resid_post.0").mean, right.mean(0))


@pytest.mark.parametrize("kept", [False, True])
def test_a_server_that_answers_other_bytes_later_is_refused(
    acts: Path, kept: bool, tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    pin = digest_of(acts)
    file, sound, forged = forge(acts)
    file.write_bytes(sound)
    cache = {"cache": tmp_path / "cache", "cache_bytes": 1 << 30} if kept else {}
    with web_server(acts.parent) as port:
        uri = f"http://127.0.0.1:{port}/{acts.name}"
        dataset = actds.open(uri, seal=pin, **cache)
        rows = dataset.array("resid_post.0")[:]
        assert np.array_equal(rows, actds.open(acts).array("resid_post.0")[:])
        file.write_bytes(forged)
        if kept:  # what the cache holds is compared as well, and asked for again where it is wrong
            assert np.array_equal(dataset.array("resid_post.0")[:], rows)
            shutil.rmtree(tmp_path / "cache")
        assert code_of(dataset.array("resid_post.0").__getitem__, slice(None)) == "E202"
        assert code_of(first_batch, uri, seal=pin) == "E202"
        DOORS["slice"](uri)
