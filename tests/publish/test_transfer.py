"""A dataset goes to the Hub and comes back, bit for bit, through whatever fails on the way."""

from __future__ import annotations

import json
import logging
import re
import shutil
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import actds
from actds.cli import cli
from actds.executor import ExecutorName
from actds.publish import transfer
from actds_testing.hub_server import TOKEN, Hub, flipped
from actds_testing.synthetic import make_dataset

REPO, URI = "someone/acts", "hf://datasets/someone/acts"
SEAL = "seal/0001.json"
# huggingface_hub hands its HTTP client a file in a way that the client gives up.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("hub") / "acts", n_requests=8, drops=True)


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "acts"))


def tree(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def code_of(error: pytest.ExceptionInfo[actds.ActdsError]) -> tuple[str, str]:
    return error.value.code, error.value.place


def test_a_dataset_comes_back_byte_for_byte(hub: Hub, path: Path, tmp_path: Path) -> None:
    told: list[tuple[int, ...]] = []
    pushed = actds.push(path, URI, progress=lambda *facts: told.append(facts))
    assert hub.repos[REPO].private and hub.repos[REPO].files == tree(path)
    assert pushed.n_moved == pushed.n_files == len(tree(path))
    sizes = sum(map(len, tree(path).values()))
    assert told[-1] == (pushed.n_files, pushed.n_files, sizes, sizes)
    pulled = actds.pull(URI, tmp_path / "back", seal=f"sha256:{pushed.digest}")
    assert tree(tmp_path / "back") == tree(path)
    assert (pulled.digest, pulled.revision) == (pushed.digest, pushed.revision)
    assert not actds.validate(tmp_path / "back").errors
    assert not list(tmp_path.glob("*.partial"))


def test_an_imported_dataset_comes_back_as_unprovenanced_as_it_went(
    hub: Hub, tmp_path: Path
) -> None:
    rows = np.random.default_rng(1).standard_normal((9, 4)).astype(np.float32)
    np.save(tmp_path / "resid_post.1.npy", rows)
    actds.import_foreign(tmp_path / "resid_post.1.npy", tmp_path / "acts")
    with pytest.raises(actds.ActdsError, match=r"E306 [^\n]*\nSeal it as imported: .*--imported"):
        actds.push(tmp_path / "acts", URI)
    actds.seal(tmp_path / "acts", imported=True)
    actds.push(tmp_path / "acts", URI)
    actds.pull(URI, tmp_path / "back")
    with pytest.raises(actds.ActdsError, match="E403"):
        actds.open(tmp_path / "back")
    with pytest.warns(UserWarning, match="E403"):
        dataset = actds.open(tmp_path / "back", i_accept_unprovenanced=True)
    order = np.argsort(dataset.tokens()["position"].to_numpy())
    assert np.array_equal(dataset.array("resid_post.1")[order], rows)


def test_a_card_with_words_of_its_owner_is_pushed_as_it_is(hub: Hub, path: Path) -> None:
    words = (path / "README.md").read_bytes() + b"Cite us.\n"
    (path / "README.md").write_bytes(words)
    actds.push(path, URI)
    assert hub.repos[REPO].files["README.md"] == words
    assert "croissant.json" in hub.repos[REPO].files
    (path / "README.md").unlink()
    actds.push(path, URI)
    assert hub.repos[REPO].files["README.md"] == words.removesuffix(b"Cite us.\n")


def test_the_seal_is_the_last_to_arrive(
    hub: Hub, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "BATCH_FILES", 10)
    actds.push(path, URI)
    *before, last = hub.repos[REPO].commits[1:]
    assert len(before) > 2
    new = last.keys() - before[-1].keys()
    assert new == {SEAL, "SHA256SUMS", "README.md", "croissant.json"}
    ledger = [any(name.startswith("ledger/") for name in commit) for commit in before]
    data = [any(name.endswith("c/0/0") for name in commit) for commit in before]
    assert data.index(True) < ledger.index(True)


def test_what_is_there_is_not_sent_again(hub: Hub, path: Path, tmp_path: Path) -> None:
    actds.push(path, URI)
    n_commits, n_uploads = len(hub.repos[REPO].commits), hub.count("^PUT")
    again = actds.push(path, URI)
    assert (again.n_moved, len(hub.repos[REPO].commits)) == (0, n_commits)
    assert hub.count("^PUT") == n_uploads
    make_dataset(path, n_requests=4, seed=5, run="r-second")
    grown = actds.push(path, URI)
    assert 0 < grown.n_moved < grown.n_files and hub.repos[REPO].files == tree(path)
    assert actds.pull(URI, tmp_path / "back").digest == actds.open(path).digest == grown.digest


def test_a_push_that_was_cut_is_continued(
    hub: Hub, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "BATCH_FILES", 10)
    uploads = hub.fail("503", "^PUT /upload/", None)
    with pytest.raises(actds.ActdsError, match="continues where this one ended") as caught:
        actds.push(path, URI)
    assert caught.value.code == "E508"
    uploads.times = 0
    # The server takes the first commit and its answer is lost, then it takes none.
    hub.fail("503", "^POST .*/commit/", None)
    with pytest.raises(actds.ActdsError, match="E508"):
        actds.push(path, URI)
    hub.faults.clear()
    n_commits, calls = len(hub.repos[REPO].commits), []

    def stop(*facts: int) -> None:
        calls.append(facts)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        actds.push(path, URI, progress=stop)
    assert len(hub.repos[REPO].commits) == n_commits + 2 and SEAL not in hub.repos[REPO].files
    done = actds.push(path, URI)
    assert done.n_moved == done.n_files - 20
    assert hub.repos[REPO].files == tree(path)


def test_an_unfinished_push_cannot_be_pulled(hub: Hub, path: Path, tmp_path: Path) -> None:
    actds.push(path, URI)
    files = hub.repos[REPO].commits[-1]
    unsealed = {name: files[name] for name in files if not name.startswith("seal/")}
    hub.repos[REPO].commits.append(unsealed)
    with pytest.raises(actds.ActdsError, match="Its push has not ended") as caught:
        actds.pull(URI, tmp_path / "back")
    assert caught.value.code == "E306" and not (tmp_path / "back").exists()
    assert not list((tmp_path / "back.partial").rglob("tokens.parquet"))
    hub.repos[REPO].commits.append(files)
    actds.pull(URI, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(path)


def test_failures_that_pass_are_tried_again(hub: Hub, path: Path, tmp_path: Path) -> None:
    ways = ("create", "/tree/", "preupload", "objects/batch", "PUT", "/commit/", "acts$")
    faults = [hub.fail("503", way, 2) for way in ways]
    faults += [hub.fail("cut", way) for way in ("PUT", "/commit/", "preupload")]
    actds.push(path, URI)
    assert hub.repos[REPO].files == tree(path)
    faults += [hub.fail("503", "HEAD .*zarr.json", 3), hub.fail("503", "GET .*tokens.parquet", 3)]
    faults += [hub.fail("cut", "GET .*c/0/0", 4), hub.fail("cut", "GET .*resolve.*ledger", 2)]
    actds.pull(URI, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(path)
    assert all(fault.seen for fault in faults)


def test_a_flipped_byte_at_arrival_is_fetched_again(hub: Hub, path: Path, tmp_path: Path) -> None:
    actds.push(path, URI)
    faults = [hub.fail("flip", f"GET .*{name}") for name in ("c/0/0", "tokens", "ledger", SEAL)]
    actds.pull(URI, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(path) and all(fault.seen for fault in faults)


@pytest.mark.parametrize("kind", ["flip", "cut", "503"])
def test_a_pull_that_was_cut_is_continued(hub: Hub, path: Path, tmp_path: Path, kind: Any) -> None:
    actds.push(path, URI)
    bad = next(name for name in sorted(tree(path)) if name.endswith("c/0/0"))
    hub.fail(kind, f"GET .*{bad}", None)
    out, partial = tmp_path / "back", tmp_path / "back.partial"
    with pytest.raises(actds.ActdsError) as caught:
        actds.pull(URI, out)
    assert code_of(caught) == (("E202", bad) if kind == "flip" else ("E508", f"{URI}/{bad}"))
    assert not out.exists() and not (partial / bad).exists()
    hub.faults.clear()
    # What was damaged meanwhile is not taken for what had arrived.
    damaged = partial / "shards/r-synthetic-decode-0000/tokens.parquet"
    whole = damaged.exists()
    damaged.parent.mkdir(parents=True, exist_ok=True)
    damaged.write_bytes(flipped((path / damaged.relative_to(partial)).read_bytes()))
    kept = {n for n, data in tree(partial).items() if tree(path).get(n) == data}
    hub.requests.clear()
    done = actds.pull(URI, out)
    assert tree(out) == tree(path) and not partial.exists() and kept
    fetched = {r.partition("0" * 30)[2].split("/", 1)[1] for r in hub.requests if "GET /data" in r}
    assert fetched == tree(path).keys() - kept and len(fetched) == done.n_moved
    assert bad in fetched and (not whole or len(fetched) < len(tree(path)))


def test_other_bytes_on_the_hub_are_noticed_and_sent_anew(hub: Hub, path: Path) -> None:
    hub.fail("flip", "/commit/")
    with pytest.raises(actds.ActdsError, match="other bytes on the Hub") as caught:
        actds.push(path, URI)
    assert caught.value.code == "E202" and SEAL not in hub.repos[REPO].files
    # The genesis itself may be among them, and then it is another dataset's.
    hub.repos[REPO].commits[-1].pop("actds.json")
    actds.push(path, URI)
    assert hub.repos[REPO].files == tree(path)


def test_a_file_that_is_not_what_was_committed_does_not_leave(hub: Hub, path: Path) -> None:
    bad = sorted(path.rglob("c/0/0"))[0]
    bad.write_bytes(flipped(bad.read_bytes()))
    with pytest.raises(actds.ActdsError, match="E202") as caught:
        actds.push(path, URI)
    assert caught.value.place == bad.relative_to(path).as_posix()
    assert hub.count("^PUT") == hub.count("/commit/") == 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("processes", marks=pytest.mark.standard),
        pytest.param("ray", marks=pytest.mark.full),
    ],
)
def test_digests_are_taken_where_the_executor_is(hub: Hub, path: Path, name: ExecutorName) -> None:
    if name == "ray":
        pytest.importorskip("ray", reason="needs the extra actds[ray]")
    bad = sorted(path.rglob("c/0/0"))[-1]
    whole = bad.read_bytes()
    bad.write_bytes(flipped(whole))
    with pytest.raises(actds.ActdsError, match="E202") as caught:
        actds.push(path, URI, executor=name)
    assert caught.value.place == bad.relative_to(path).as_posix() and hub.count("^PUT") == 0
    bad.write_bytes(whole)
    actds.push(path, URI, executor=name)
    assert hub.repos[REPO].files == tree(path)


def change(hub: Hub, name: str, data: bytes | None) -> None:
    files = dict(hub.repos[REPO].commits[-1])
    lfs = files.pop(name, (b"", False))[1]
    hub.repos[REPO].commits.append(files if data is None else files | {name: (data, lfs)})


def test_a_repository_that_was_changed_is_refused(hub: Hub, path: Path, tmp_path: Path) -> None:
    """By the dataset's own digests: the Hub's are those of what it holds."""
    actds.push(path, URI)
    files = tree(path)
    record = next(name for name in sorted(files) if name.endswith("00000001.json"))
    manifest = next(name for name in files if name.endswith("shard.json"))
    tokens = next(name for name in files if name.endswith("tokens.parquet"))
    for name, data, code in (
        (record, files[record].replace(b'"seq":1', b'"seq":2'), "E303"),
        (manifest, files[manifest].replace(b"permuted", b"sequence"), "E202"),
        (manifest, None, "E104"),
        (tokens, flipped(files[tokens]), "E202"),
        (tokens, None, "E104"),
    ):
        change(hub, name, data)
        with pytest.raises(actds.ActdsError) as caught:
            actds.pull(URI, tmp_path / "back")
        assert caught.value.code == code and not (tmp_path / "back").exists(), name
        change(hub, name, files[name])
    # Names that are no dataset's are not taken, and no reason to refuse.
    change(hub, ".gitattributes", b"*.parquet filter=lfs")
    change(hub, "../../evil", b"x")
    change(hub, "notes.txt", b"x")
    actds.pull(URI, tmp_path / "back")
    assert tree(tmp_path / "back") == files and not (tmp_path.parent / "evil").exists()


def test_refuses_what_is_not_to_be_pushed(hub: Hub, path: Path, tmp_path: Path) -> None:
    unsealed = make_dataset(tmp_path / "open", n_requests=3, sealed=False)
    with pytest.raises(actds.ActdsError, match="E306"):
        actds.push(unsealed, URI)
    with pytest.raises(actds.ActdsError, match="E009 PATH"):
        actds.push("s3://bucket/acts", URI)
    for uri in ("someone/acts", "hf://someone/acts", "hf://datasets/acts", "s3://b/a"):
        with pytest.raises(actds.ActdsError, match="E009 URI"):
            actds.push(path, uri)
    assert not hub.repos
    actds.push(path, URI)
    other = make_dataset(tmp_path / "other", n_requests=3, seed=3)
    with pytest.raises(FileExistsError, match="another dataset"):
        actds.push(other, URI)
    older = Path(shutil.copytree(path, tmp_path / "older"))
    make_dataset(path, n_requests=3, seed=5, run="r-second")
    actds.push(path, URI)
    with pytest.raises(FileExistsError, match="the Hub has what this folder lacks"):
        actds.push(older, URI)
    assert hub.repos[REPO].files == tree(path)


def test_signatures_and_pins_travel_with_a_dataset(hub: Hub, path: Path, tmp_path: Path) -> None:
    crypto = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as form

    key, pem = crypto.Ed25519PrivateKey.generate(), form.Encoding.PEM
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    private.write_bytes(key.private_bytes(pem, form.PrivateFormat.PKCS8, form.NoEncryption()))
    spki = form.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(pem, spki))
    first = actds.push(path, URI)
    actds.sign(path, private)
    assert actds.push(path, URI).n_moved == 1, "a signature that came later is sent alone"
    pulled = actds.pull(URI, tmp_path / "signed", seal=first.digest)
    assert actds.verify(tmp_path / "signed", [public]).digest == pulled.digest == first.digest
    make_dataset(path, n_requests=3, seed=5, run="r-second")
    second = actds.push(path, URI)
    actds.pull(URI, tmp_path / "grown", seal=first.digest)
    assert actds.open(tmp_path / "grown").digest == second.digest
    assert actds.open(tmp_path / "grown", seal=first.digest).digest == first.digest
    with pytest.raises(actds.ActdsError, match="E804"):
        actds.pull(f"{URI}@{first.revision}", tmp_path / "back", seal=second.digest)
    assert not (tmp_path / "back").exists()
    assert not list((tmp_path / "back.partial").glob("shards/*/acts.zarr")), "no data was fetched"


def test_refuses_what_is_not_to_be_pulled(hub: Hub, path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"E101 {URI}: no such repository"):
        actds.pull(URI, tmp_path / "back")
    actds.push(path, URI)
    with pytest.raises(FileExistsError, match="E008"):
        actds.pull(URI, path)
    with pytest.raises(actds.ActdsError, match="E009 OUT"):
        actds.pull(URI, "s3://bucket/acts")
    with pytest.raises(actds.ActdsError, match="E804 seal: 1 seals, the last sha256:"):
        actds.pull(URI, tmp_path / "back", seal="0" * 64)
    with pytest.raises(actds.ActdsError, match="E009 seal"):
        actds.pull(URI, tmp_path / "back", seal="latest")
    change(hub, "actds.json", None)
    with pytest.raises(FileNotFoundError, match=r"E101 .*no actds\.json"):
        actds.pull(URI, tmp_path / "other")
    assert not (tmp_path / "back").exists() and not (tmp_path / "other").exists()
    first = f"{1:040x}"
    with pytest.raises(FileNotFoundError, match=r"E101 .*no actds\.json"):
        actds.pull(f"{URI}@{'0' * 40}", tmp_path / "empty")
    with pytest.raises(actds.ActdsError, match="E306"):
        actds.pull(f"{URI}@{first}", tmp_path / "first")


def test_two_pulls_do_not_share_a_folder(hub: Hub, path: Path, tmp_path: Path) -> None:
    actds.push(path, URI)
    refused: list[str] = []

    def again(*_: int) -> None:
        if not refused:
            with pytest.raises(actds.ActdsError) as caught:
                actds.pull(URI, tmp_path / "back")
            refused.append(caught.value.code)

    actds.pull(URI, tmp_path / "back", progress=again)
    assert refused == ["E010"] and tree(tmp_path / "back") == tree(path)


@pytest.mark.parametrize("kind", ["503", "403"])
def test_the_token_is_in_no_error_and_no_log(
    hub: Hub, path: Path, tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    actds.push(path, URI)
    caplog.set_level(logging.DEBUG)
    hub.fail(kind, "", None)
    for call in (actds.push, actds.pull):
        where = (path, URI) if call is actds.push else (URI, tmp_path / "back")
        with pytest.raises(actds.ActdsError) as caught:
            call(*where)
        assert caught.value.code == "E508"
        said = "".join(traceback.format_exception(caught.value)) + caplog.text
        assert TOKEN not in said and "E508" in said
        assert ("Log in" in said) == (kind == "403")
    hub.faults.clear()
    # Another token, given here: it counts, and is not said either.
    with pytest.raises(actds.ActdsError) as caught:
        actds.pull(URI, tmp_path / "back", token="hf_wrongwrong")
    assert "hf_wrong" not in str(caught.value) + caplog.text
    assert caught.value.code in ("E101", "E508")


def test_the_commands_push_and_pull(hub: Hub, path: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    said = runner.invoke(cli, ["push", str(path), URI, "--public"])
    assert said.exit_code == 0, said.output
    digest = actds.open(path).digest
    assert f"digest {digest}" in said.stdout and "files checked" in said.stdout
    assert not hub.repos[REPO].private
    out = tmp_path / "back"
    said = runner.invoke(cli, ["pull", URI, str(out), "--json", "--seal", digest])
    document = json.loads(said.stdout)
    assert (document["format"], document["digest"]) == ("actds.pull", digest)
    assert document["n_moved"] == len(tree(path)) and tree(out) == tree(path)
    assert re.search(r"^\d+ of \d+ files, ", said.stderr, re.MULTILINE)
    said = runner.invoke(cli, ["pull", URI, str(out)])
    assert said.exit_code == 2 and "E008" in said.stderr and "Traceback" not in said.output


@pytest.mark.parametrize("way", ["back", "back.partial", "back.partial/shards"])
def test_a_pull_writes_through_nobodys_link(hub: Hub, path: Path, tmp_path: Path, way: str) -> None:
    actds.push(path, URI)
    (tmp_path / "theirs").mkdir()
    link = tmp_path / way
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "theirs")
    for target in (tmp_path / "theirs", tmp_path / "nowhere"):  # also one that leads nowhere
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(actds.ActdsError, match=r"E008|E107"):
            actds.pull(URI, tmp_path / "back")
    assert not list((tmp_path / "theirs").iterdir()) and not (tmp_path / "nowhere").exists()
