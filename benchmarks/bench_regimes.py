"""Cost of ``actds regimes`` with a large dictionary, by rows: seconds and memory.

    python benchmarks/bench_regimes.py [--rows 20000 40000] [--features 16384] [--folder DIR]

Two datasets of the same tokens, whose rows differ by rounding: rows are paired by token, and every
instrument works. The dictionary is random, with a threshold that lets about 1 feature in 400 be
active. The command runs in a process of its own; seconds, CPU seconds and the largest resident
memory are those that the kernel counted for it (wait4), its start included. A million rows take
six minutes of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from bench_codec import table
from load_data import HOOK, PROMPT_LEN, activations, make_dataset
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[1]
ROWS_PER_SHARD = 16 * PROMPT_LEN


@dataclass(frozen=True)
class Result:
    """One comparison."""

    rows: int
    features: int
    dataset_mb: float
    wall_s: float
    cpu_s: float
    peak_mb: float
    result_kb: float
    verdicts: str


def datasets(folder: Path, n_rows: int, d_model: int) -> tuple[Path, Path]:
    """Return two sealed datasets of about so many rows, written where they are missing."""
    n_shards = max(1, round(n_rows / ROWS_PER_SHARD))
    base = activations(ROWS_PER_SHARD, d_model, 0)
    rng = np.random.default_rng(1)
    rows = base.view(ml_dtypes.bfloat16).astype(np.float32)
    rows *= 1 + 0.003 * rng.standard_normal(rows.shape, dtype=np.float32)
    moved = rows.astype(ml_dtypes.bfloat16).view(np.uint16)
    paths = folder / f"{n_rows}-{d_model}-a", folder / f"{n_rows}-{d_model}-b"
    for path, bits in zip(paths, (base, moved), strict=True):
        if not path.exists():
            make_dataset(path, bits, n_shards, raw=False)
    return paths


def dictionary(folder: Path, n_features: int, d_model: int) -> Path:
    """Write a random dictionary as SAELens does, and return its folder."""
    path = folder / f"sae-{n_features}-{d_model}"
    if path.exists():
        return path
    rng = np.random.default_rng(2)
    w_dec = rng.standard_normal((n_features, d_model), dtype=np.float32)
    w_dec /= np.linalg.norm(w_dec, axis=1, keepdims=True)
    rows = activations(4096, d_model, 0).view(ml_dtypes.bfloat16).astype(np.float32)
    weights = {
        "W_enc": np.ascontiguousarray(w_dec.T), "W_dec": w_dec * np.float32(0.1),
        "b_enc": np.zeros(n_features, np.float32), "b_dec": np.zeros(d_model, np.float32),
        "threshold": np.quantile(rows @ w_dec.T, 0.9975, axis=0).astype(np.float32),
    }  # fmt: skip
    path.mkdir()
    save_file(weights, path / "sae_weights.safetensors")
    config = {
        "architecture": "jumprelu", "d_in": d_model, "d_sae": n_features,
        "normalize_activations": "none",
        "metadata": {"sae_lens_version": "6.0.0", "hook_name": "blocks.10.hook_resid_post"},
    }  # fmt: skip
    (path / "cfg.json").write_text(json.dumps(config))
    return path


def measure(paths: tuple[Path, Path], sae: Path) -> Result:
    """Return what one comparison takes, result and page written."""
    with tempfile.TemporaryDirectory() as out:
        result, page = Path(out) / "regimes.json", Path(out) / "regimes.html"
        code = "from actds_studies.cli.commands import regimes; regimes(prog_name='actds regimes')"
        command = [sys.executable, "-c", code, *map(str, paths), "--sae", str(sae)]
        command += ["--hook", HOOK, "--json", str(result), "--html", str(page)]
        command += ["--fail-on", "never"]
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"actds regimes ended with code {process.returncode}")
        found = json.loads(result.read_text())
        nbytes = result.stat().st_size
    (contrast,) = found["contrasts"]
    said = "; ".join(f"{v['instrument']} {v['outcome']}" for v in contrast["verdicts"])
    return Result(
        rows=contrast["first"]["n_rows"],
        features=int(sae.name.split("-")[1]),
        dataset_mb=sum(
            p.stat().st_size for path in paths for p in path.rglob("*") if p.is_file()
        ) / 1e6,
        wall_s=wall,
        cpu_s=used.ru_utime + used.ru_stime,
        peak_mb=used.ru_maxrss * 1024 / 1e6,
        result_kb=nbytes / 1e3,
        verdicts=said,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 40_000], help="of each arm")
    parser.add_argument("--features", type=int, default=16_384)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where datasets stay; temporary when absent")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        sae = dictionary(folder, args.features, args.d_model)
        for n in args.rows:
            found = measure(datasets(folder, n, args.d_model), sae)
            results.append(asdict(found))
            said = f"{found.rows:,} rows: {found.wall_s:.0f} s, {found.cpu_s:.0f} CPU s"
            print(f"{said}, {found.peak_mb:.0f} MB", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"format": "actds.bench_regimes", "version": "1", "results": results}))
    else:
        print(table(results))


if __name__ == "__main__":
    main()
