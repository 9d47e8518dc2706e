"""A page to look at a dataset: every token with its row, true scores, no text that is markup."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds.format.labels import dump_labels
from actds.format.readouts import Readouts
from actds_studies.view import View
from actds_studies.view import requests as view_requests
from actds_studies.view.requests import read_probe, read_sae, read_tokenizer, sample
from actds_testing.places import VECTORS
from actds_testing.schedules import busy_shares, simulate
from actds_testing.synthetic import make_dataset, make_thinned
from actds_testing.tiny import write_byte_tokenizer

HOOK = "resid_post.0"
D = 16
EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[31m\u202e"


class Words:
    """Decodes a token to a word of its number."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f" w{token}" for token in token_ids)


class Evil:
    """Decodes every token to markup."""

    def decode(self, token_ids: list[int]) -> str:
        return EVIL + "\n"


class Page(HTMLParser):
    """The tags of a page, and the tokens of each request: classes, title, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.requests: list[list[dict[str, str]]] = []
        self.titles: list[str] = []
        self._in: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.attributes |= set(found)
        if tag == "details":
            self.requests.append([])
        if tag == "summary":
            self.titles.append("")
        if tag == "span" and self.requests:
            self.requests[-1].append({**found, "text": ""})
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in == "span" and self.requests:
            self.requests[-1][-1]["text"] += data
        if self._in == "summary":
            self.titles[-1] += data


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view") / "acts"
    return make_dataset(
        folder, n_requests=40, seed=3, drops=True, filtered=True, sinks=True,
        readouts=Readouts(1, seed=0),
    )  # fmt: skip


@pytest.fixture(scope="module")
def dataset(path: Path) -> actds.Dataset:
    return actds.open(path)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["view", *(str(arg) for arg in args)], prog_name="actds")


def numbers(title: str, name: str) -> float:
    found = re.search(rf"{name} ([-+0-9.e]+[kMG]?)", title)
    assert found is not None, title
    text = found.group(1)
    return float(text.rstrip("kMG")) * {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)


def test_every_position_is_shown_with_its_token_fate_and_norm(dataset: actds.Dataset) -> None:
    seen: set[str] = set()
    for line in dataset.requests().to_pylist():
        rows = dataset.request(line["request"])
        if not len(rows):
            continue
        page = Page(actds.view(dataset, requests=[line["request"]], tokenizer=Words()).html)
        [tokens] = page.requests
        assert len(tokens) == len(rows)
        assert line["external_id"] in page.titles[0]
        norms = np.full(len(rows), np.nan)
        positions, acts = rows.acts()
        norms[positions] = np.linalg.norm(acts.astype(float), axis=1)
        for k, token in enumerate(tokens):
            kinds = token["class"].split()
            seen |= {kind for kind in kinds if not kind[-1].isdigit()}
            assert f"is-{rows.disposition[k]}" in kinds
            assert ("gen" in kinds) == (k >= line["prompt_len"])
            assert token["title"].startswith(f"position {k:,}, ")
            if rows.token_id[k] >= 0:
                assert token["text"] == f" w{rows.token_id[k]}"
            if np.isfinite(norms[k]):
                assert numbers(token["title"], "norm") == pytest.approx(norms[k], rel=1e-3)
                assert f"row {rows.row[k]:,}" in token["title"]
            else:
                assert "no row" in token["title"] and "norm" not in token["title"]
                assert not any(re.fullmatch(r"[abcd]\d", kind) for kind in kinds)
            if rows.disposition[k] == "cache_ref" and rows.owner[k] >= 0:
                assert f"of request {rows.owner[k]}" in token["title"]
    assert {"is-captured", "is-cache_ref", "is-dropped", "is-filtered", "gen", "special"} <= seen


def test_shades_rise_with_the_score(dataset: actds.Dataset) -> None:
    page = Page(actds.view(dataset, tokenizer=Words()).html)
    found = [
        (numbers(token["title"], "norm"), int(match.group(1)))
        for tokens in page.requests
        for token in tokens
        if (match := re.search(r"\ba(\d)\b", token["class"]))
    ]
    shades = [shade for _, shade in sorted(found)]
    assert shades == sorted(shades) and set(shades) == set(range(7))


def test_probes_and_features_are_the_products_of_the_rows(
    dataset: actds.Dataset, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    probes = rng.normal(size=(3, D)).astype("f4")
    np.save(tmp_path / "p.npy", probes)
    rows = dataset.request(0)
    positions, acts = rows.acts()
    page = Page(
        actds.view(dataset, requests=[0], probe=tmp_path / "p.npy", features=[2, 0]).html
    )  # fmt: skip
    for k in (2, 0):
        got = [numbers(page.requests[0][at]["title"], f"probe {k}") for at in positions]
        assert np.allclose(got, acts @ probes[k], rtol=2e-3, atol=2e-3)

    encoder, bias = rng.normal(size=(D, 32)).astype("f4"), rng.normal(size=32).astype("f4")
    centre, threshold = rng.normal(size=D).astype("f4"), np.full(32, 0.7, "f4")
    np.savez(tmp_path / "sae.npz", W_enc=encoder, b_enc=bias, b_dec=centre, threshold=threshold)
    before = (acts - centre) @ encoder + bias
    wanted = np.where(before > 0.7, before, 0)
    page = Page(
        actds.view(dataset, requests=[0], sae=tmp_path / "sae.npz", features=[5, 31]).html
    )  # fmt: skip
    for k in (5, 31):
        got = [numbers(page.requests[0][at]["title"], f"feature {k}") for at in positions]
        assert np.allclose(got, wanted[:, k], rtol=2e-3, atol=2e-3) and wanted[:, k].any()


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
def test_dictionaries_of_every_trainer_are_read_the_same(tmp_path: Path, kind: str) -> None:
    """As SAELens, dictionary_learning and sparsify name and turn their tensors."""
    safetensors = pytest.importorskip("safetensors.numpy")
    dtype = {"F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
    rng = np.random.default_rng(1)
    encoder = rng.normal(size=(D, 8)).astype(dtype[kind])
    bias, centre = (rng.normal(size=n).astype(dtype[kind]) for n in (8, D))
    named = {
        "saelens": {"W_enc": encoder, "b_enc": bias, "b_dec": centre},
        "dictionary_learning": {
            "encoder.weight": np.ascontiguousarray(encoder.T), "encoder.bias": bias, "bias": centre,
        },
        "sparsify": {
            "encoder.weight": np.ascontiguousarray(encoder.T), "encoder.bias": bias,
            "b_dec": centre, "W_dec": np.zeros((8, D), "f4"), "steps": np.zeros(1, "i8"),
        },
    }  # fmt: skip
    rows = rng.normal(size=(50, D)).astype("f4")
    wide = [part.astype("f4") for part in (encoder, bias, centre)]
    wanted = np.maximum((rows - wide[2]) @ wide[0] + wide[1], 0)
    for name, tensors in named.items():
        file = tmp_path / f"{name}.safetensors"
        if kind == "BF16":  # numpy has no such type: safetensors for numpy writes none
            write_safetensors(file, tensors)
        else:
            safetensors.save_file(tensors, file)
        [score] = read_sae(file, D, [3])
        assert np.allclose(score.of(rows), wanted[:, 3], rtol=1e-5, atol=1e-5)


def topk_of_two(
    folder: Path, rng: np.random.Generator, layer: int, **metadata: str
) -> dict[str, np.ndarray[Any, Any]]:
    """Write a dictionary as SAELens does, of eight features, and return its weights."""
    folder.mkdir()
    weights = {
        "W_enc": rng.normal(size=(D, 8)).astype("f4"), "b_enc": rng.normal(size=8).astype("f4"),
        "W_dec": rng.normal(size=(8, D)).astype("f4"), "b_dec": rng.normal(size=D).astype("f4"),
    }  # fmt: skip
    write_safetensors(folder / "sae_weights.safetensors", weights)
    hook = f"blocks.{layer}.hook_resid_post"
    config = {
        "architecture": "topk", "k": 2, "d_in": D, "d_sae": 8, "apply_b_dec_to_input": False,
        "normalize_activations": "none",
        "metadata": {"sae_lens_version": "6.0.0", "hook_name": hook, **metadata},
    }  # fmt: skip
    (folder / "cfg.json").write_text(json.dumps(config))
    return weights


def test_a_dictionary_of_another_model_colours_no_token(dataset_path: Path, tmp_path: Path) -> None:
    """The rows are of synthetic-2-layers: directions of another model mean nothing there."""
    rng = np.random.default_rng(2)
    for name in ("gpt2-small", "Someone/Synthetic-2-layers"):
        topk_of_two(tmp_path / name.replace("/", "-"), rng, 0, model_name=name)
    other, own = tmp_path / "gpt2-small", tmp_path / "Someone-Synthetic-2-layers"
    view = (dataset_path, "--out", tmp_path / "page.html", "--request", "0",
            "--feature", "3", "--sae")  # fmt: skip
    done = run(*view, other)
    assert done.exit_code == 2 and not (tmp_path / "page.html").exists()
    assert re.search("E015 .*a dictionary of gpt2-small; expected synthetic-2-layers", done.stderr)
    assert run(*view, own).exit_code == 0
    # Whoever knows that the run has the name of a folder says which model it is.
    assert run(*view, other, "--model", "openai/gpt2-small").exit_code == 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_dictionary_with_its_settings_is_applied_as_they_say(tmp_path: Path, whole: bool) -> None:
    """Two of eight features of a row are active, and the decoder's bias is not taken off."""
    folder, rng = tmp_path / "sae", np.random.default_rng(2)
    weights = topk_of_two(folder, rng, 1)
    rows = rng.normal(size=(50, D)).astype("f4")
    before = np.maximum(rows @ weights["W_enc"] + weights["b_enc"], 0)
    wanted = np.where(before >= np.sort(before, axis=1)[:, [-2]], before, 0)
    given = folder if whole else folder / "sae_weights.safetensors"
    scores = read_sae(given, D, [3, 5], "resid_post.1")
    for score, k in zip(scores, (3, 5), strict=True):
        assert np.allclose(score.of(rows), wanted[:, k], atol=1e-5)
        assert 0 < (wanted[:, k] > 0).sum() < (before[:, k] > 0).sum()
    with pytest.raises(ActdsError, match=r"E015.*resid_post\.0"):
        read_sae(folder, D, [3], "resid_post.0")
    (folder / "cfg.json").unlink()  # an encoder alone, which knows neither
    if not whole:
        [score] = read_sae(given, D, [3])
        alone = np.maximum((rows - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"], 0)
        assert np.allclose(score.of(rows), alone[:, 3], atol=1e-5)


def write_safetensors(path: Path, tensors: dict[str, Any], **changed: Any) -> None:
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64"}
    header, data = {}, b""
    for name, values in tensors.items():
        start, data = len(data), data + values.tobytes()
        header[name] = {
            "dtype": names[str(values.dtype)], "shape": list(values.shape),
            "data_offsets": [start, len(data)],
        } | changed  # fmt: skip
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def bad_files(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield option, file and a part of the message, for files that cannot be used."""
    one = np.ones(D, "f4")
    np.save(folder / "wide.npy", np.ones(D + 1, "f4"))
    yield "--probe", folder / "wide.npy", "floats (16,)"
    np.save(folder / "ints.npy", np.ones(D, "i8"))
    yield "--probe", folder / "ints.npy", "int64"
    np.save(folder / "nan.npy", one * np.nan)
    yield "--probe", folder / "nan.npy", "not finite"
    np.save(folder / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    yield "--probe", folder / "pickle.npy", "E015"
    (folder / "cut.npy").write_bytes((folder / "wide.npy").read_bytes()[:-7])
    yield "--probe", folder / "cut.npy", "E015"
    np.savez(folder / "many.npz", one)
    yield "--probe", folder / "many.npz", "several arrays"
    yield "--probe", folder / "nope.npy", "E015"
    (folder / "sae.pt").write_bytes(b"\x80\x04")
    yield "--sae", folder / "sae.pt", "a .safetensors or .npz file"
    np.savez(folder / "other.npz", W_dec=np.ones((4, D), "f4"))
    yield "--sae", folder / "other.npz", "W_enc or encoder.weight"
    np.savez(folder / "narrow.npz", W_enc=np.ones((D - 1, 4), "f4"))
    yield "--sae", folder / "narrow.npz", "an encoder of 16 channels"
    np.savez(folder / "biased.npz", W_enc=np.ones((D, 4), "f4"), b_enc=one)
    yield "--sae", folder / "biased.npz", "b_enc (16,)"
    np.savez(folder / "few.npz", W_enc=np.ones((D, 1), "f4"))
    yield "--sae", folder / "few.npz", "0 to 0"
    weights = {"W_enc": np.ones((D, 4), "f4")}
    write_safetensors(folder / "long.safetensors", weights, data_offsets=[0, 1 << 40])
    yield "--sae", folder / "long.safetensors", "it is truncated"
    write_safetensors(folder / "shape.safetensors", weights, shape=[D, 1 << 20])
    yield "--sae", folder / "shape.safetensors", "256 bytes of float32"
    (folder / "head.safetensors").write_bytes(b"\xff" * 64)
    yield "--sae", folder / "head.safetensors", "a header of"
    (folder / "list.safetensors").write_bytes((4).to_bytes(8, "little") + b"[{}]")
    yield "--sae", folder / "list.safetensors", "E015"
    (folder / "empty.safetensors").write_bytes(b"")
    yield "--sae", folder / "empty.safetensors", "E015"


def test_files_that_do_not_fit_are_refused_by_name(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    n = 0
    for option, file, words in bad_files(tmp_path):
        told = run(path, option, file, "--feature", 1 if "few" in file.name else 0, "--out", out)
        assert told.exit_code == 2, (file, told.output, told.exception)
        assert f"E015 {file}" in told.stderr and words in told.stderr, (words, told.stderr)
        assert not out.exists()
        n += 1
    assert n == 17


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--request", "999"), "E014"),
        (("--request", "no-run:0"), "E014"),
        (("--request", "x"), "neither N nor RUN:N"),
        (("--hook", "mlp_out.9"), "E014"),
        (("--feature", "1"), "--sae FILE or --probe FILE"),
        (("--tokenizer", "/nowhere"), "no file /nowhere/tokenizer.json"),
        (("--probe", "a.npy", "--sae", "b.npz"), "one of the two"),
        (("--out", "/nowhere/page.html"), "E503"),
        (("--out", "-"), "'-' is no file"),
        (("--start", "-1"), "--start"),
        (("--tokens", "0"), "--tokens"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(
    path: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    out = () if "--out" in arguments else ("--out", tmp_path / "page.html")
    told = run(path, *arguments, *out)
    assert told.exit_code in (2, 4) and words in told.stderr and told.stdout == ""
    assert not list(tmp_path.iterdir())


def hostile(folder: Path) -> Path:
    """Return a dataset whose every free text is markup."""
    told = simulate(12, 5, drops=True, cache=True)
    requests = told.requests
    labels = dump_labels({EVIL: EVIL})
    for name in ("external_id", "source", "labels"):
        at = requests.column_names.index(name)
        said = [labels if name == "labels" else f"{EVIL} {k}" for k in range(len(requests))]
        texts = pa.array(said, pa.string())
        requests = requests.set_column(at, requests.schema.field(name), texts)
    return make_dataset(folder / "a<b>&", schedule=told.with_(requests=requests))


def test_no_text_of_a_dataset_is_markup(tmp_path: Path) -> None:
    page = actds.view(hostile(tmp_path), tokenizer=Evil())
    plain = Page(actds.view(hostile(tmp_path / "again"), tokenizer=Words()).html)
    read = Page(page.html)
    assert read.tags - {"br"} == plain.tags and "script" not in read.tags
    assert read.attributes == plain.attributes
    assert not any(name.startswith("on") for name in read.attributes)
    assert "\x1b" not in page.html and "\u202e" not in page.html
    assert any("<script>" in token["text"] for token in read.requests[0])
    assert "<script>" in read.titles[0]
    assert "default-src 'none'" in page.html.replace("&#39;", "'")
    # In a notebook the page is the text of an attribute, in a frame that runs nothing.
    frame = page._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-downloads" srcdoc="') and "<script" not in frame
    assert frame.count('"') == 8


def test_a_page_says_that_rows_are_a_sample(tmp_path: Path) -> None:
    schedule = simulate(20, 3)
    path = make_thinned(tmp_path / "acts", schedule, busy_shares(schedule))
    weights = [1 / row["inclusion"] for row in actds.open(path).tokens().to_pylist()]
    words = (
        f"{len(weights)} rows drawn with probability 0.25 to 1, which represent about "
        f"{sum(weights):,.0f}: {sum(weights) ** 2 / sum(w * w for w in weights):,.0f} effective"
    )
    assert words in actds.view(path, requests=[0]).html


def test_a_request_is_shown_with_its_labels_and_why_it_was_not_served() -> None:
    found = actds.view(VECTORS / "valid" / "unserved", requests=[1, 4, 5])
    first, skipped, unbegun = re.findall(r"Request \d+ of r-vector: [^<]*", found.html)
    assert first.endswith("(stop)") or first.endswith("(length)")
    assert "(skipped: E004 synthetic.jsonl row 4: 5000 prompt tokens)" in skipped
    assert "(unbegun: the harvest was interrupted before it was served)" in unbegun
    assert "Labels: domain code, level 0, é true." in found.html
    assert "prompt of 5,000 tokens" in found.html
    # What was never served has no token to look at, and is shown to those who ask for it.
    shown = sample(actds.open(VECTORS / "valid" / "unserved"))
    assert {number for _, number in shown} <= set(range(4))


def test_requests_are_sampled_evenly_with_those_that_lost_the_most(
    dataset: actds.Dataset,
) -> None:
    found = sample(dataset)
    assert len(found) == len(set(found)) <= view_requests.N_EVEN + view_requests.N_LOST
    lost = {
        line["request"]: int(
            np.isin(dataset.request(line["request"]).disposition, ("dropped", "aborted")).sum()
        )
        for line in dataset.requests().to_pylist()
    }
    worst = max(lost.values())
    assert worst > 0 and any(lost[number] == worst for _, number in found)
    assert ("r-synthetic", 0) in found


def test_a_page_is_bounded_whatever_the_requests(
    dataset: actds.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_requests, "MAX_TOKENS", 10)
    everyone = dataset.requests()["request"].to_pylist()
    page = Page(actds.view(dataset, requests=everyone).html)
    assert sum(map(len, page.requests)) == 10
    longest = max(everyone, key=lambda number: len(dataset.request(number)))
    page = Page(actds.view(dataset, requests=[longest], start=3, n_tokens=4).html)
    assert [t["title"].split(",")[0] for t in page.requests[0]] == [
        f"position {k}" for k in range(3, 7)
    ]
    page = Page(actds.view(dataset, requests=[longest], start=10**6).html)
    assert page.requests == [[]]


def test_requests_of_several_runs_are_named_with_their_run(tmp_path: Path) -> None:
    make_dataset(tmp_path / "two", n_requests=5, sealed=False)
    path = make_dataset(tmp_path / "two", n_requests=5, seed=9, run="r-b")
    told = run(path, "--request", "r-b:2", "--out", tmp_path / "page.html")
    assert told.exit_code == 0, told.stderr
    assert "Request 2 of r-b" in Page((tmp_path / "page.html").read_text("utf-8")).titles[0]
    assert "E014" in run(path, "--request", "2", "--out", tmp_path / "no.html").stderr
    assert Page(actds.view(path).html).requests


def test_the_page_says_hooks_norms_coverage_and_losses(
    path: Path, dataset: actds.Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    told = run(path, "--out", out, "--stats")
    assert told.exit_code == 0 and told.stdout.startswith(f"page: {out} (")
    page = out.read_text(encoding="utf-8")
    for hook in dataset.hooks:
        assert f"Norms of {hook} by position" in page
    assert "Loss waterfall" in page and "Coverage map" in page and "queue_full" in page
    stats = dataset.stats(HOOK)
    assert f"{stats.mean_norm:,.4g} ({stats.norms[0.5]:,.4g})" in page
    assert isinstance(actds.view(path), View)


def test_the_head_says_model_hooks_engine_date_and_the_command_that_makes_the_page(
    path: Path, dataset: actds.Dataset, tmp_path: Path
) -> None:
    probe = tmp_path / "a probe.npy"
    np.save(probe, np.ones(D, "f4"))
    hook = next(iter(dataset.hooks))
    page = actds.view(path, hook=hook, probe=probe, requests=[3], start=2).html
    head = page[page.index("<header") : page.index("</header>")]
    told = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", head))
    first = next(iter(dataset.runs.values()))
    assert told["Model"] == str(first.fields["model.name"].value or "not recorded")
    d_model, dtype = dataset.hooks[hook].d_model, dataset.hooks[hook].dtype
    assert f"{hook} ({d_model:,} × {dtype})" in told["Hooks"]
    day = datetime.fromtimestamp(first.started_ns / 1e9, UTC).strftime("%Y-%m-%d")
    assert told["Harvested"].startswith(day)
    assert str(first.fields["engine.name"].value) in told["Harvested"]
    again = shlex.split(html.unescape(told["Command"]))
    assert again[:2] == ["actds", "view"]
    out = tmp_path / "again.html"
    assert run(*again[2:], "--out", out).exit_code == 0
    assert out.read_text(encoding="utf-8") == page


def test_an_unsealed_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ActdsError, match="E306"):
        actds.view(make_dataset(tmp_path / "open", sealed=False))


def test_a_probe_that_claims_what_it_has_not_is_refused(dataset_path: Path, tmp_path: Path) -> None:
    head = b"{'descr':'<f4','fortran_order':False,'shape':(4611686018427387904,16),}"
    data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(64)
    (tmp_path / "probe.npy").write_bytes(data)
    os.mkfifo(tmp_path / "pipe.npy")
    head = b"{'descr':'<f4','fortran_order':False,'shape':(6,16L"  # a token that never ends
    data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(64)
    (tmp_path / "open.npy").write_bytes(data)
    for name in ("probe.npy", "pipe.npy", "open.npy"):
        with pytest.raises(ActdsError, match=f"E015 .*{name}"):
            actds.view(dataset_path, probe=tmp_path / name)
    for name in ("pipe.npz", "pipe.safetensors", "pipe.pt"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ActdsError, match=f"E015 .*{name}"):
            actds.view(dataset_path, sae=tmp_path / name, features=[0])


def _multiplied(folder: Path, times: int) -> Path:
    """Write a tokenizer whose decoder makes ten letters of each, again and again."""
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    steps = [decoders.Replace("a", "a" * 10) for _ in range(times)]
    made.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("times", [4, 6, 12])
def test_a_tokenizer_that_multiplies_is_refused(times: int, tmp_path: Path) -> None:
    """Texts of 10^4 letters, 10^6 and 10^12, which no memory holds."""
    pytest.importorskip("tokenizers")
    tokenizer = read_tokenizer(_multiplied(tmp_path, times))
    with pytest.raises(ActdsError, match=r"E009 tokenizer.*expected"):
        tokenizer.decode([0])
    assert tokenizer.decode([1]) == "b"


def test_a_tokenizer_folder_gives_the_text_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    write_byte_tokenizer(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    text = "a word, another  one"
    ids = [tokenizer_id for tokenizer_id in _ids(tmp_path, text)]
    assert "".join(tokenizer.decode([one]) for one in ids) == text
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ActdsError, match="E009"):
        read_tokenizer(tmp_path)


def _ids(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    found: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return found


def test_probes_are_read_once_each(tmp_path: Path) -> None:
    np.save(tmp_path / "p.npy", np.eye(D, dtype="f4")[:6])
    assert [score.name for score in read_probe(tmp_path / "p.npy", D)] == [
        "probe 0", "probe 1", "probe 2",
    ]  # fmt: skip
    rows = np.arange(2 * D, dtype="f4").reshape(2, D)
    [score] = read_probe(tmp_path / "p.npy", D, [4])
    assert score.of(rows).tolist() == [4.0, 20.0]
    with pytest.raises(ActdsError, match="at most 3"):
        read_probe(tmp_path / "p.npy", D, [0, 1, 2, 3])
