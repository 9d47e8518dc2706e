"""The ledger: what was acknowledged stays, what was changed shows, zombies stop."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_store import full_disk

from actds.dataset.ledger import Chain, fence, read_chain, read_ledger
from actds.errors import ActdsError
from actds.format import canonical
from actds.format.schema import FileEntry, PartBody
from actds.store.local import LocalStore

DATASET = "0" * 32


def part(n: int, table: str = "spans") -> PartBody:
    entry = FileEntry(path=f"census/r-1/{table}-{n:06d}.parquet", nbytes=n, sha256="0" * 64)
    return PartBody(table=table, file=entry, n_rows=n)  # type: ignore[arg-type]


def begin(path: Path, n_records: int = 3) -> Chain:
    chain = Chain.begin(LocalStore(path), DATASET, "r-1", "census", "test 1")
    for n in range(n_records - 1):
        chain.append("part", part(n))
    return chain


def file_of(chain: Chain, seq: int) -> Path:
    assert isinstance(chain.store, LocalStore)
    return chain.store.root / f"ledger/{chain.chain}/{seq:08d}.json"


def rewrite(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(canonical.dump(document))


def test_a_chain_is_read_as_it_was_written(tmp_path: Path) -> None:
    chain = begin(tmp_path)
    assert read_chain(chain.store, DATASET, chain.chain).state == "open"
    last = chain.close("finished", {"requests": 2})
    state = read_ledger(chain.store, DATASET)[chain.chain]
    assert [record.type for record in state.records] == ["open", "part", "part", "close"]
    assert (state.state, state.kind, state.run) == ("closed", "census", "r-1")
    assert state.records[-1] == last
    assert state.head == canonical.digest(file_of(chain, 3).read_bytes())
    with pytest.raises(ActdsError, match="E304"):
        chain.append("part", part(9))


def replace_body(path: Path) -> None:
    rewrite(path, lambda record: record["body"].update(n_rows=99))  # type: ignore[attr-defined]


DAMAGES: list[tuple[str, Callable[[Chain], object]]] = [
    ("E301", lambda chain: file_of(chain, 1).unlink()),
    ("E301", lambda chain: file_of(chain, 0).unlink()),
    ("E301", lambda chain: file_of(chain, 2).rename(file_of(chain, 2).with_name("2.json"))),
    ("E301", lambda chain: file_of(chain, 2).rename(file_of(chain, 7))),
    ("E302", lambda chain: replace_body(file_of(chain, 1))),
    ("E303", lambda chain: file_of(chain, 3).write_bytes(file_of(chain, 1).read_bytes())),
    ("E303", lambda chain: rewrite(file_of(chain, 1), lambda r: r.update(dataset="1" * 32))),
    ("E303", lambda chain: rewrite(file_of(chain, 1), lambda r: r.update(chain="c-other"))),
    ("E102", lambda chain: file_of(chain, 1).write_bytes(file_of(chain, 1).read_bytes()[:-1])),
    ("E102", lambda chain: file_of(chain, 1).write_bytes(b"")),
    ("E103", lambda chain: rewrite(file_of(chain, 1), lambda r: r.update(extra=1))),
    ("E103", lambda chain: rewrite(file_of(chain, 1), lambda r: r.update(type="run"))),
    ("E106", lambda chain: rewrite(file_of(chain, 1), lambda r: r.update(version="9.9"))),
]


@pytest.mark.parametrize(("code", "damage"), DAMAGES)
def test_every_change_of_history_shows(
    tmp_path: Path, code: str, damage: Callable[[Chain], object]
) -> None:
    chain = begin(tmp_path)
    damage(chain)
    with pytest.raises(ActdsError) as caught:
        read_ledger(chain.store, DATASET)
    assert caught.value.code == code
    assert caught.value.place.startswith(f"ledger/{chain.chain}")


def test_a_record_after_the_close_shows(tmp_path: Path) -> None:
    chain = begin(tmp_path)
    chain.close("finished", {})
    chain.ended = None  # a writer that does not keep the rule
    chain.append("part", part(5))
    with pytest.raises(ActdsError, match="E304"):
        read_ledger(chain.store, DATASET)


def test_a_fence_stops_a_zombie(tmp_path: Path) -> None:
    chain = begin(tmp_path)
    state = fence(chain.store, DATASET, chain.chain, "its process is gone")
    assert state.state == "fenced" and len(state.records) == 4
    for _ in range(2):
        with pytest.raises(ActdsError, match="E308"):
            chain.append("part", part(5))
    assert read_chain(chain.store, DATASET, chain.chain) == state
    assert fence(chain.store, DATASET, chain.chain, "again") == state


def test_a_name_that_who_fenced_the_chain_has_taken_is_said_to_be_his(tmp_path: Path) -> None:
    chain = begin(tmp_path)
    name = "census/r-1/steps-000009.parquet"
    LocalStore(tmp_path).put_new(name, [b"of who took the run over"])
    fence(chain.store, DATASET, chain.chain, "no sign of life")
    with pytest.raises(ActdsError, match=r"E308.*a fence: no sign of life"), chain.fatal():
        chain.store.put_new(name, [b"of a writer that had stalled"])
    other = begin(tmp_path / "other")
    other.store.put_new(name, [b"of a program that knows no ledger"])
    with pytest.raises(ActdsError, match="E309"), other.fatal():
        other.store.put_new(name, [b"x"])


def test_a_fence_lands_behind_a_writer_that_was_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = begin(tmp_path)
    put_new, late = LocalStore.put_new, [part(7)]

    def racing(store: LocalStore, path: str, parts: list[bytes]) -> object:
        if late:
            chain.append("part", late.pop())
        return put_new(store, path, parts)

    fencer = LocalStore(tmp_path)
    monkeypatch.setattr(fencer, "put_new", racing.__get__(fencer))
    state = fence(fencer, DATASET, chain.chain, "thought dead")
    assert [record.type for record in state.records][-2:] == ["part", "fence"]
    with pytest.raises(ActdsError, match="E308"):
        chain.append("part", part(8))


def test_a_chain_is_dead_after_a_failed_put(tmp_path: Path) -> None:
    chain = begin(tmp_path)
    with full_disk(16), pytest.raises(ActdsError, match="E503"):
        chain.append("part", part(5))
    # The disk is well again; what it kept of this process' writes nobody knows.
    with pytest.raises(ActdsError, match="E503"):
        chain.append("part", part(6))
    with pytest.raises(ActdsError, match="E503"):
        chain.close("finished", {})
    assert len(read_chain(chain.store, DATASET, chain.chain).records) == 3


def test_a_chain_of_a_bad_name_is_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "ledger" / "..evil").mkdir()
    (tmp_path / "ledger" / "..evil" / "00000000.json").write_bytes(b"{}\n")
    with pytest.raises(ActdsError, match="E107"):
        read_ledger(LocalStore(tmp_path), DATASET)


WRITER = """
import sys
from pathlib import Path
from test_ledger import begin, part
chain = begin(Path(sys.argv[1]), 1)
for n in range(10**6):
    print(chain.append("part", part(n)).seq, flush=True)
"""


@pytest.mark.standard
def test_no_acknowledged_record_is_lost_to_a_kill(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / str(i))],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": here},
        )
        for i in range(3)
    ]
    for i, writer in enumerate(writers):
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(20 + 7 * i)]
        writer.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
        writer.wait()
        writer.stdout.close()
        store = LocalStore(tmp_path / str(i))
        ((chain, state),) = read_ledger(store, DATASET).items()
        # One more may be durable than the writer had time to say.
        assert acknowledged[-1] <= state.records[-1].seq <= acknowledged[-1] + 1
        assert fence(store, DATASET, chain, "killed").state == "fenced"
        store.remove_temporary()
        assert all(path.suffix == ".json" for path in store.root.rglob("*") if path.is_file())
