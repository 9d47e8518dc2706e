"""Harvest every family and compare its rows with transformers; one JSON file each.

    python -m actds_testing.families.zygote FOLDER [SLUG ...]

vLLM and transformers are imported once; each family runs in forked processes, so that none can
hide the result of another, and ends after a time limit.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actds_testing import cpu_graphs
from actds_testing.families.layouts import KINDS, compared, hooks_of, stack_of, watched
from actds_testing.families.models import FAMILIES, N_LAYERS, Family, make
from actds_testing.warm_engine import know_class, load, wait

AT_ONCE = 2
TIMEOUT_S = 900.0
WHOLE = "ACTDS_FAMILIES_WHOLE"
"""Environment variable that asks for every kind at all layers that the page has."""
HOOKS = compared(whole=bool(os.environ.get(WHOLE)))
GRAPHS = "ACTDS_FAMILIES_GRAPHS"
"""Environment variable that asks for what GPUs run: pieces that Inductor compiled, in graphs."""
UNTUNED = {"cpp.simdlen": 1, "aot_inductor.debug_compile": True}
"""For the compiler of Inductor's C++, which no GPU runs: it takes longer than all else."""
ATTEMPTS = 4
"""Harvests of a family, each without the hooks that the one before was refused for."""
ENGINE = {
    "dtype": "float32", "block_size": "32", "max_model_len": "256", "max_num_seqs": "4",
    "max_num_batched_tokens": "128", "enforce_eager": "true",
    "distributed_executor_backend": "uni",
}  # fmt: skip
SHARED = "Every prompt begins with these words, which fill more than two blocks of the cache. "
PROMPTS = {
    "long": SHARED + "And this one goes on for longer than a step of the engine can take at once.",
    "short": "A prompt of its own.",
    "hit": SHARED + "One.",
    "again": SHARED + "One, and then another one.",
    "repeated": SHARED + "One.",
}
STEERED, STRENGTH = "long", 0.5
"""The request of the replay that is steered, at the first of the compared layers."""
ERROR = re.compile(r"\b(E\d{3}) (.*)")
NAMED = re.compile(rf"\b({'|'.join(KINDS)})[.:](\d+)(?=[:,; ])")


def harvest(family: Family, folder: Path, hooks: list[str]) -> None:
    """Run the command, in this process."""
    shutil.rmtree(folder / "acts", ignore_errors=True)
    prompts = "".join(json.dumps({"id": k, "prompt": v}) + "\n" for k, v in PROMPTS.items())
    (folder / "prompts.jsonl").write_text(prompts)
    _probe(folder / "absent.json", hooks)
    _command(
        family, folder, "write", str(folder / "acts"),
        "--prompts", str(folder / "prompts.jsonl"), "--max-tokens", "6",
        "--hooks", ";".join(hook.replace(".", ":") for hook in hooks),
    )  # fmt: skip


def replay(family: Family, folder: Path) -> None:
    """Serve the same tokens again, one request at a time, in this process; steer one of them."""
    import numpy as np

    import actds

    hooks = actds.open(folder / "acts").hooks
    steered = min((hook for hook in hooks if hook.startswith("resid_post.")), key=_layer)
    vector = np.random.default_rng(0).normal(size=hooks[steered].d_model).astype(np.float32)
    np.save(folder / "vector.npy", vector)
    edit = {"hook": steered, "op": "add", "vector": "vector.npy", "strength": STRENGTH}
    item = {"name": "steered", "edits": [edit], "requests": [f"id {STEERED}"]}
    document = {"schema": "actds.interventions/1", "interventions": [item]}
    (folder / "steered.json").write_text(json.dumps(document))
    _command(
        family, folder, "replay", str(folder / "acts"), str(folder / "again"), "--alone",
        "--intervene", str(folder / "steered.json"),
    )  # fmt: skip


def _layer(hook: str) -> int:
    return int(hook.rpartition(".")[2])


def _command(family: Family, folder: Path, *words: str) -> None:
    know_class(folder / "model")
    engine = engine_of(family)
    if "compilation_config" in engine:
        os.environ["VLLM_CACHE_ROOT"] = str(folder / "cache")
        cpu_graphs.force_graphs()
    sys.argv = [
        "actds", *words, "--model", str(folder / "model"), "--no-readouts",
        *(word for item in engine.items() for word in ("--engine-arg", "=".join(item))),
    ]  # fmt: skip
    from actds.cli import main

    try:
        main()
    finally:
        (folder / "graphs.json").write_text(json.dumps(cpu_graphs.COUNTS))


def engine_of(family: Family) -> dict[str, str]:
    """Return the options of a family's engine."""
    graphs = {}
    if os.environ.get(GRAPHS):
        compiled = cpu_graphs.compilation("inductor", inductor_compile_config=UNTUNED)
        graphs = {"enforce_eager": "false", "compilation_config": compiled}
    return {**ENGINE, **graphs, **dict(option.split("=", 1) for option in family.engine)}


def _probe(path: Path, asked: list[str]) -> None:
    """Write why the writer refuses each hook that is not asked for, as soon as it installs hooks.

    An empty reason stands for a hook that it would take.
    """
    from actds.errors import ActdsError
    from actds_writers.capture import op as capture
    from actds_writers.capture.hooks import find_kind

    install = capture.install

    def probing(model: Any, hooks: Any, *, form: Any, **more: Any) -> Any:
        absent = {}
        for hook in set(HOOKS) - set(asked):
            kind, _, layer = hook.partition(".")
            try:
                find_kind(kind).tap(model, int(layer), form)
                absent[hook] = ""
            except ActdsError as error:
                absent[hook] = f"{error.code}: {error.got}"
        path.write_text(json.dumps(absent, sort_keys=True))
        return install(model, hooks, form=form, **more)

    capture.install = probing


def generate(family: Family, folder: Path) -> None:
    """Run the engine without any capture, to tell whose an error is."""
    from vllm import LLM, SamplingParams

    know_class(folder / "model")
    typed = {k: v if k in ("dtype", "distributed_executor_backend") else json.loads(v)
             for k, v in engine_of(family).items()}  # fmt: skip
    if os.environ.get(GRAPHS):
        cpu_graphs.force_graphs()
    llm = LLM(str(folder / "model"), async_scheduling=False, **typed)
    llm.generate(list(PROMPTS.values()), SamplingParams(temperature=0, max_tokens=6))


def distances(family: Family, folder: Path, name: str = "acts") -> dict[str, Any]:
    """Return how far the stored rows of a dataset are from a plain forward of transformers."""
    import numpy as np

    import actds
    from actds_testing import harvest as h
    from actds_testing import tiny
    from actds_validators.validate.validation import validate

    report = validate(folder / name, "deep")
    assert not report.errors, f"the dataset is not valid: {report.errors[0]}"
    dataset = actds.open(folder / name)
    hooks = {hook: h.rows_of(dataset, hook) for hook in dataset.hooks}
    rows = next(iter(hooks.values()))
    tokens = {
        key: dict(enumerate(tiny.byte_tokenizer()(text)["input_ids"]))
        for key, text in PROMPTS.items()
    }
    names = h.external_ids(dataset)
    for shard in dataset.shards:
        for row in shard.tokens(["request", "position", "token_id"]).to_pylist():
            key = names[shard.manifest.run, row["request"]]
            known = tokens[key].setdefault(row["position"], row["token_id"])
            assert known == row["token_id"], f"another token at {key}:{row['position']}"
    every = {key: [ids[i] for i in range(len(ids))] for key, ids in tokens.items()}
    steered = None
    if name == "again":
        steered = min((hook for hook in hooks if hook.startswith("resid_post.")), key=_layer)
        marks = dataset.tokens()["intervention"].to_pylist()
        assert sum(marks) == len(every[STEERED]), "other rows are marked than were steered"
    want = reference(family, folder, every, steered)
    worst, mean = {}, {}
    for hook, found in hooks.items():
        got = np.stack(list(found.values()))
        wanted = np.stack([want[key][hook][position] for key, position in found])
        apart = h.relative_l2(got, wanted)
        mean[hook], worst[hook] = float(apart.mean()), float(apart.max())
    table = dataset.requests(run=True)
    (record,) = dataset.runs.values()
    return {
        "vllm_class": record.fields["model.architecture"].value,
        "check": json.loads(str(record.fields["capture.check"].value)).get("against"),
        "relative_l2": mean if family.mean else worst,
        "mean_l2": mean,
        "n_rows": len(rows),
        "n_cached": int(sum(table["cached_tokens"].to_pylist())),
        "right": all(value <= family.bound for value in (mean if family.mean else worst).values()),
    }


def reference(
    family: Family, folder: Path, tokens: dict[str, list[int]], steered: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return what hooks have to see, ``(n_positions, d_model)`` by request and hook."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if family.text else AutoModelForCausalLM
    model = folder / "model"
    plain = kind.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    states: dict[str, dict[str, Any]] = {name: {} for name in tokens}
    current = {"name": ""}

    def keep(hook: str, rows: torch.Tensor) -> None:
        states[current["name"]][hook] = rows.detach().float().reshape(-1, rows.shape[-1]).numpy()

    stack = stack_of(plain, N_LAYERS)
    with torch.no_grad(), watched(plain, stack, family, keep):
        if steered is not None:
            vector = STRENGTH * torch.from_numpy(np.load(folder / "vector.npy"))

            def steer(_module: Any, _args: Any, output: Any) -> None:
                if current["name"] == STEERED:
                    (output[0] if isinstance(output, tuple) else output).add_(vector)

            stack[_layer(steered)].register_forward_hook(steer)  # behind the one that reads
        for name, ids in tokens.items():
            current["name"] = name
            plain(torch.tensor([ids]), use_cache=False)
    return states


def known_hooks(family: Family, model: Path) -> list[str]:
    """Return the hooks that a family's model of transformers has, as written down by hand."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if family.text:
        return [hook for hook in HOOKS if hook.startswith("resid_post")]
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return hooks_of(list(stack_of(plain, N_LAYERS)), family)


def run_family(family: Family, folder: Path) -> dict[str, Any]:
    """Return a family's outcome: right, wrong, refused, not started or failed."""
    found: dict[str, Any] = {"family": family.name, "model_type": family.model_type}
    if family.note:
        found["note"] = family.note
    folder.mkdir(parents=True)
    try:
        make(family, folder / "model")
    except Exception as error:
        return {**found, "outcome": "not started", "reason": f"transformers: {words(error)}"}
    architecture = json.loads((folder / "model" / "config.json").read_text())["architectures"][0]
    found["transformers_class"] = architecture
    has = set(known_hooks(family, folder / "model"))
    hooks, refused = [hook for hook in HOOKS if hook in has], {}
    for attempt in range(ATTEMPTS):
        log_path = folder / f"harvest{attempt}.log"
        code, log = forked(functools.partial(harvest, family, folder, hooks), log_path)
        named = ERROR.findall(log)
        odd = _refused(named[-1]) if code and named else {}
        stream = [hook for hook in odd if hook.startswith("resid_post.")]
        if not odd or stream:
            break
        refused |= odd
        hooks = [hook for hook in hooks if hook not in odd]
    if code == 0:
        absent = json.loads((folder / "absent.json").read_text())
        found["refused_hooks"] = dict(sorted({**absent, **refused}.items()))
    found |= vllm_class(architecture)
    if code == 0:
        try:
            figures = distances(family, folder)
        except Exception as error:
            return {**found, "outcome": "failed", "reason": words(error),
                    "log": traceback.format_exc()[-2000:]}  # fmt: skip
        right = figures.pop("right")
        found |= {"outcome": "right" if right else "wrong", **figures}
        if os.environ.get(GRAPHS):
            counts = json.loads((folder / "graphs.json").read_text())
            return {**found, "graphs": {**counts, "steps": steps_by_mode(folder / "acts")}}
        return {**found, "replay": again(family, folder)}
    if named and named[-1][0] != "E504":
        reason = f"hook {stream[0]}: {odd[stream[0]][6:]}" if stream else plain(named[-1][1])
        return {**found, "outcome": "refused", "code": named[-1][0], "reason": reason}
    code, log = forked(lambda: generate(family, folder), folder / "generate.log")
    if code == 0:
        reason = plain(named[-1][1]) if named else "no error with a code"
        return {**found, "outcome": "failed", "reason": reason, "log": log[-2000:]}
    return {**found, "outcome": "not started", "reason": f"vLLM: {last_error(log)}"}


def again(family: Family, folder: Path) -> dict[str, Any]:
    """Return the outcome of a replay: right, wrong or failed, and every row's largest distance."""
    code, log = forked(functools.partial(replay, family, folder), folder / "replay.log")
    if code:
        return {"outcome": "failed", "reason": plain(log[-300:])}
    try:
        figures = distances(family, folder, "again")
    except Exception as error:
        return {"outcome": "failed", "reason": words(error)}
    return {
        "outcome": "right" if figures["right"] else "wrong",
        "largest_l2": max(figures["relative_l2"].values()),
        "n_rows": figures["n_rows"],
    }


def steps_by_mode(path: Path) -> dict[str, int]:
    """Return how many steps of a dataset ran in each way."""
    import actds

    return dict(Counter(step["kernel_mode"] for step in actds.open(path).steps().to_pylist()))


def _refused(error: tuple[str, str]) -> dict[str, str]:
    """Return the hooks that an error names, with the reason of each."""
    code, text = error
    found = {}
    for part in plain(text, 5000).split(" | "):
        names = [f"{kind}.{layer}" for kind, layer in NAMED.findall(f"{part} ")]
        reason = re.sub(r"^.*?(?:hook )?[a-z_]+[.:]\d+: ", "", part).partition("; expected")[0]
        found |= {name: f"{code}: {reason}" for name in names if name in HOOKS}
    return found


def vllm_class(architecture: str) -> dict[str, str]:
    """Return the class of vLLM that runs a model, as far as it knows one."""
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(architecture)
    if known is None:
        return {}
    cls = getattr(known, "class_name", None) or known.model_cls.__name__
    return {"vllm_class": str(cls)}


def words(error: BaseException) -> str:
    """Return an error in one line."""
    return plain(f"{type(error).__name__}: {error}")


def plain(text: str, longest: int = 300) -> str:
    """Return words without colours, paths of this machine and line breaks."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"/\S*/(site-packages/)?", "", " ".join(text.split()))
    return text[:longest]


def last_error(log: str) -> str:
    """Return the last line of a traceback that names an error."""
    lines = [re.sub(r"^\S*\[rank0\]:\s*", "", line) for line in log.splitlines()]
    errors = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    if not errors:
        return plain(lines[-1]) if lines else "no words"
    found = lines[errors[-1]]
    if "validation error" in found:  # pydantic says what it is in the line that follows
        found = " ".join(lines[errors[-1] : errors[-1] + 2]).partition(" [type=")[0]
        found = found.partition("Value error, ")[2] or found
    missing = re.findall(r"ModuleNotFoundError: (No module named '\w+')", log)
    if "failed to be inspected" in found and missing:
        found = missing[-1]
    return plain(re.split(r": \{|\. The available", found)[0])


def forked(call: Callable[[], None], log: Path) -> tuple[int, str]:
    """Run a call in a process of its own; return its exit code and what it said."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        code = 1
        try:
            said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(said, 1)
            os.dup2(said, 2)
            call()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    status = wait(pid, time.monotonic() + TIMEOUT_S)
    said_text = log.read_text(errors="replace") if log.exists() else ""
    return (os.waitstatus_to_exitcode(status) if status is not None else 124), said_text


def main(out: Path, slugs: list[str]) -> None:
    """Run the families, some at once."""
    import logging

    load()
    logging.disable(logging.NOTSET)
    waiting = [family for family in FAMILIES if not slugs or family.slug in slugs]
    waiting.reverse()
    running: dict[int, Family] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            family = waiting.pop()
            pid = os.fork()
            if pid == 0:
                found: dict[str, Any] = {"family": family.name, "outcome": "failed"}
                try:
                    found = run_family(family, out / family.slug)
                except BaseException:
                    found["reason"] = traceback.format_exc()[-2000:]
                (out / f"{family.slug}.json").write_text(json.dumps(found, indent=1))
                os._exit(0)
            running[pid] = family
        pid, _ = os.waitpid(-1, 0)
        running.pop(pid, None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
