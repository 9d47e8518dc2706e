"""What the last bits depend on is read where the engine computes, and not from what was asked."""

from __future__ import annotations

import ast
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from actds_writers.provenance import BATCH_INVARIANT, batch_invariant, torch_numerics

FLAG = "_batch_invariant_MODE"
CHANGED = """
import torch
from actds_writers.provenance import torch_numerics
torch.set_float32_matmul_precision("high")
torch.set_num_threads(3)
before = {name: read() for name, read in torch_numerics("cuda").items()}
cpu = {name: read() for name, read in torch_numerics("cpu").items()}
torch.backends.cuda.matmul.fp32_precision = "ieee"
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
after = {name: read() for name, read in torch_numerics("cuda").items()}
print([before, cpu, after])
"""


@pytest.mark.standard
def test_the_backends_word_counts_and_not_what_was_asked_for() -> None:
    ended = subprocess.run([sys.executable, "-c", CHANGED], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    before, cpu, after = ast.literal_eval(ended.stdout)
    assert before["numerics.matmul_precision"] == after["numerics.matmul_precision"] == "high"
    assert before["numerics.tf32"] is cpu["numerics.tf32"] is True
    assert after["numerics.tf32"] is False
    name = "numerics.reduced_precision_reduction"
    assert (before[name], after[name]) == ("bfloat16, float16", "float16")
    assert cpu["numerics.threads"] == 3 and name not in cpu and "numerics.threads" not in after


def test_what_torch_says_by_default_is_on_record() -> None:
    found = {name: read() for name, read in torch_numerics("cpu").items()}
    assert found["numerics.device"] == "cpu" and found["numerics.tf32"] is False
    assert found["numerics.threads"] == torch.get_num_threads()


@pytest.mark.parametrize("place", range(2))
def test_batch_invariance_is_what_the_worker_did(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in BATCH_INVARIANT:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert batch_invariant() is False  # asked for, and not done
    module = ModuleType(BATCH_INVARIANT[place])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(AttributeError):
        batch_invariant()
    vars(module)[FLAG] = True
    assert batch_invariant() is True


def test_vllm_holds_the_flag_where_it_is_read() -> None:
    module = pytest.importorskip(BATCH_INVARIANT[0])
    assert vars(module)[FLAG] is False and batch_invariant() is False
