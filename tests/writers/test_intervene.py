"""A file of interventions is checked before an engine starts; the op changes marked rows alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actds.errors import ActdsError
from actds.format.interventions import Applied
from actds_writers.capture import edits
from actds_writers.capture.edits import Edits, Row
from actds_writers.engines.vllm.requests import refuse_unlisted
from actds_writers.interventions import Planned, names_in, plan_interventions
from actds_writers.ipc.messages import HookSpec

D = 8
SPECS = {
    f"{kind}.{layer}": HookSpec(f"{kind}.{layer}", kind, layer, D, "float32")
    for kind in ("resid_post", "attn_out", "q")
    for layer in range(3)
}
EDIT = {"hook": "resid_post.1", "op": "add", "vector": "v.npy"}
vector = np.arange(1, D + 1, dtype=np.float32)


def written(folder: Path, *items: dict[str, Any], **document: Any) -> Path:
    np.save(folder / "v.npy", vector)
    np.save(folder / "rows.npy", np.arange(3 * D, dtype=np.float32).reshape(3, D))
    named = [{"name": f"i{k}", "edits": [EDIT], **item} for k, item in enumerate(items)]
    path = folder / "file.json"
    fields = {"schema": "actds.interventions/1", "interventions": named, **document}
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(
    ("item", "code", "words"),
    [
        ({"edits": [{**EDIT, "hook": "resid_post.9"}]}, "E007", "a hook that the model lacks"),
        ({"edits": [{**EDIT, "hook": "q.1"}]}, "E007", "rows that cannot be changed"),
        ({"edits": [{**EDIT, "vector": "none.npy"}]}, "E015", "none.npy"),
        ({"edits": [{**EDIT, "vector": "rows.npy"}]}, "E015", "3 vectors in rows.npy"),
        ({"edits": [{**EDIT, "vector": "rows.npy", "row": 7}]}, "E015", "shape (0, 8)"),
        ({"edits": [{**EDIT, "op": "turn"}]}, "E015", "add"),
        ({"edits": [{**EDIT, "op": "clamp"}]}, "E015", "a value for clamp"),
        ({"edits": [{**EDIT, "value": 1.0}]}, "E015", "a value for clamp"),
        ({"edits": [{**EDIT, "rows": "rows.npy"}]}, "E015", "a vector or a dictionary"),
        ({"edits": [{**EDIT, "dictionary": "sae"}]}, "E015", "a vector or a dictionary"),
        ({"edits": [EDIT, EDIT]}, "E015", "one edit for each hook"),
        ({"edits": [{**EDIT, "strength": float("nan")}]}, "E015", "finite"),
        ({"start": 3, "stop": 3}, "E015", "a stop behind the start"),
        ({"name": "a b"}, "E015", "match"),
        ({"requests": ["name x"]}, "E015", "name x"),
        ({"requests": ["decode"]}, "E015", "decode"),
        ({"where": 1}, "E015", "unknown key"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_refused_with_its_place(
    item: dict[str, Any], code: str, words: str, tmp_path: Path
) -> None:
    path = written(tmp_path, item)
    with pytest.raises(ActdsError) as raised:
        plan_interventions(path, SPECS)
    assert raised.value.code == code and str(path) in raised.value.place
    assert words in str(raised.value)


def test_a_file_that_is_none_and_a_vector_of_zeros_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"edits": [{**EDIT, "op": "project"}]})
    np.save(tmp_path / "v.npy", np.zeros(D, np.float32))
    with pytest.raises(ActdsError, match="a vector of zeros"):
        plan_interventions(path, SPECS)
    path.write_text("{")
    with pytest.raises(ActdsError, match="E015"):
        plan_interventions(path, SPECS)
    with pytest.raises(ActdsError, match="E015"):
        plan_interventions(tmp_path / "none", SPECS)


def test_requests_of_a_server_name_what_its_file_lists_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path, {}, {})
    planned = plan_interventions(path, SPECS, live=True)
    assert planned.interventions[1].request == (("xargs.actds_intervene", "i1"),)
    assert names_in(path) == ("i0", "i1")

    class Params:
        def __init__(self, **extra: Any) -> None:
            self.extra_args = extra or None

    refuse_unlisted(Params(), ())
    refuse_unlisted(Params(actds_intervene="i1"), ("i0", "i1"))
    for value, names in (("i2", ("i0", "i1")), ("i0", ()), (["i0"], ("i0",)), (1, ("1",))):
        with pytest.raises(Exception, match="not allowed here"):
            refuse_unlisted(Params(actds_intervene=value), names)
    with pytest.raises(ActdsError, match="requests in a file of a server"):
        plan_interventions(written(tmp_path, {"requests": ["id a"]}), SPECS, live=True)


def test_the_plan_reads_back_in_another_process_and_digests_do_not_depend_on_strength(
    tmp_path: Path,
) -> None:
    patch = {"hook": "attn_out.2", "op": "patch", "rows": "rows.npy"}
    items = ({}, {"edits": [{**EDIT, "strength": 3.0}]}, {"edits": [patch], "start": 2})
    planned = plan_interventions(written(tmp_path, *items), SPECS)
    again = Planned.from_bytes(planned.to_bytes())
    assert again.interventions == planned.interventions and again.sha256 == planned.sha256
    for ours, theirs in zip(again.arrays, planned.arrays, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    first, stronger, patched = (item.edits[0] for item in planned.interventions)
    assert first.sha256 == stronger.sha256 != patched.sha256
    # As many rows as the file has are patched.
    assert planned.interventions[2].positions == (2, 5)


class Layer(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return hidden.clone(), residual.clone()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer(), Layer()])


@pytest.mark.parametrize("fixed_shape", [False, True])
def test_marked_rows_alone_are_changed_in_either_form_of_the_op(
    fixed_shape: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the ops of a fixed shape, too, which run on a GPU."""
    if fixed_shape:
        monkeypatch.setattr(
            edits, "change_some",
            lambda hidden, residual, at, lines, tables: edits.change_all(
                hidden, residual, seen["lines"], tables
            ),
        )  # fmt: skip
    model, seen = Model(), {}
    items = ({"edits": [{**EDIT, "strength": 2.0}], "start": 1, "stop": 3}, {"start": 5})
    planned = plan_interventions(written(tmp_path, *items), SPECS)
    changes = Edits(model, planned, SPECS, max_rows=16, device=torch.device("cpu"), form="sum")
    seen["lines"] = changes.buffer[0, :9]
    rows = [Row(2, 7, 0, (Applied(1, 1, 3, 1), Applied(2, 5, 1 << 32, 5)))]
    changes.set(9, rows)
    assert changes.marks.tolist() == [0, 0, 0, 1, 1, 0, 0, 2, 2]
    torch.manual_seed(0)
    hidden, residual = torch.randn(2, 9, D)
    for k, layer in enumerate(model.layers):
        out = layer(hidden, residual)
        want = hidden + residual
        if k == 1:
            for row, mark in enumerate(changes.marks.tolist()):
                want[row] += {0: 0.0, 1: 2.0, 2: 1.0}[mark] * torch.from_numpy(vector)
        unmarked = torch.from_numpy(changes.marks == 0)
        assert torch.equal(out[0] + out[1], want) or k == 1
        torch.testing.assert_close(out[0] + out[1], want, rtol=0, atol=1e-6)
        assert torch.equal(out[0][unmarked], hidden[unmarked])
        assert torch.equal(out[1][unmarked], residual[unmarked])
    # The next step has none: nothing of this one is left in the buffer.
    changes.set(4, [])
    assert not changes.buffer.any() and not changes.marks.any()


def test_a_place_whose_rows_are_a_copy_is_refused(tmp_path: Path) -> None:
    class Copies(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)])

    model = Copies()
    planned = plan_interventions(written(tmp_path, {}), SPECS)
    Edits(model, planned, SPECS, max_rows=4, device=torch.device("cpu"), form="first")
    whole = torch.randn(2, D, 3).transpose(1, 2)  # its rows cannot be viewed as a matrix
    with pytest.raises(ActdsError, match="rows that the model computes anew"):
        model.layers[1](whole.transpose(0, 1))
