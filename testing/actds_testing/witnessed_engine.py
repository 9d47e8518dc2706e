"""A harvest whose engine and client are watched by a witness that knows nothing of the account.

``python -m actds_testing.witnessed_engine TASK.json FACTS.json`` runs ``actds write`` with what a
CPU does not do by itself, asynchronous scheduling, and with clients that leave. It writes down what
each forward was fed, what each client got, and vLLM's own counts of drafts. Workers in processes of
their own write down their forwards in files beside ``FACTS.json``; all of them must have been fed
the same.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from actds_testing.async_engine import allow_async_scheduling
from actds_testing.warm_engine import fork_workers
from actds_writers.engines.vllm.plugin import when_imported


@dataclass
class Facts:
    """What the witness saw.

    Args:
        fed: ``(step, request, position, token)`` of every row of every forward, in order.
        got: by request, prompt and the tokens that its client got.
        ended: by request, vLLM's reason of its end for the client.
        strings: requests that a stop string ended, by vLLM's word to the client.
        stood: ``(step, request, rows)`` with drafts: the rows whose tokens the model let stand.
        left: requests whose client left before their end.
        n_samples: how many times each prompt was sampled.
        drafted: draft tokens that vLLM counted.
        accepted: of these, accepted ones.
    """

    fed: list[tuple[int, str, int, int]] = field(default_factory=list)
    got: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    strings: list[str] = field(default_factory=list)
    stood: list[tuple[int, str, int]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    n_samples: int = 1
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def read(cls, path: Path) -> Facts:
        """Return what a witness wrote down."""
        return cls(**json.loads(path.read_text()))


def watch(facts: Facts, out: Path) -> None:
    """Write down every forward and every output of the engine in this process.

    Args:
        out: forwards of processes that are forked from this one go to ``OUT.<pid>``.
    """
    here = os.getpid()

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_worker import Worker

    execute, step = Worker.execute_model, LLMEngine.step
    stats, add = Scheduler.make_spec_decoding_stats, LLMEngine.add_request
    update = Scheduler.update_from_output

    def executing(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = execute(self, scheduled, *args, **kwargs)
        mark = getattr(scheduled, "_actds", None)
        if mark is not None and scheduled.total_num_scheduled_tokens:
            runner = self.model_runner
            state = getattr(runner, "execute_model_state", None)
            if hasattr(state, "input_batch"):  # the second generation
                order = list(state.input_batch.req_ids)
                ids, positions = runner.input_buffers.input_ids, runner.input_buffers.positions
            else:
                order = list(runner.input_batch.req_ids)
                ids = runner.input_ids.gpu
                positions = getattr(runner.positions, "gpu", runner.positions)
            names = [r[:-9] for r in order for _ in range(scheduled.num_scheduled_tokens.get(r, 0))]
            fed = zip(names, positions.tolist(), ids.tolist(), strict=False)
            rows = [(mark.step, *one) for one in fed]
            if os.getpid() == here:
                facts.fed += rows
            else:
                with out.with_suffix(f".{os.getpid()}").open("a") as lines:
                    lines.writelines(f"{json.dumps(row)}\n" for row in rows)
        return result

    def updating(self: Any, output: Any, results: Any) -> Any:
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            n_sampled = len(results.sampled_token_ids[results.req_id_to_index[name]])
            n_stood = output.num_scheduled_tokens[name] - len(drafts) + max(n_sampled - 1, 0)
            facts.stood.append((getattr(output, "_actds").step, name[:-9], n_stood))  # noqa: B009
        return update(self, output, results)

    def stepping(self: Any) -> Any:
        outputs = step(self)
        for output in outputs:
            for sample in output.outputs:
                name = name_of(output.request_id, sample.index)
                facts.got[name] = [*output.prompt_token_ids, *sample.token_ids]
                if sample.finish_reason is not None:
                    facts.ended[name] = sample.finish_reason
                if isinstance(sample.stop_reason, str):
                    facts.strings.append(name)
        return outputs

    def adding(self: Any, request_id: str, prompt: Any, params: Any, **rest: Any) -> Any:
        facts.n_samples = params.n
        for index in range(params.n):
            facts.got[name_of(request_id, index)] = list(prompt["prompt_token_ids"])
        return add(self, request_id, prompt, params, **rest)

    def name_of(request_id: str, index: int) -> str:
        return request_id if facts.n_samples == 1 else f"{index}_{request_id}"

    def counting(self: Any, found: Any, num_draft_tokens: int, num_accepted_tokens: int,
                 **rest: Any) -> Any:  # fmt: skip
        facts.drafted += num_draft_tokens
        facts.accepted += num_accepted_tokens
        return stats(self, found, num_draft_tokens=num_draft_tokens,
                     num_accepted_tokens=num_accepted_tokens, **rest)  # fmt: skip

    Worker.execute_model, LLMEngine.step = executing, stepping
    Scheduler.update_from_output = updating
    LLMEngine.add_request, Scheduler.make_spec_decoding_stats = adding, counting


def watch_to_the_end(folder: Path) -> None:
    """Watch the engine that this process will have, and write it down when the process ends."""
    facts = Facts()

    def begin(_module: object) -> None:
        watch(facts, folder / str(os.getpid()))
        atexit.register(lambda: write(facts, folder / f"{os.getpid()}.json"))

    when_imported("vllm.v1.engine.llm_engine", begin)


def write(facts: Facts, out: Path) -> None:
    """Write down what was seen, here and in the workers.

    Raises:
        ValueError: workers were fed different tokens.
    """
    workers = [
        [tuple(json.loads(line)) for line in found.read_text().splitlines()]
        for found in out.parent.glob(f"{out.stem}.*")
        if found != out
    ]
    if any(fed != workers[0] for fed in workers):
        raise ValueError("one worker was fed other tokens than another")
    fed = workers[0] if workers else facts.fed
    out.write_text(json.dumps({**asdict(facts), "fed": fed}))


def interpret_kernels() -> None:
    """Let vLLM's second model runner use Triton's interpreter, which has no driver."""
    from types import SimpleNamespace

    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def forget_ends() -> None:
    """Break the account on purpose: what was computed past an end is called captured."""
    from actds_writers.engines.vllm import scheduler

    part: Any = vars(scheduler)["_Part"]
    settle = part.settle

    def forgetful(self: Any) -> tuple[int, int]:
        late, rejected = settle(self)
        return 0 * late, rejected

    part.settle = forgetful


def impatient(facts: Facts, share: float, seed: int, stopped: Sequence[int]) -> Any:
    """Return a feed some of whose clients leave in the middle of their request.

    Args:
        stopped: the writer stands still from the first of these calls of the engine to the second.
    """
    from actds_writers.harvest.one_engine import Feed

    chance, calls = random.Random(seed), itertools.count()
    signals = dict(zip(stopped, (signal.SIGSTOP, signal.SIGCONT), strict=False))

    class Impatient(Feed):
        def step(self, engine: Any) -> None:
            if (number := next(calls)) in signals:
                pipeline: Any = self.poll.__self__  # type: ignore[attr-defined]
                os.kill(pipeline.processes["writer"].pid, signals[number])
            super().step(engine)
            leaving = {key for key in sorted(self.live) if chance.random() < share}
            if leaving:
                facts.left += sorted(leaving)
                self.abort(engine, leaving)

    return Impatient


def main(task: Mapping[str, Any], out: Path) -> None:
    """Run the harvest of a task and write down what the witness saw.

    Args:
        task: ``settings`` of ``WriteSettings``; ``asynchronous``, ``forgetful``; ``leave``, the
            share of clients that leave after each step; ``seed``; ``interpret`` Triton's kernels;
            ``fork`` the workers; ``stopped``, the calls of the engine during which the writer
            stands still.
    """
    from actds_writers.config import WriteSettings
    from actds_writers.harvest.run import harvest

    facts = Facts()
    if task.get("interpret"):
        interpret_kernels()
    if task.get("fork"):
        fork_workers()
    if task.get("asynchronous"):
        allow_async_scheduling()
    if task.get("forgetful"):
        forget_ends()
    # Before the plugin wraps them: what it returns is seen, and nothing of what it does.
    watch(facts, out)
    feed = impatient(facts, task.get("leave", 0.0), task.get("seed", 0), task.get("stopped", ()))
    harvest(WriteSettings.of(task["settings"]), feed=feed)
    write(facts, out)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
