"""An engine and a hook kind as another package would bring them: nothing in actds knows of them.

The engine steps a small torch model of its own: no vLLM, no transformers. Its residual stream has
32 channels in bfloat16, its MLPs 48 in float32; a row is a function of token and position alone.
``register`` writes the metadata by which an installed package is found.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from actds.errors import ActdsError
from actds.format.schema import REQUIRED_PROVENANCE, DType
from actds_testing.tiny import write_byte_tokenizer
from actds_writers.capture.check import HookCheck, bound, check_prompts, compare_with_forward
from actds_writers.capture.stages import Step
from actds_writers.capture.taps import HookKind, ModelConfig, StreamForm, Tap, decoder_layers
from actds_writers.engine_protocol import Engine, EngineKind, EngineOptions, Finished
from actds_writers.engines.account import SchedulerSide, WorkerSide
from actds_writers.ipc.link import Link
from actds_writers.ipc.messages import Fact
from actds_writers.provenance import engine_facts
from actds_writers.sampling import Regime

D_MODEL, MLP, N_LAYERS, VOCABULARY, MAX_LEN = 32, 48, 3, 320, 256
ENTRY_POINTS = """[actds.engines]
toy = actds_testing.toy:TOY

[actds.hook_kinds]
toy_mlp = actds_testing.toy:TOY_MLP
"""


def register(folder: Path) -> Path:
    """Write the metadata of an installed package; the folder then belongs on ``sys.path``."""
    metadata = folder / "actds_toy-0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: actds-toy\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


class ToyMlp(HookKind):
    """What the MLP of a decoder layer returns."""

    name = "toy_mlp"

    def width(self, config: ModelConfig) -> int:
        """Return the width of the toy's MLP; of other models, that of the stream."""
        return int(config.get("mlp_size", config["hidden_size"]))

    def dtype(self, computed: DType) -> DType:
        """Return float32, whatever the stream is computed in."""
        return "float32"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the output of the module ``mlp`` of a layer; raises as ``HookKind.tap``."""
        mlp = getattr(decoder_layers(model).get(layer), "mlp", None)
        if not isinstance(mlp, torch.nn.Module):
            raise ActdsError("E007", f"{self.name}:{layer}", got="no mlp", expected="a layer's mlp")
        return Tap(mlp, _output)


def _output(_args: Any, _kwargs: Any, output: Any) -> tuple[torch.Tensor, None]:
    return output.flatten(0, -2), None


TOY_MLP = ToyMlp()


class Layer(torch.nn.Module):
    """A decoder layer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(D_MODEL, MLP), torch.nn.ReLU())
        self.down = torch.nn.Linear(MLP, D_MODEL)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the stream with what the layer adds."""
        added: torch.Tensor = self.down(self.mlp(stream.float()))
        return stream + added.to(stream.dtype)


class Model(torch.nn.Module):
    """The toy model, its weights a function of the seed in its folder."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        self.tokens = torch.nn.Embedding(VOCABULARY, D_MODEL, dtype=torch.bfloat16)
        self.positions = torch.nn.Embedding(MAX_LEN, D_MODEL, dtype=torch.bfloat16)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(N_LAYERS))
        self.head = torch.nn.Linear(D_MODEL, VOCABULARY)
        torch.set_rng_state(state)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits of every row."""
        stream = self.tokens(token_ids) + self.positions(positions)
        for layer in self.layers:
            stream = layer(stream)
        logits: torch.Tensor = self.head(stream.float())
        return logits


def plain_forward(
    model: Model, token_ids: list[int], first: int = 0
) -> dict[str, dict[int, torch.Tensor]]:
    """Return what hooks have to see, by kind and layer, without any hook."""
    with torch.inference_mode():
        ids = torch.tensor(token_ids)
        stream = model.tokens(ids) + model.positions(torch.arange(first, first + len(token_ids)))
        found: dict[str, dict[int, torch.Tensor]] = {"resid_post": {}, "toy_mlp": {}}
        for number, layer in enumerate(model.layers):
            found["toy_mlp"][number] = layer.mlp[1](layer.mlp[0](stream.float()))  # type: ignore[index,operator,union-attr]
            stream = stream + layer.down(found["toy_mlp"][number]).to(stream.dtype)  # type: ignore[operator]
            found["resid_post"][number] = stream
    return found


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write a model folder: configuration, tokenizer, and no weight file."""
    folder.mkdir(parents=True)
    config = {"hidden_size": D_MODEL, "num_hidden_layers": N_LAYERS, "mlp_size": MLP}
    config |= {"dtype": "bfloat16", "max_position_embeddings": MAX_LEN, "seed": seed}
    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder)
    return folder


def load_model(folder: Path) -> Model:
    """Return the model of a folder."""
    return Model(int(json.loads((folder / "config.json").read_bytes())["seed"])).eval()


class ToyOptions(EngineOptions):
    """Options of the toy engine.

    Args:
        max_num_seqs: requests of a step at most.
        chunk: tokens of a prompt that a step computes at most.
        replicas: engines side by side.
        dies: number of the replica that fails after three steps.
        step_s: seconds that a step takes longer.
    """

    max_num_seqs: Annotated[int, Field(ge=1)] = 4
    chunk: Annotated[int, Field(ge=1)] = 16
    replicas: Annotated[int, Field(ge=1)] = 1
    dies: int | None = None
    step_s: float | int = 0


class Toy(EngineKind[ToyOptions]):
    """What the entry point names."""

    name = "toy"
    option_type = ToyOptions

    def start(
        self, model: Path, options: ToyOptions, link: Link, *, temperature: float, seed: int
    ) -> Engine:
        """Return the engine with its model hooked."""
        return ToyEngine(model, options, link)

    def replicas(self, options: ToyOptions) -> int:
        """Return the engines side by side."""
        return options.replicas


TOY = Toy()


@dataclass
class _Request:
    key: str
    number: int
    token_ids: list[int]
    prompt_len: int
    max_tokens: int
    n_computed: int = 0

    def next_ids(self, chunk: int) -> list[int]:
        stop = len(self.token_ids)
        return self.token_ids[self.n_computed : min(self.n_computed + chunk, stop)]


@dataclass
class _Requests:
    waiting: list[_Request] = field(default_factory=list)
    running: list[_Request] = field(default_factory=list)


class ToyEngine:
    """Continuous batches, prompts in chunks, greedy sampling; nothing reused or preempted."""

    def __init__(self, folder: Path, options: ToyOptions, link: Link) -> None:
        self._folder, self._options, self._link = folder, options, link
        self._model = load_model(folder)
        self._requests = _Requests()
        self._n_steps = 0
        self._worker = WorkerSide(
            self._model,
            link,
            config=json.loads((folder / "config.json").read_bytes()),
            computed=torch.bfloat16,
            device=torch.device("cpu"),
            max_rows=options.max_num_seqs * options.chunk,
        )
        if link.settings.check:
            try:
                self._worker.check(self._check)
            except ActdsError:
                self._worker.close()
                raise
        self._scheduler = SchedulerSide(link.connect("census", "scheduler"))

    @property
    def max_model_len(self) -> int:
        """Return the positions per request."""
        return self._options.max_model_len or MAX_LEN

    @property
    def max_num_seqs(self) -> int:
        """Return the requests per step."""
        return self._options.max_num_seqs

    def add(
        self, key: str, token_ids: list[int], max_tokens: int, regime: Regime | None = None
    ) -> None:
        """Add a request."""
        number = self._scheduler.number_request(key, len(token_ids), {"max_tokens": max_tokens})
        self._worker.stages.learn(number, regime or Regime())
        request = _Request(key, number, list(token_ids), len(token_ids), max_tokens)
        self._requests.waiting.append(request)

    def abort(self, keys: list[str]) -> None:
        """End requests before their time."""
        for queue in (self._requests.waiting, self._requests.running):
            for request in [one for one in queue if one.key in keys]:
                queue.remove(request)
                self._end(request, "abort")

    def shutdown(self) -> None:
        """End the links."""
        self._worker.close()
        self._scheduler.close()

    def step(self) -> list[Finished]:
        """Compute a step and sample; return the requests that ended."""
        running, waiting = self._requests.running, self._requests.waiting
        self._n_steps += 1
        time.sleep(self._options.step_s)
        if self._n_steps > 3 and self._link.replica[0] == self._options.dies:
            raise ActdsError("E504", "toy", got="its time has come", expected="another step")
        while waiting and len(running) < self._options.max_num_seqs:
            running.append(waiting.pop(0))
        parts = [request.next_ids(self._options.chunk) for request in running]
        counts = [len(part) for part in parts]
        numbers, starts = [r.number for r in running], [r.n_computed for r in running]
        step, finished = self._scheduler.number_step(
            numbers, starts, counts, waiting=len(waiting), running=len(running)
        )
        token_ids = torch.tensor([token for part in parts for token in part])
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
        self._worker.before_step()
        began = time.monotonic_ns()
        with torch.inference_mode():
            sampled = self._model(token_ids, positions).argmax(dim=1).tolist()
        duration_ns = time.monotonic_ns() - began
        self._worker.introduce(self._facts)
        columns = numbers, counts, [request.prompt_len for request in running]
        arrays = [np.array(column, np.int64) for column in columns]
        ran = Step(step, *arrays, (), finished, duration_ns, "eager")
        self._worker.hand_over(ran, token_ids, positions)
        return self._advance(counts, sampled)

    def _advance(self, counts: list[int], sampled: list[int]) -> list[Finished]:
        ended, last = [], -1
        for request, count in zip(list(self._requests.running), counts, strict=True):
            request.n_computed += count
            last += count
            if request.n_computed < len(request.token_ids):
                continue  # within its prompt
            request.token_ids.append(sampled[last])
            if len(request.token_ids) - request.prompt_len == request.max_tokens:
                self._requests.running.remove(request)
                self._end(request, "length")
                tokens = tuple(request.token_ids[request.prompt_len :])
                ended.append(Finished(request.key, None, tokens))
        return ended

    def _end(self, request: _Request, reason: str) -> None:
        self._scheduler.end_request(request.number, reason, request.token_ids, request.prompt_len)

    def _check(self) -> HookCheck:
        (prompt, _) = check_prompts(VOCABULARY, self._options.chunk)
        self._worker.before_step()
        with torch.inference_mode():
            self._model(torch.tensor(prompt), torch.arange(len(prompt)))
        rows = {
            hook: found[: len(prompt)].float().numpy().copy()
            for hook, found in zip(self._worker.hooks, self._worker.buffers.rows, strict=True)
        }
        states = {
            kind: {layer: values.float().numpy() for layer, values in layers.items()}
            for kind, layers in plain_forward(self._model, prompt).items()
        }
        bounds = {hook.name: bound("float32", hook.dtype) for hook in self._worker.hooks}
        return compare_with_forward(rows, states, bounds)

    def _facts(self) -> tuple[Fact, ...]:
        readers: Mapping[str, Any] = {
            "engine.name": lambda: "toy",
            "model.d_model": lambda: D_MODEL,
            "numerics.dtype": lambda: "bfloat16",
            "serving.prefix_caching": lambda: False,
            "serving.max_num_seqs": lambda: self._options.max_num_seqs,
        }
        seen = engine_facts(
            readers,
            model=self._model,
            folder=self._folder,
            device=torch.device("cpu"),
            client_pid=self._link.client_pid,
        )
        ours = ("engine.", "model.", "numerics.", "serving.", "machine.")
        known = {fact.name for fact in seen} | {"model.weights_sha256", "serving.mode"}
        absent = [n for n in REQUIRED_PROVENANCE if n.startswith(ours) and n not in known]
        return (*seen, *(Fact(n, None, "unknown", "the toy has none") for n in absent))
