"""The transformers engine: static batches in the command's own process.

The reference engine, and the one for models that vLLM cannot run; simple rather than fast. A batch
is padded on the left: every request samples from the last column, and the distance between two
tokens is that of their positions, which sliding windows depend on. After every forward the rows of
real tokens are selected from the padded ones. There is no prefix cache and no preemption.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from actds.errors import ActdsError
from actds.format.interventions import Applied
from actds.text import one_line
from actds_writers.engine_protocol import OPTION, Finished, engine_error
from actds_writers.engines.transformers.options import Options
from actds_writers.ipc.link import Link
from actds_writers.ipc.messages import Fact, HookSpec, IntArray
from actds_writers.model_folder import model_name
from actds_writers.provenance import Readers, engine_facts, observed
from actds_writers.sampling import Regime

try:
    import torch
    import transformers

    from actds_writers.capture import op as capture
    from actds_writers.capture.check import (
        DID_NOT_RUN,
        HookCheck,
        NoReferenceError,
        bound,
        check_prompts,
        compare_with_forward,
        reference_states,
        require_finite,
        without_reference,
    )
    from actds_writers.capture.edits import Row
    from actds_writers.capture.hooks import raise_all
    from actds_writers.capture.op import Reading
    from actds_writers.capture.stages import Step
    from actds_writers.capture.taps import decoder_layers
    from actds_writers.engines.account import (
        SchedulerSide,
        WorkerSide,
        edits_of,
        layer_config,
        reporting_failure,
    )
except ImportError as missing:
    raise ActdsError(
        "E011",
        "transformers",
        got=str(missing).splitlines()[0],
        expected="torch and transformers beside actds",
        next_step="pip install torch transformers accelerate",
    ) from None


NO_BLOCKS = "a transformers cache has no blocks"


@dataclass
class Sequence:
    """One running or waiting request; sampled greedily without a generator."""

    key: str
    number: int
    token_ids: list[int]
    prompt_len: int
    max_tokens: int
    generator: torch.Generator | None = None
    applied: tuple[Applied, ...] = ()

    @property
    def n_sampled(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True)
class Columns:
    """The columns of a padded batch that a step computes.

    Args:
        sequences: requests with a token in the columns, in row order.
        index: row of each token in the flattened forward.
    """

    width: int
    sequences: list[Sequence]
    n_rows: IntArray
    positions: IntArray
    index: IntArray


@dataclass
class Batch:
    """A static batch: prefilled in chunks of columns, then decoded a column per step.

    Requests that end leave it. A step has at most ``max_tokens``, padding included.
    """

    model: Any
    sequences: list[Sequence]
    max_tokens: int
    cache: Any = None
    input_ids: torch.Tensor | None = None
    _column: int = 0
    _pads: IntArray = field(init=False)
    _mask: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        lengths = np.array([s.prompt_len for s in self.sequences], np.int64)
        self._width = int(lengths.max())
        self._pads = self._width - lengths
        columns = np.arange(self._width)
        self._mask = self._tensor((columns[None] >= self._pads[:, None]).astype(np.int64))
        self._sparing = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @property
    def n_columns(self) -> int:
        chunk = max(1, self.max_tokens // len(self.sequences))
        return min(chunk, self._width - self._column)

    def next_columns(self) -> Columns:
        columns = self._column + np.arange(self.n_columns)
        positions = columns[None] - self._pads[:, None]
        real = positions >= 0
        counts = real.sum(axis=1)
        return Columns(
            width=len(columns),
            sequences=[s for s, n in zip(self.sequences, counts, strict=True) if n],
            n_rows=counts[counts > 0],
            positions=positions[real],
            index=np.flatnonzero(real),
        )

    def forward(self, columns: Columns) -> torch.Tensor | None:
        """Run the model; return the logits of the last column, ``None`` within the prefill."""
        stop = self._column + columns.width
        ids = np.zeros((len(self.sequences), columns.width), np.int64)
        for row, (sequence, pad) in enumerate(zip(self.sequences, self._pads, strict=True)):
            first = self._column - int(pad)
            tokens = sequence.token_ids[max(first, 0) : max(first + columns.width, 0)]
            ids[row, columns.width - len(tokens) :] = tokens
        self.input_ids = self._tensor(ids)
        mask = self._mask[:, :stop]
        columns_at = torch.arange(self._column, stop, device=mask.device)
        positions = (columns_at[None] - self._tensor(self._pads)[:, None]).clamp(min=0)
        output = self.model(
            input_ids=self.input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            **({"logits_to_keep": 1} if self._sparing else {}),
        )
        self.cache, self._column = output.past_key_values, stop
        return output.logits[:, -1] if stop == self._width else None

    def append(self, tokens: list[int], alive: list[bool]) -> None:
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.token_ids.append(token)
        self._width += 1
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self.keep(alive)

    def keep(self, alive: list[bool]) -> None:
        if all(alive):
            return
        rows = np.flatnonzero(alive)
        self.sequences = [self.sequences[row] for row in rows]
        self._pads = self._pads[rows]
        index = self._tensor(rows)
        self._mask = self._mask[index]
        if len(rows) and self.cache is not None:
            # Made for beam search; the only selection that every kind of cache has.
            self.cache.reorder_cache(index)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.model.device)


class Capture(WorkerSide):
    """The worker side: captures from one transformers model.

    Raises as ``WorkerSide``; E507 rows that are not the model's.
    """

    def __init__(self, model: Any, link: Link, max_rows: int) -> None:
        layers = decoder_layers(model)
        config = model.config.get_text_config()
        with reporting_failure(link):
            if not layers:
                raise ActdsError(
                    "E007",
                    type(model).__name__,
                    got="no module named layers.N",
                    expected="a model whose decoder layers are found by that name",
                )
            about: dict[str, Any] = {
                "config": layer_config(config, int(config.hidden_size), len(layers)),
                "computed": model.dtype,
                "device": model.device,
                "max_rows": max_rows,
            }
            super().__init__(model, link, **about)
            if link.interventions_path is not None:
                self.edits = edits_of(link, model, **about)
        if link.settings.check:
            link.note("Comparing rows of two short prompts with the model's own")
            try:
                self.check(lambda: check_hooks(model, self.buffers, self.hooks, max_rows))
            except ActdsError:
                self.close()
                raise

    def mark(self, columns: Columns) -> None:
        """Say what interventions change of the columns that the model runs next."""
        if self.edits is not None:
            firsts = np.cumsum(columns.n_rows) - columns.n_rows
            rows = [
                Row(first, count, int(columns.positions[first]), sequence.applied)
                for sequence, first, count in zip(
                    columns.sequences, firsts.tolist(), columns.n_rows.tolist(), strict=True
                )
                if sequence.applied
            ]
            self.edits.set(len(columns.index), rows, torch.from_numpy(columns.index))

    def after_step(
        self,
        step: int,
        finished: tuple[int, ...],
        columns: Columns,
        input_ids: torch.Tensor,
        duration_ns: int,
    ) -> None:
        """Hand over the rows of a step whose model read ``input_ids``, ``(n_requests, width)``."""
        n, n_padded = len(columns.index), input_ids.numel()
        seen = set(self.buffers.seen.tolist())
        if seen != {n_padded}:
            got = f"{' or '.join(map(str, sorted(seen)))} rows at a hook"
            self.stop(step, got, f"{n_padded} rows")
        index = torch.from_numpy(columns.index).to(input_ids.device)
        if n < n_padded:
            self.buffers.compact(index)
        numbers, prompt_lens = np.array([(s.number, s.prompt_len) for s in columns.sequences]).T
        self.hand_over(
            Step(
                step,
                numbers,
                columns.n_rows,
                prompt_lens,
                (),
                finished,
                duration_ns,
                "eager",
                interventions=None if self.edits is None else self.edits.marks,
            ),
            input_ids.flatten()[index],
            torch.from_numpy(columns.positions).to(input_ids.device),
            waits=self.link.settings.entropy,
        )


def check_hooks(
    model: Any, buffers: capture.HookBuffers, hooks: tuple[HookSpec, ...], max_tokens: int
) -> HookCheck:
    """Return the result of the check of the hooks (spec 0.1 section 9.1).

    Raises E507 when rows are not the model's, E601 when they are not finite; E007 when the model's
    layers do not return its own hidden states.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    prompts = check_prompts(vocabulary, max_tokens)
    rows = _rows(model, buffers, prompts, max_tokens)
    kinds = sorted({hook.kind for hook in hooks})
    computed = str(model.dtype).removeprefix("torch.")
    of_hooks = dict(zip(hooks, rows, strict=True))
    require_finite(of_hooks, computed)
    try:
        states = reference_states(model, prompts, kinds)
    except NoReferenceError as missing:
        raise ActdsError(
            "E007",
            type(model).__name__,
            got=f"no stream to capture: {missing}",
            expected="decoder layers that return the residual stream",
            next_step="Harvest another model, or a hook that this one has.",
        ) from None
    bounds = {hook.name: bound(computed, hook.dtype) for hook in hooks}
    raise_all(without_reference(of_hooks, states))
    return compare_with_forward(of_hooks, states, bounds)


def _rows(
    model: Any, buffers: capture.HookBuffers, prompts: tuple[list[int], ...], max_tokens: int
) -> list[np.ndarray]:
    sequences = [
        Sequence(f"check-{number}", number, list(prompt), len(prompt), 1)
        for number, prompt in enumerate(prompts)
    ]
    by_hook: list[list[list[np.ndarray]]] = [[[] for _ in sequences] for _ in buffers.rows]
    batch, logits = Batch(model, sequences, max_tokens), None
    with torch.inference_mode():
        while logits is None:
            columns = batch.next_columns()
            buffers.reset()
            logits = batch.forward(columns)
            index = torch.from_numpy(columns.index).to(buffers.device)
            edges = np.cumsum(columns.n_rows)[:-1]
            for of_hook, rows, seen in zip(by_hook, buffers.rows, buffers.seen, strict=True):
                values = rows[index].float().cpu().numpy()
                if not int(seen):
                    values[:] = DID_NOT_RUN
                for sequence, part in zip(columns.sequences, np.split(values, edges), strict=True):
                    of_hook[sequence.number].append(part)
    return [np.concatenate([part for parts in of_hook for part in parts]) for of_hook in by_hook]


def _cache_dtype(cache: Any) -> str:
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None:
            return str(keys.dtype).removeprefix("torch.")
    raise AttributeError("no attention layer in the cache")


class Engine:
    """A transformers model that captures; request ``n`` samples with ``seed + n``.

    Raises:
        ActdsError: E005 no such model, E007 unknown layer, E009 an option that cannot be used.
    """

    def __init__(
        self, model: Path, options: Options, link: Link, *, temperature: float, seed: int
    ) -> None:
        self._folder, self._options, self._link = model, options, link
        self._temperature, self._seed = temperature, seed
        link.note("Loading the weights")
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
            self._scheduler = SchedulerSide(census)
            self._links = links.pop_all()

    def add(
        self, key: str, token_ids: list[int], max_tokens: int, regime: Regime | None = None
    ) -> None:
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
        self._capture.stages.learn(number, regime or Regime())
        sequence = Sequence(key, number, list(token_ids), len(token_ids), max_tokens, generator)
        sequence.applied = () if regime is None else regime.applied
        self._waiting.append(sequence)

    def step(self) -> list[Finished]:
        try:
            return self._step()
        except Exception as error:  # whatever torch raises
            raise engine_error(error) from error

    def abort(self, keys: list[str]) -> None:
        ended = set(keys)
        for sequence in [*(self._batch.sequences if self._batch else ()), *self._waiting]:
            if sequence.key in ended:
                self._end(sequence, "abort")
        self._waiting = deque(s for s in self._waiting if s.key not in ended)
        if self._batch is not None:
            self._batch.keep([s.key not in ended for s in self._batch.sequences])

    def shutdown(self) -> None:
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
        starts = np.concatenate([[0], np.cumsum(columns.n_rows)[:-1]])
        step, finished = self._scheduler.number_step(
            [sequence.number for sequence in columns.sequences],
            columns.positions[starts].tolist(),
            columns.n_rows.tolist(),
            waiting=len(self._waiting),
            running=len(batch.sequences),
        )
        self._capture.before_step()
        self._capture.mark(columns)
        began = time.monotonic_ns()
        with torch.inference_mode():
            logits = batch.forward(columns)
        duration_ns = time.monotonic_ns() - began
        assert batch.input_ids is not None
        self._capture.introduce(lambda: self._observe(batch.cache))
        self._capture.after_step(step, finished, columns, batch.input_ids, duration_ns)
        ended = self._sample(step, batch, logits) if logits is not None else []
        if self._link.settings.entropy:
            self._capture.stages.settle(step, {})
        return ended

    def _observe(self, cache: Any) -> tuple[Fact, ...]:
        model = self._model
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        quantization = getattr(model.config, "quantization_config", None)
        readers: Readers = {
            "engine.name": lambda: "transformers",
            "engine.version": lambda: str(transformers.__version__),
            "engine.runner": lambda: name,
            "engine.scheduler": lambda: name,
            "model.name": lambda: model_name(self._folder, self._options.served_model_name),
            "model.d_model": lambda: int(model.config.get_text_config().hidden_size),
            "model.quantization": lambda: str(
                getattr(quantization, "quant_method", None) or quantization or "none"
            ),
            "numerics.dtype": lambda: str(model.dtype).removeprefix("torch."),
            "numerics.kv_cache_dtype": lambda: _cache_dtype(cache),
            "numerics.kv_cache_class": lambda: type(cache).__name__,
            "numerics.attention_backend": lambda: str(model.config._attn_implementation),
            "serving.enforce_eager": lambda: not hasattr(model, "_orig_mod"),
            "serving.compilation_mode": lambda: "NONE",
            "serving.cudagraph_mode": lambda: "NONE",
            "serving.prefix_caching": lambda: False,
            "serving.chunked_prefill": lambda: True,
            "serving.async_scheduling": lambda: False,
            "serving.max_model_len": lambda: self.max_model_len,
            "serving.max_num_seqs": lambda: self._options.max_num_seqs,
            "serving.max_num_batched_tokens": lambda: self._options.max_num_batched_tokens,
            "serving.tensor_parallel": lambda: 1,
            "serving.pipeline_parallel": lambda: 1,
            "serving.data_parallel": lambda: 1,
            "serving.speculative_method": lambda: "none",
        }
        absent = ("serving.block_size", "serving.n_kv_blocks")
        return (
            *engine_facts(
                readers,
                model=model,
                folder=self._folder,
                device=model.device,
                client_pid=self._link.client_pid,
            ),
            *(observed(field, None, NO_BLOCKS) for field in absent),
        )

    def _sample(self, step: int, batch: Batch, logits: torch.Tensor) -> list[Finished]:
        requests = batch.sequences
        tokens = [self._pick(sequence, row) for sequence, row in zip(requests, logits, strict=True)]
        if self._link.settings.entropy:
            numbers = [sequence.number for sequence in requests]
            positions = [len(sequence.token_ids) for sequence in requests]
            self._scheduler.tell_sampled(step, numbers, positions, tokens)
            picked = torch.tensor(tokens, device=logits.device)
            self._capture.add_sampled(step, numbers, Reading.of(logits), picked)
        reasons: list[str | None] = []
        for sequence, token in zip(requests, tokens, strict=True):
            full = sequence.n_sampled + 1 >= sequence.max_tokens
            reasons.append("stop" if token in self._stop_tokens else "length" if full else None)
        batch.append(tokens, [reason is None for reason in reasons])
        ended = []
        for sequence, reason in zip(requests, reasons, strict=True):
            if reason is not None:
                self._end(sequence, reason)
                sampled = tuple(sequence.token_ids[sequence.prompt_len :])
                ended.append(Finished(sequence.key, None, sampled))
        return ended

    def _end(self, sequence: Sequence, reason: str) -> None:
        ids, prompt_len = sequence.token_ids, sequence.prompt_len
        self._scheduler.end_request(sequence.number, reason, ids, prompt_len)

    def _pick(self, sequence: Sequence, logits: torch.Tensor) -> int:
        if sequence.generator is None:
            return int(logits.argmax())
        odds = torch.softmax(logits.float() / self._temperature, dim=-1)
        return int(torch.multinomial(odds, 1, generator=sequence.generator))


def load_model(folder: Path, options: Options) -> Any:
    """Return the model on its device; E005 if it does not load completely, E009 without device."""
    arguments: dict[str, Any] = {"dtype": options.dtype, "local_files_only": True}
    if options.attn_implementation:
        arguments["attn_implementation"] = options.attn_implementation
    transformers.utils.logging.disable_progress_bar()  # the command has its own progress
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **arguments
        )
    except Exception as error:  # whatever a family's code raises
        words = one_line(error, 400)
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
        words = one_line(error, 300)
        raise ActdsError("E009", f"{OPTION} device", got=words, expected="a torch device") from None


def _stop_tokens(model: Any, folder: Path) -> frozenset[int]:
    from actds_writers.prompts.encoding import load_tokenizer

    of_config = model.generation_config.eos_token_id
    tokens = [of_config] if isinstance(of_config, int) else list(of_config or [])
    of_tokenizer = load_tokenizer(folder).eos_token_id
    return frozenset(tokens if of_tokenizer is None else [*tokens, of_tokenizer])


def max_model_len_of(model: Any, options: Options) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    given = options.max_model_len
    if limit is not None and given is not None and given > limit:
        expected = f"at most {limit}"
        raise ActdsError("E009", f"{OPTION} max_model_len", got=str(given), expected=expected)
    return int(given or limit or 2**31)
