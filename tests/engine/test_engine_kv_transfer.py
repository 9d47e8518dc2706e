"""KV from outside: positions that another engine computed are references with an origin outside.

A producer and a consumer of disaggregated prefill share a folder, by vLLM's example connector. Each
harvest is a dataset; both pass ``actds validate --level deep``, and their rows are those of plain
forwards of ``transformers``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actds.explore.dataset import Dataset
from actds.explore.show import fates
from actds_testing import harvest as h
from actds_testing.tiny import byte_tokenizer, make_random_model
from actds_validators.audit.api import audit

pytestmark = pytest.mark.engine

LAYERS = (0, 2)
BLOCK = 32
OPTIONS = ("--hooks", "resid_post:0,2", "--engine-arg", f"block_size={BLOCK}", *h.EAGER,
           "--engine-arg", "dtype=float32", "--engine-arg", "max_model_len=512")  # fmt: skip
# Three blocks and some tokens more.
SHARED = "a shared beginning that fills three blocks of the prefix cache, and a little more than "
SHARED += "x" * (3 * BLOCK + 5 - len(SHARED))
STORED = {f"t{i}": f"{SHARED} {i} " + "abcdefghij" * (4 + i) for i in range(6)}
"""Prompts that the producer has computed, by id."""
SERVED = {
    "own": f"{SHARED} that nobody has stored, and that this engine computes",
    **STORED,
    "again": STORED["t1"] + "!",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("random") / "model")


def prompts(path: Path, texts: dict[str, str]) -> Path:
    return h.write_prompts(path, [{"id": key, "prompt": text} for key, text in texts.items()])


def transfer(folder: Path, role: str, **extra: Any) -> tuple[str, str]:
    """Return the option of a KV connector over a folder."""
    config: dict[str, Any] = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder), **extra},
    }
    if extra:
        config["kv_connector"] = "TestConnector"
        config["kv_connector_module_path"] = "actds_testing.kv_connector"
        config["kv_load_failure_policy"] = "recompute"
    return "--engine-arg", f"kv_transfer_config={json.dumps(config)}"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def producer(model: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("producer")
    return h.harvest_alone(
        folder / "acts", model, prompts(folder / "p.jsonl", STORED), *OPTIONS,
        *transfer(store, "kv_producer"), "--max-tokens", "1",
    )  # fmt: skip


@pytest.fixture(scope="module")
def consumer(
    model: Path, store: Path, producer: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Dataset:
    folder = tmp_path_factory.mktemp("consumer")
    return h.harvest_alone(
        folder / "acts", model, prompts(folder / "p.jsonl", SERVED), *OPTIONS,
        *transfer(store, "kv_consumer"), "--max-tokens", "8", "--engine-arg", "max_num_seqs=8",
    )  # fmt: skip


def hits(dataset: Dataset) -> dict[str, list[tuple[int, int, str | None]]]:
    """Return start, stop and origin of every reference, by request: an id, or ``external``."""
    names = {number: name for (_, number), name in h.external_ids(dataset).items()}
    found: dict[str, list[tuple[int, int, str | None]]] = {name: [] for name in names.values()}
    for span in dataset.spans().to_pylist():
        if span["disposition"] == "cache_ref":
            origin = span["reason"] or names.get(span["ref_request"])
            found[names[span["request"]]].append((span["start"], span["stop"], origin))
    return {name: sorted(spans) for name, spans in found.items()}


def totals_of(dataset: Dataset) -> dict[str, int]:
    assert dataset.seal is not None
    return dict(dataset.seal.totals)


def loadable(text: str) -> int:
    """Return the tokens of a prompt that the example connector stores and loads."""
    return (len(text) - 2) // BLOCK * BLOCK


def check_rows(dataset: Dataset, model: Path, texts: dict[str, str]) -> None:
    """Hold every row against a plain forward of its request."""
    import torch
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    names = h.external_ids(dataset)
    tokens = {name: dict(enumerate(byte_tokenizer().encode(text))) for name, text in texts.items()}
    for row in dataset.tokens(run=True).to_pylist():
        name = names[row["run"], row["request"]]
        assert tokens[name].setdefault(row["position"], row["token_id"]) == row["token_id"]
    for layer in LAYERS:
        rows = h.rows_of(dataset, f"resid_post.{layer}")
        states = {}
        for name in {name for name, _ in rows}:
            ids = torch.tensor([[tokens[name][i] for i in range(len(tokens[name]))]])
            with torch.no_grad():
                states[name] = plain(ids, output_hidden_states=True).hidden_states[layer + 1][0]
        got = np.stack(list(rows.values()))
        want = np.stack([states[name][position].numpy() for name, position in rows])
        assert h.relative_l2(got, want).mean() < 1e-5
        shifted = np.stack([states[name][position - 1].numpy() for name, position in rows])
        assert h.relative_l2(got, shifted).mean() > 1e-2


def test_positions_from_outside_are_references_with_an_origin_outside(
    producer: Dataset, consumer: Dataset
) -> None:
    """The first request computes three blocks of its own, to which the others refer."""
    check_origins(consumer)
    assert totals_of(producer)["external"] == 0


def check_origins(consumer: Dataset) -> None:
    found = hits(consumer)
    assert found.pop("own") == []
    shared = (0, 3 * BLOCK, "own")
    # No load: its blocks were loaded for another request, and hit here.
    assert found.pop("again") == [shared, (3 * BLOCK, loadable(STORED["t1"]), "external")]
    assert found == {
        name: [shared, (3 * BLOCK, loadable(text), "external")] for name, text in STORED.items()
    }
    n_external = sum(stop - start for spans in found.values() for start, stop, _ in spans[1:])
    n_external += loadable(STORED["t1"]) - 3 * BLOCK
    totals = totals_of(consumer)
    assert (totals["external"], totals["unresolved"]) == (n_external, 0)


def test_the_audit_shows_positions_from_outside_apart_from_losses(consumer: Dataset) -> None:
    n_external = totals_of(consumer)["external"]
    coverage = audit(consumer.catalog.store.uri).result.coverage
    assert coverage is not None
    assert sum(cell.external for cell in coverage.cells) == n_external > 0
    assert {cell.token_class for cell in coverage.cells if cell.external} == {"prompt"}
    assert sum(cell.lost for cell in coverage.cells) == 0
    assert fates(consumer.catalog).external.sum() == n_external


def test_rows_on_loaded_kv_are_those_of_a_plain_forward(consumer: Dataset, model: Path) -> None:
    check_rows(consumer, model, SERVED)


def test_the_dataset_of_the_producer_has_the_rows_that_the_consumer_lacks(
    producer: Dataset, consumer: Dataset, model: Path
) -> None:
    check_rows(producer, model, STORED)
    stored = set(h.rows_of(producer, "resid_post.0"))
    refers = hits(producer)
    for name, spans in hits(consumer).items():
        for start, stop, origin in spans:
            if origin != "external" or name == "again":
                continue
            for position in range(start, stop):
                own = [o for a, b, o in refers[name] if a <= position < b] or [name]
                assert (own[0], position) in stored


def test_the_run_record_names_the_connector(consumer: Dataset) -> None:
    fields = next(iter(consumer.runs.values())).fields
    assert fields["serving.kv_connector"].value == "ExampleConnector"
    assert fields["serving.kv_role"].value == "kv_consumer"


@pytest.mark.full
def test_rows_on_loaded_kv_are_drawn_like_others(
    producer: Dataset, consumer: Dataset, model: Path, store: Path, tmp_path: Path
) -> None:
    # The example connector stores what a consumer computes, too: another request of its own.
    texts = {**SERVED, "own": f"{SHARED} and another one that nobody has stored!"}
    dataset = h.harvest_alone(
        tmp_path / "acts", model, prompts(tmp_path / "p.jsonl", texts), *OPTIONS,
        *transfer(store, "kv_consumer"), "--max-tokens", "8", "--engine-arg", "max_num_seqs=8",
        "--overflow", "thin", "--keep", "decode: 1; 0.5",
    )  # fmt: skip
    check_origins(dataset)
    check_rows(dataset, model, texts)
    totals, whole = totals_of(dataset), totals_of(consumer)
    n_more = len(texts["own"]) - len(SERVED["own"])
    assert totals["captured"] + totals["thinned"] == whole["captured"] + n_more
    assert totals["thinned"] > 20
    assert totals["external"] == whole["external"]


@pytest.mark.full
def test_preempted_requests_load_again_and_owe_nothing_for_it(
    producer: Dataset, model: Path, store: Path, tmp_path: Path
) -> None:
    # The example connector stores what a consumer computes, too: another request of its own.
    texts = {**SERVED, "own": f"{SHARED} which is another one that nobody has stored"}
    dataset = h.harvest_alone(
        tmp_path / "acts", model, prompts(tmp_path / "p.jsonl", texts), *OPTIONS,
        *transfer(store, "kv_consumer", fail=[]), "--max-tokens", "40",
        "--engine-arg", "num_gpu_blocks_override=24", "--engine-arg", "max_num_seqs=8",
    )  # fmt: skip
    assert h.total(dataset.requests(), "n_preemptions") > 0
    assert h.total(dataset.steps(), "recomputed_tokens") > 0
    check_origins(dataset)
    check_rows(dataset, model, texts)


@pytest.mark.full
def test_rows_that_read_a_block_which_was_not_loaded_are_dropped_and_recomputed(
    producer: Dataset, model: Path, store: Path, tmp_path: Path
) -> None:
    texts = {name: STORED[name] for name in ("t0", "t1", "t2", "t3")}
    dataset = h.harvest_alone(
        tmp_path / "acts", model, prompts(tmp_path / "p.jsonl", texts), *OPTIONS,
        *transfer(store, "kv_consumer", fail=[1]), "--max-tokens", "8",
        "--engine-arg", "enable_prefix_caching=false",
    )  # fmt: skip
    drops = dataset.drops().to_pylist()
    assert {(d["drop_reason"], d["policy"], d["step"]) for d in drops} == {
        ("failed_load", "block", 0)
    }
    # The step was lost as a whole; of what was not loaded, nothing has a row.
    assert h.total(dataset.steps(), "recomputed_tokens") == len(texts["t1"]) - BLOCK
    assert hits(dataset) == {
        name: [(0, loadable(text), "external")] for name, text in texts.items()
    }
    check_rows(dataset, model, texts)


@pytest.mark.full
def test_what_fails_to_load_between_steps_is_computed_here(
    producer: Dataset, model: Path, store: Path, tmp_path: Path
) -> None:
    texts = {name: STORED[name] for name in ("t0", "t1", "t2", "t3")}
    dataset = h.harvest_alone(
        tmp_path / "acts", model, prompts(tmp_path / "p.jsonl", texts), *OPTIONS,
        *transfer(store, "kv_consumer", late=True, fail=[1]), "--max-tokens", "8",
        "--engine-arg", "enable_prefix_caching=false",
    )  # fmt: skip
    assert dataset.drops().num_rows == 0
    assert h.total(dataset.steps(), "recomputed_tokens") == 0
    expected = {name: [(0, loadable(text), "external")] for name, text in texts.items()}
    expected["t1"] = [(0, BLOCK, "external")]
    assert hits(dataset) == expected
    cached = {r["external_id"]: r for r in dataset.requests().to_pylist()}
    # The engine's own number counts what it was promised.
    assert cached["t1"]["cached_tokens"] == BLOCK
    assert cached["t1"]["engine_cached_tokens"] is None
    assert cached["t0"]["engine_cached_tokens"] == loadable(texts["t0"])
    check_rows(dataset, model, texts)
