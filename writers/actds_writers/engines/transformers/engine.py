"""The transformers engine: static batches in the command's own process.

The reference engine, and the one for models that vLLM cannot run; simple rather than fast.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path
from typing import Any

from actds.errors import ActdsError
from actds_writers.engine_protocol import OPTION, Finished
from actds_writers.engines.transformers import Options
from actds_writers.ipc.link import Link

try:
    import torch
    import transformers

    from actds_writers.engines.transformers.batch import Batch, Sequence
    from actds_writers.engines.transformers.worker import Capture, Scheduler, observe
except ImportError as missing:
    raise ActdsError(
        "E011",
        "transformers",
        got=str(missing).splitlines()[0],
        expected="torch and transformers beside actds",
        next_step="pip install torch transformers",
    ) from None


class Engine:
    """A transformers model that captures.

    Args:
        seed: seed of the sampling; request ``n`` uses ``seed + n``.

    Raises:
        ActdsError: E005 no such model, E007 unknown layer, E009 an option that cannot be used.
    """

    def __init__(
        self,
        model: Path,
        options: Options,
        link: Link,
        *,
        temperature: float,
        seed: int,
    ) -> None:
        self._folder, self._options, self._link = model, options, link
        self._temperature, self._seed = temperature, seed
        self._model = load_model(model, self._options)
        self._stop_tokens = _stop_tokens(self._model, model)
        self.max_model_len = max_model_len_of(self._model, self._options)
        self.max_num_seqs = options.max_num_seqs
        self._waiting: deque[Sequence] = deque()
        self._batch: Batch | None = None
        self._n_requests = 0
        with contextlib.ExitStack() as links:
            self._capture = Capture(self._model, link, self._options.max_num_batched_tokens)
            links.callback(self._capture.close)
            census = link.connect("census", "scheduler")
            links.callback(census.close)
            self._scheduler = Scheduler(census)
            self._links = links.pop_all()

    def add(self, key: str, token_ids: list[int], max_tokens: int) -> None:
        """Add a request; raises ``ValueError`` when the model cannot take it."""
        vocabulary = self._model.get_input_embeddings().num_embeddings
        if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
            raise ValueError(f"a token id outside the vocabulary of {vocabulary}")
        if len(token_ids) + max_tokens > self.max_model_len:
            raise ValueError(f"more than {self.max_model_len} positions")
        generator = None
        if self._temperature > 0:
            generator = torch.Generator(self._model.device)
            generator.manual_seed(self._seed + self._n_requests)
        sampling = {
            "max_tokens": max_tokens,
            "seed": self._seed + self._n_requests,
            "temperature": str(self._temperature),
        }
        self._n_requests += 1
        number = self._scheduler.number_request(key, len(token_ids), sampling)
        sequence = Sequence(key, number, list(token_ids), len(token_ids), max_tokens, generator)
        self._waiting.append(sequence)

    def step(self) -> list[Finished]:
        """Run one step; return the requests that ended.

        Raises:
            ActdsError: E504 when the model or the writer has failed.
        """
        try:
            return self._step()
        except Exception as error:  # whatever torch raises becomes one line
            words = " ".join(str(error).split())[:400] or type(error).__name__
            raise ActdsError("E504", "engine", got=words, expected="an engine that runs") from error

    def abort(self, keys: list[str]) -> None:
        """Abort requests."""
        ended = set(keys)
        for sequence in [*(self._batch.sequences if self._batch else ()), *self._waiting]:
            if sequence.key in ended:
                self._scheduler.finished(sequence, "abort")
        self._waiting = deque(s for s in self._waiting if s.key not in ended)
        if self._batch is not None:
            self._batch.keep([s.key not in ended for s in self._batch.sequences])

    def shutdown(self) -> None:
        """Close the connections."""
        self._links.close()
        self._batch = None

    def _step(self) -> list[Finished]:
        batch = self._batch
        if batch is None or not batch.sequences:
            n = min(len(self._waiting), self._options.max_num_seqs)
            if not n:
                return []
            requests = [self._waiting.popleft() for _ in range(n)]
            batch = Batch(self._model, requests, self._options.max_num_batched_tokens)
            self._batch = batch
        columns = batch.next_columns()
        n_running = len(batch.sequences)
        step, finished = self._scheduler.scheduled(columns, len(self._waiting), n_running)
        self._capture.before_step()
        began = time.monotonic_ns()
        with torch.inference_mode():
            logits = batch.forward(columns)
        duration_ns = time.monotonic_ns() - began
        assert batch.input_ids is not None
        self._capture.introduce(
            lambda: observe(
                self._model,
                batch.cache,
                type(self),
                self._folder,
                self._options,
                self.max_model_len,
                self._link.client_pid,
            )
        )
        self._capture.after_step(step, finished, columns, batch.input_ids, duration_ns)
        return self._sample(batch, logits) if logits is not None else []

    def _sample(self, batch: Batch, logits: torch.Tensor) -> list[Finished]:
        """Sample a token for every request of the batch; return those that end with it."""
        requests = batch.sequences
        tokens = [self._pick(sequence, row) for sequence, row in zip(requests, logits, strict=True)]
        reasons: list[str | None] = []
        for sequence, token in zip(requests, tokens, strict=True):
            full = sequence.n_sampled + 1 >= sequence.max_tokens
            reasons.append("stop" if token in self._stop_tokens else "length" if full else None)
        batch.append(tokens, [reason is None for reason in reasons])
        ended = []
        for sequence, reason in zip(requests, reasons, strict=True):
            if reason is not None:
                self._scheduler.finished(sequence, reason)
                sampled = tuple(sequence.token_ids[sequence.prompt_len :])
                ended.append(Finished(sequence.key, None, sampled))
        return ended

    def _pick(self, sequence: Sequence, logits: torch.Tensor) -> int:
        if sequence.generator is None:
            return int(logits.argmax())
        odds = torch.softmax(logits.float() / self._temperature, dim=-1)
        return int(torch.multinomial(odds, 1, generator=sequence.generator))


def load_model(folder: Path, options: Options) -> Any:
    """Return the model on its device.

    Raises:
        ActdsError: E005 when it cannot be loaded completely, E009 for a missing device.
    """
    arguments: dict[str, Any] = {"dtype": options.dtype, "local_files_only": True}
    if options.attn_implementation:
        arguments["attn_implementation"] = options.attn_implementation
    transformers.utils.logging.disable_progress_bar()  # the command has its own progress
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **arguments
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        words = " ".join(str(error).split())[:400]
        raise ActdsError("E005", folder.name, got=words, expected="a causal model") from None
    missing = sorted(report["missing_keys"])
    if missing:
        # Missing weights are random numbers, and so would be every row.
        got = f"no weight {missing[0]} (and {len(missing) - 1} more)"
        raise ActdsError("E005", folder.name, got=got, expected="every weight of the model")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        words = " ".join(str(error).split())[:300]
        raise ActdsError("E009", f"{OPTION} device", got=words, expected="a torch device") from None


def _stop_tokens(model: Any, folder: Path) -> frozenset[int]:
    from actds_writers.prompts.encoding import load_tokenizer

    found = model.generation_config.eos_token_id
    tokens = [found] if isinstance(found, int) else list(found or [])
    own = load_tokenizer(folder).eos_token_id
    return frozenset([*tokens, *([own] if own is not None else [])])


def max_model_len_of(model: Any, options: Options) -> int:
    """Return the positions per request.

    Raises:
        ActdsError: E009 for more than the model supports.
    """
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    asked = options.max_model_len
    if own is not None and asked is not None and asked > own:
        raise ActdsError(
            "E009", f"{OPTION} max_model_len", got=str(asked), expected=f"at most {own}"
        )
    return int(asked or own or 2**31)
