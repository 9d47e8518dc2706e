"""Run the matrix of families and write what it came to: results, and a page of the docs.

python -m actds_testing.families.table            run every family, write the results and the page
python -m actds_testing.families.table qwen3 phi  run these again, keep the other results
python -m actds_testing.families.table --graphs   run what is right in graphs too, add the results
python -m actds_testing.families.table --page     write the page from the results that are there
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from actds_testing.families.layouts import KINDS
from actds_testing.families.models import FAMILIES
from actds_testing.families.zygote import GRAPHS, WHOLE
from actds_testing.places import BENCHMARKS, DOCS

RESULTS = BENCHMARKS / "results" / "families.json"
PAGE = DOCS / "families.md"
TIMEOUT_S = 4 * 3600
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
TITLES = {
    "right": "Right",
    "refused": "Refused",
    "not started": "Not started",
    "wrong": "WRONG",
    "failed": "Failed",
}
INTRODUCTION = """\
# Model families

Whether every hook kind of a family is what its name says
([section 3.1](../spec/0.1/03-genesis.md)): tiny models with random weights, made by `transformers`,
are harvested by `actds write` with a real vLLM engine on a CPU, with prefix hits, chunked prefill
and decoding, and every stored row of the first, a middle and the last layer is compared with what
`transformers` has at the same place in a plain forward. Those places are written down by hand for
every family (`testing/actds_testing/families/layouts.py`); the writer finds its own by itself. The
figure is the largest relative L2 distance of a row, with float32 on both sides.

- *Right*: at most 1e-4, and 1e-5 as a mean over rows, or the bound that the note gives a reason
  for.
- *Refused*: `actds write` stored nothing, for the reason given. E507 is the check before the first
  row: the rows in this engine are not those of `transformers`.
- *Not started*: this vLLM does not run the model on a CPU, without any capture. Nothing is said
  about a GPU.

Each is then served again by `actds replay --alone`, with a vector added to the stream of one
request (`--intervene`), and these rows are compared in the same way: those of that request with a
forward that adds the same vector.

*In graphs* is the same comparison, of every kind at one layer, where this CPU runs what a GPU does:
vLLM's compilation mode 3 with Inductor and its passes, pieces in CUDA graphs that replay
(`testing/actds_testing/cpu_graphs.py`), steps padded to their sizes. *Refused*: the check before
the first row found other rows than those of the eager engine (E507), and nothing was stored.

A real model may differ from the tiny one by its configuration, and a class may be missing here:
the check before the first row looks at the model that is harvested ([harvest.md](harvest.md)).

What this matrix found in the engine itself, with vLLM 0.32.0:

- On a CPU, its rotary kernel takes queries and keys of three dimensions for one head, and leaves
  most of them unrotated: DeepSeek-V2 and V3, GLM-4-MoE-lite, LFM2 and LFM2-MoE compute something
  else than `transformers`, and are refused. With the rotation that vLLM has in PyTorch they are
  right, so this is no statement about other devices.
- dots.llm1 and Solar Open, whose experts vLLM runs through `transformers`, are refused in graphs
  when all kinds are hooked. For dots.llm1 it is `resid_mid`: behind it, Inductor's code for a CPU
  computes another `mlp_out`. Without it the other kinds are right, without Inductor all of them
  are, and without hooks the probabilities of tokens. Why is not known.
- Cohere 2 sees one token more than `transformers` in layers with a sliding window: rows agree up
  to the length of the window, and differ beyond it. vLLM's source says that this is meant.

"""

EVERY_KIND = """\
The largest relative L2 distance of a row, in the layers that have the place. A star: some of the
three layers have no such place, or are refused. Empty: no layer has it, or all are refused."""
REFUSED = """\
Places that some model of the family has and the writer does not take, with what it says. A place
that a family does not have at all (a norm of the output, experts, attention in a Mamba layer, a
stream between attention and MLP side by side) is refused too, and not listed."""
NO_PLACE = ("without a known", "configuration that lacks", "side by side")
"""Words of refusals of places that a layer does not have."""


def run(
    out: Path, slugs: Sequence[str] = (), *, whole: bool = False, graphs: bool = False
) -> dict[str, Any]:
    """Run families into a folder, all of them without slugs; return the results by name.

    Args:
        whole: compare every kind at all layers of the page, not at one; takes twice as long.
        graphs: compile, and run pieces in graphs; takes five times as long.

    Raises:
        subprocess.SubprocessError: the matrix itself broke.
    """
    subprocess.run(
        [sys.executable, "-m", "actds_testing.families.zygote", str(out), *slugs],
        env={
            **os.environ,
            **ENVIRONMENT,
            WHOLE: "1" if whole else "",
            GRAPHS: "1" if graphs else "",
        },
        check=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    return {result["family"]: result for result in found}


def slugs_in_graphs(results: dict[str, Any]) -> list[str]:
    """Return the slugs of the families that are right in the eager engine."""
    right = {f["family"] for f in results["families"] if f["outcome"] == "right"}
    return [family.slug for family in FAMILIES if family.name in right]


def in_graphs(result: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a family's run in graphs."""
    if result["outcome"] not in ("right", "wrong"):
        return {name: result[name] for name in ("outcome", "reason")}
    kept = {name: result["graphs"][name] for name in ("captured", "replayed", "moved", "steps")}
    largest = max(result["relative_l2"].values())
    return {"outcome": result["outcome"], "largest_l2": float(f"{largest:.3g}"),
            "hooks": sorted(result["relative_l2"]), **kept}  # fmt: skip


def setting() -> dict[str, str]:
    """Return what decides over outcomes: versions, and instructions that kernels ask for."""
    flags = set(re.findall(r"\w+", _processor_flags()))
    return {
        "vllm": _version("vllm-cpu", "vllm"),
        "transformers": _version("transformers"),
        "torch": _version("torch"),
        "processor": " ".join(name for name in INSTRUCTIONS if name in flags) or "neither",
    }


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def document(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is committed: the results and what they were measured with."""
    families = [found[name] for name in sorted(found, key=str.casefold)]
    return {**setting(), "families": [_rounded(family) for family in families]}


def _rounded(family: dict[str, Any]) -> dict[str, Any]:
    """Return a result with three digits of every distance."""
    return {
        name: {hook: float(f"{v:.3g}") for hook, v in value.items()}
        if name.endswith("_l2")
        else value
        for name, value in family.items()
    }


def render(results: dict[str, Any]) -> str:
    """Return the page of the docs."""
    families = results["families"]
    counts = ", ".join(
        f"{sum(f['outcome'] == outcome for f in families)} {outcome}"
        for outcome in TITLES
        if any(f["outcome"] == outcome for f in families)
    )
    lines = [
        INTRODUCTION.rstrip(),
        "",
        f"Measured with {results['vllm']}, transformers {results['transformers']} and torch "
        f"{results['torch']},\non a processor with {results['processor']}: {counts}.\n"
        "Written by `python -m actds_testing.families.table`, which reruns all of it in some\n"
        "minutes; `make families` compares.",
    ]
    lines[-1] += "\n"
    lines.append(
        "`resid_post` by family is in the first table, the other kinds in the one after it."
    )
    for outcome, title in TITLES.items():
        some = [f for f in families if f["outcome"] == outcome]
        if some:
            lines += ["", f"## {title}", "", *_table(outcome, some)]
            if outcome == "right":
                lines += ["", "## Every kind", "", EVERY_KIND, "", *_kinds(some)]
                lines += ["", "## Kinds that are refused", "", REFUSED, "", *_refused(some)]
    return "\n".join(lines).rstrip() + "\n"


def verified_kinds(results: dict[str, Any]) -> dict[str, set[str]]:
    """Return the kinds beside ``resid_post`` by class of vLLM that all its families were right in.

    A family is right in a kind if its rows were compared and no layer was refused for its rows.
    Classes of the Transformers backend run models of any family: nothing is verified for them.
    """
    found: dict[str, set[str]] = {}
    for family in results["families"]:
        name = family.get("vllm_class", "")
        if not name or name.startswith("Transformers") or family["outcome"] == "not started":
            continue
        known = {hook.partition(".")[0] for hook in family.get("relative_l2", {})}
        for hook, reason in family.get("refused_hooks", {}).items():
            if not any(words in reason for words in NO_PLACE):
                known.discard(hook.partition(".")[0])
        found[name] = found.get(name, known) & known
    beside = {name: kinds - {"resid_post"} for name, kinds in found.items()}
    return {name: kinds for name, kinds in beside.items() if kinds}


def _table(outcome: str, families: list[dict[str, Any]]) -> list[str]:
    figures = outcome in ("right", "wrong")
    last = ["largest relative L2", "in graphs", "note"] if figures else ["reason"]
    head = ["family", "class in vLLM", "class in transformers", *last]
    lines = [_line(head), _line(["---"] * len(head))]
    for family in families:
        names = [family["family"], *map(_code, _classes(family))]
        if figures:
            stream = [v for k, v in family["relative_l2"].items() if k.startswith("resid_post.")]
            graphs = family.get("graphs", {})
            value = graphs.get("outcome", "")
            if value == "right":
                value = f"{graphs['largest_l2']:.0e}"
            lines.append(_line([*names, f"{max(stream):.0e}", value, family.get("note", "")]))
        else:
            code = f"{family['code']}: " if "code" in family else ""
            note = f" ({family['note']})" if "note" in family and code else ""
            lines.append(_line([*names, f"{code}{_cell(family['reason'])}{note}"]))
    return lines


def _kinds(families: list[dict[str, Any]]) -> list[str]:
    kinds = [kind for kind in KINDS if kind != "resid_post"]
    lines = [_line(["family", *map(_code, kinds)]), _line(["---"] * (1 + len(kinds)))]
    for family in families:
        cells = []
        for kind in kinds:
            known = {k: v for k, v in family["relative_l2"].items() if k.startswith(f"{kind}.")}
            some = any(name.startswith(f"{kind}.") for name in family["refused_hooks"])
            cells.append(f"{max(known.values()):.0e}{'*' * some}" if known else "")
        lines.append(_line([family["family"], *cells]))
    return lines


def _refused(families: list[dict[str, Any]]) -> list[str]:
    lines = [_line(["family", "hooks", "reason"]), _line(["---"] * 3)]
    for family in families:
        reasons: dict[str, list[str]] = {}
        for hook, reason in family["refused_hooks"].items():
            if not any(words in reason for words in NO_PLACE):
                reasons.setdefault(_cell(reason), []).append(_code(hook))
        lines += [_line([family["family"], ", ".join(h), why]) for why, h in reasons.items()]
    return lines


def _classes(family: dict[str, Any]) -> tuple[str, str]:
    return family.get("vllm_class", ""), family.get("transformers_class", "")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").rstrip(".")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _version(*names: str) -> str:
    for name in names:
        try:
            return f"{name} {version(name)}" if len(names) > 1 else version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def main() -> None:
    """Write results and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="only the page, from the results")
    parser.add_argument("--graphs", action="store_true", help="in graphs, beside what is known")
    parser.add_argument("families", nargs="*", help="names as in the files of tests/matrix")
    arguments = parser.parse_args()
    if not arguments.page:
        known = json.loads(RESULTS.read_text("utf-8"))
        kept = {f["family"]: f for f in known["families"]}
        slugs = arguments.families or (slugs_in_graphs(known) if arguments.graphs else [])
        with tempfile.TemporaryDirectory() as folder:
            found = run(Path(folder), slugs, whole=not arguments.graphs, graphs=arguments.graphs)
        if arguments.graphs:
            found = {name: {**kept[name], "graphs": in_graphs(r)} for name, r in found.items()}
        elif not slugs:
            kept = {}
        text = json.dumps(document({**kept, **found}), indent=1, ensure_ascii=False)
        RESULTS.write_text(text + "\n", encoding="utf-8")
    PAGE.write_text(render(json.loads(RESULTS.read_text("utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
