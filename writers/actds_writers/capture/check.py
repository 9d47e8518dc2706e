"""The check of the hooks: compares captured rows with the model's own before any is stored.

Each engine runs the check's prompts through its hooked model. The reference is a plain forward of
the same weights by transformers, on the CPU; in a process of its own where an engine has patched
transformers' classes: ``python -m actds_writers.capture.check < request.json > states.npz``. The
result is the fact ``capture.check`` of the run record.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import torch

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.schema import DType
from actds.text import one_line
from actds_writers.capture.hooks import find_kind, raise_all
from actds_writers.capture.op import watch_tap
from actds_writers.capture.taps import Tap, decoder_layers
from actds_writers.ipc.messages import Fact, HookSpec
from actds_writers.sizing import free_nbytes

OF_ATTENTION = ("attn_out", "attn_out_post")
OF_MLP = ("mlp_out", "mlp_out_post")
NEEDED = ("resid_pre", "resid_mid", "resid_post", *OF_ATTENTION, *OF_MLP)
NEAR = 1e-3
"""Largest distance, relative to what is added; with rounding of the stream beside it."""


def require_sums(
    rows: Mapping[tuple[str, int], torch.Tensor], places: Mapping[str, Iterable[int]]
) -> list[tuple[str, int]]:
    """Return the kind and layer of rows that do not add up, whatever the modules are called.

    A decoder layer adds to its stream what its attention returns and what its MLP returns, as a
    rule one after the other, in some families times one constant. Rows of a plain forward that do
    not add up so were read at a place whose name means something else in that family.

    Args:
        rows: ``(n, d_model)`` by kind and layer, with all of ``NEEDED`` that the model has.
    """
    odd = []
    for kind, layers in places.items():
        if kind in ("resid_mid", *OF_ATTENTION, *OF_MLP):
            for layer in list(layers):
                here = {k: r for (k, at), r in rows.items() if at == layer and k in NEEDED}
                if not _adds_up(kind, here):
                    odd.append((kind, layer))
    return odd


def _adds_up(kind: str, here: Mapping[str, torch.Tensor]) -> bool:
    before, after = here.get("resid_pre"), here.get("resid_post")
    if before is None or after is None or before.shape != after.shape:
        return False
    attention: Any = here.get("attn_out_post", here.get("attn_out"))
    mlp: Any = here.get("mlp_out_post", here.get("mlp_out"))
    middle = here.get("resid_mid")
    if middle is None or middle.equal(before):  # side by side, or one block alone
        if kind == "resid_mid":
            return False
        blocks = [block for block in (attention, mlp) if block is not None]
        return _along(after - before, sum(blocks[1:], blocks[0]), before)
    of_attention = attention is not None and _along(middle - before, attention, before)
    of_mlp = mlp is not None and _along(after - middle, mlp, before)
    if kind == "resid_mid":
        return of_attention or (attention is None and of_mlp)
    return of_attention if kind in OF_ATTENTION else of_mlp


def _along(added: torch.Tensor, block: torch.Tensor, stream: torch.Tensor) -> bool:
    """Return whether what is added is a block's output times one constant."""
    if added.shape != block.shape or not bool(block.any()):
        return False
    eps = torch.finfo(stream.dtype).eps
    rounding = 100 * eps if stream.dtype == torch.float32 else 2 * eps
    added, block, stream = added.float(), block.float(), stream.float()
    times = (added * block).sum() / (block * block).sum()
    apart = (added - times * block).norm(dim=-1)
    allowed = max(NEAR, 2 * eps) * added.norm(dim=-1) + rounding * stream.norm(dim=-1)
    return bool((apart <= allowed).all()) and bool(times)


FIELD = "capture.check"
NO_CHECK = Fact(FIELD, "none", "declared")
"""The fact of a run whose check was switched off."""
PROMPT_LENS = (24, 17)
BOUNDS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest mean relative L2 by the type the model computes in. Correct rows were measured at 1e-6 in
float32 and up to 2 % in bfloat16; a residual counted twice or not at all at 24 % and more."""
CAST_BOUND = 1e-2
"""The same where the model computes in float32 and a 16-bit type is stored."""
ROW_FACTOR = 5.0
"""Largest distance of a single row, in bounds. A row of another position, whose cosine to the right
one is about two thirds, is further away under every bound."""
CLEARLY = 0.5
"""Another layer fits better when its distance is below this share of the hook's own."""

Against = Literal["transformers", "engine", "table"]


@dataclass(frozen=True)
class HookCheck:
    """The result of the check.

    Args:
        against: the reference: ``transformers``, a plain forward of the same weights; ``engine``,
            what the next layer reads in the same engine; ``table``, none, but the model class was
            verified before.
        distances: mean relative L2 of the rows by hook; ``bounds``, the largest that passes.
        reason: why the reference is not ``transformers``, empty when it is.
        eager: largest distance of a hook's rows from those of the same engine without compilation
            and graphs, ``None`` where it has neither.
    """

    against: Against
    distances: Mapping[str, float]
    bounds: Mapping[str, float]
    n_rows: int
    reason: str = ""
    eager: float | None = None

    def fact(self) -> Fact:
        """Return the fact of the run record (spec 0.1 section 6.1); fractions are strings."""
        document: dict[str, object] = {"against": self.against}
        if self.distances:
            bounds = {name: _decimal(self.bounds[name]) for name in self.distances}
            values = set(bounds.values())
            document["bound"] = values.pop() if len(values) == 1 else bounds
            document["hooks"] = {name: _decimal(d) for name, d in self.distances.items()}
            document["rows"] = self.n_rows
        if self.eager is not None:
            document["eager"] = _decimal(self.eager)
        if self.reason:
            document["reason"] = self.reason[:300]
        return Fact(FIELD, canonical.dump(document).decode().strip(), "observed")

    def require(self) -> Self:
        for name, distance in self.distances.items():
            # Also true for not-a-number, the distance of rows without a finite value.
            if not distance <= self.bounds[name]:
                raise _mismatch(name, distance, self.bounds[name], f"against {self.against}")
        return self


def check_prompts(vocab_size: int, max_len: int) -> tuple[list[int], ...]:
    """Return two short prompts of token ids from the middle of the vocabulary.

    Special tokens, some of which represent images, are not there.
    """
    draw = np.random.default_rng(0)
    low, high = vocab_size // 8, max(vocab_size // 2, vocab_size // 8 + 1)
    return tuple(
        draw.integers(low, high, size=max(1, min(length, max_len))).tolist()
        for length in PROMPT_LENS
    )


def bound(computed: str, stored: str, *, coarse: bool = False) -> float:
    """Return the largest mean relative L2 that passes.

    ``coarse``: products, or keys and values, have a lower precision than ``computed``.
    """
    limit = BOUNDS[computed]
    if coarse:
        return BOUNDS["bfloat16"]
    return max(limit, CAST_BOUND) if stored != computed else limit


DID_NOT_RUN = -np.inf
"""Value of the rows of a hook that did not run in the check; no model computes only these."""


def require_finite(rows: Mapping[HookSpec, np.ndarray], computed: str) -> None:
    """Refuse rows ``(n, d_model)`` that are not finite, as no distance says why; raises E601."""
    errors = []
    for hook, values in rows.items():
        bad = ~np.isfinite(values).all(axis=1)
        if not bad.any() or (values == DID_NOT_RUN).all():
            continue
        before = find_kind(hook.kind).dtype(cast("DType", computed))
        count = f"{int(bad.sum())} of {len(values)} rows of the check's prompts"
        if hook.dtype == before or np.isnan(values).any():
            got = f"NaN or infinity in {count}, as the model computes them in {before}"
            step = "Let the model compute in a wider type, or get its weights anew. "
        else:
            got = f"infinity in {count}, after the cast from {before} to {hook.dtype}"
            step = f'Store another type: store_dtype="{before}". '
        step += "To store such rows as they are, and count them: check=False."
        place = f"hook {hook.name}"
        errors.append(ActdsError("E601", place, got=got, expected="finite numbers", next_step=step))
    raise_all(errors)


def compare_with_forward(
    rows: Mapping[HookSpec, np.ndarray],
    states: Mapping[str, Mapping[int, np.ndarray]],
    bounds: Mapping[str, float],
    decoded: np.ndarray | None = None,
) -> HookCheck:
    """Compare the rows of every hook with every layer of a plain forward.

    Prompts and decoded tokens are compared separately, and the larger distance counts: a decode
    step has few rows, and a mean over all would hide them. Raises E507 when rows differ, or equal
    another layer's; it names all such hooks.

    Args:
        rows: float32 ``(n, d_model)`` by hook.
        states: the same by kind and layer.
        decoded: bool ``(n,)``: rows of a decode step; ``None`` without one.
    """
    n_rows = len(next(iter(rows.values())))
    parts = [np.ones(n_rows, bool)] if decoded is None else [~decoded, decoded]
    by_hook: dict[str, float] = {}
    errors: list[ActdsError] = []
    for hook, got in rows.items():
        limit = bounds[hook.name]
        apart = {
            layer: row_distances(got, state)
            for layer, state in states[hook.kind].items()
            if state.shape == got.shape  # some families have layers of other widths
        }
        distances = {
            layer: float(np.max([of_rows[part].mean() for part in parts if part.any()]))
            for layer, of_rows in apart.items()
        }
        distance, worst = distances[hook.layer], float(apart[hook.layer].max())
        finite = {layer: d for layer, d in distances.items() if np.isfinite(d)}
        nearest = min(finite, key=lambda layer: finite[layer], default=hook.layer)
        words = ""
        if nearest != hook.layer and not distances[nearest] >= CLEARLY * distance:
            words = f"nearer to layer {nearest} ({_decimal(distances[nearest])})"
        elif distance <= limit and not worst <= ROW_FACTOR * limit:
            words = f"one row {_decimal(worst)}, against transformers"
        elif not distance <= limit:  # also true for not-a-number
            words = "against transformers"
        if words:
            errors.append(_mismatch(hook.name, distance, limit, words))
        by_hook[hook.name] = distance
    raise_all(errors)
    return HookCheck("transformers", by_hook, bounds, n_rows)


def compare_with_eager(
    rows: Mapping[HookSpec, np.ndarray],
    eager: Mapping[HookSpec, np.ndarray],
    bounds: Mapping[str, float],
    parts: Sequence[np.ndarray],
) -> float:
    """Return the largest distance of a hook's rows from those of the same engine in eager mode.

    Raises E507 with all hooks whose rows differ.

    Args:
        rows: float32 ``(n, d_model)`` by hook, of compiled code or graphs.
        parts: bool ``(n,)`` each: rows that are compared apart, as prompts and decoded tokens.
    """
    distances, errors = [], []
    for hook, got in rows.items():
        want = eager[hook]
        apart = np.where((got == want).all(axis=-1), 0.0, row_distances(got, want))
        distances.append(float(np.max([apart[part].mean() for part in parts])))
        if not distances[-1] <= bounds[hook.name]:  # also true for not-a-number
            words = "as the same engine computes them without compilation and graphs"
            errors.append(_mismatch(hook.name, distances[-1], bounds[hook.name], words, IN_GRAPHS))
    raise_all(errors)
    return max(distances)


def without_reference(rows: Mapping[HookSpec, np.ndarray], states: States) -> list[ActdsError]:
    return [
        ActdsError(
            "E007",
            f"{hook.kind}:{hook.layer}",
            got="no such rows in a plain forward of transformers, or rows that disagree",
            expected="rows to compare with, or a kind that is verified",
        )
        for hook, got in rows.items()
        if getattr(states.get(hook.kind, {}).get(hook.layer), "shape", None) != got.shape
    ]


def row_distances(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the relative L2 distance between rows, float32 ``(n, d_model)`` each; ``(n,)``."""
    norms = np.linalg.norm(want, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        distances: np.ndarray = np.linalg.norm(got - want, axis=-1) / norms
    return distances


IN_GRAPHS = (
    "Use another cudagraph_mode, or enforce_eager=true. Compare the engine's own answers in both: "
    "what its graphs compute may differ whether or not it is harvested."
)


def _mismatch(
    hook: str, distance: float, limit: float, words: str, next_step: str | None = None
) -> ActdsError:
    return ActdsError(
        "E507",
        f"hook {hook}",
        got=f"rows {_decimal(distance)} (mean relative L2) from the model's own, {words}",
        expected=f"at most {_decimal(limit)}",
        next_step=next_step,
    )


def _decimal(value: float) -> str:
    return f"{value:.3g}"


MEMORY_SHARE = 0.25
"""Share of the free memory that a second copy of the weights may take."""
MAX_PARAMETERS = 8_000_000_000
"""Above this, loading float32 weights and running them on a CPU takes minutes."""
TIMEOUT_S = 300.0
"""vLLM waits ten minutes for its engine, this check included."""
States = Mapping[str, Mapping[int, np.ndarray]]
"""Rows by hook kind and layer."""
SAME = 1e-5
"""Relative L2 at which transformers' own ``hidden_states`` are what its layers return."""


class NoReferenceError(Exception):
    """There is no plain forward to compare with; the message says why."""


def load_reference(
    folder: str | Path,
    n_parameters: int,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    n_copies: int = 1,
) -> Any:
    """Return the model as transformers loads it, float32 on the CPU.

    Args:
        n_copies: processes that load it at the same time.

    Raises:
        NoReferenceError: transformers cannot load it completely, or it does not fit in memory.
    """
    free = free_nbytes()
    nbytes = 4 * n_parameters * n_copies
    if nbytes > MEMORY_SHARE * free:
        room = f"{nbytes / 1e9:.1f} GB of float32 weights, {free / 1e9:.1f} GB free"
        raise NoReferenceError(f"the model cannot be loaded a second time: {room}")
    if n_parameters > MAX_PARAMETERS:
        raise NoReferenceError(f"{n_parameters / 1e9:.0f} billion parameters take too long")
    try:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        with _own_randomness():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",  # others may leave out softcapping or sinks
                revision=revision,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # a model's own code may raise anything
        raise NoReferenceError(f"transformers does not load it: {one_line(error, 200)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise NoReferenceError(f"transformers finds no weight {missing[0]}")
    return model.eval()


def reference_states(
    model: Any, prompts: Sequence[Sequence[int]], kinds: Sequence[str] = ("resid_post",)
) -> States:
    """Return what hooks of some kinds would see at every decoder layer of plain forwards.

    Read at each kind's ``reference``, and compared with the model's own output for the same place
    (for the stream, ``hidden_states``), or with what a layer adds to its stream, so that two
    independent sources agree.

    Returns:
        float32 ``(n, d_model)`` by kind and layer, prompts concatenated; kinds and layers without
        such a place, or with one whose rows are not what the layer adds, are left out.

    Raises:
        NoReferenceError: the forward fails, a layer does not run, or the two sources differ.
    """
    taps: dict[str, dict[int, Tap]] = {}
    for kind in kinds:
        with contextlib.suppress(NoReferenceError):
            taps[kind] = _taps(model, kind)
    beside: dict[str, dict[int, Tap]] = {}
    for kind in NEEDED if set(kinds) & set(NEEDED) else ():
        with contextlib.suppress(NoReferenceError):
            beside[kind] = taps.get(kind) or _taps(model, kind)
    states: dict[str, dict[int, list[np.ndarray]]] = {
        kind: {layer: [] for layer in places} for kind, places in taps.items()
    }
    n_layers = len(decoder_layers(model))
    for prompt in prompts:
        rows: dict[tuple[str, int], torch.Tensor] = {}
        with _watched({**beside, **taps}, rows), torch.inference_mode(), _own_randomness():
            ids = torch.tensor([list(prompt)], device=model.device)
            try:
                output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
            except Exception as error:  # a model's own code may raise anything
                raise NoReferenceError(
                    f"transformers does not run it: {one_line(error, 200)}"
                ) from error
        for kind, places in taps.items():
            values = {
                layer: rows[kind, layer].float().cpu().numpy()
                for layer in places
                if (kind, layer) in rows
            }
            if kind == "resid_post" and len(values) < len(places):
                raise NoReferenceError(f"{len(values)} of {len(places)} decoder layers ran")
            for layer in set(places) - set(values):
                states[kind].pop(layer, None)
            _require_own_states(values, find_kind(kind).own_states(output, n_layers))
            for layer in set(values) & set(states[kind]):
                states[kind][layer].append(values[layer])
        for kind, layer in require_sums(rows, states):
            states[kind].pop(layer)
    return {
        kind: {layer: np.concatenate(parts) for layer, parts in places.items()}
        for kind, places in states.items()
    }


def states_in_fresh_process(
    folder: str | Path,
    n_parameters: int,
    prompts: Sequence[Sequence[int]],
    kinds: Sequence[str] = ("resid_post",),
    **options: Any,
) -> States:
    """Return ``reference_states`` of ``load_reference``, computed in a process of its own."""
    request = {
        "folder": str(folder),
        "n_parameters": n_parameters,
        "options": options,
        "prompts": [list(prompt) for prompt in prompts],
        "kinds": list(kinds),
    }
    command = [sys.executable, "-m", "actds_writers.capture.check"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoReferenceError(f"cannot run transformers in a process: {error}"[:200]) from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise NoReferenceError(" ".join(last)[:300] or "the process that runs transformers ended")
    states: dict[str, dict[int, np.ndarray]] = {}
    with np.load(io.BytesIO(done.stdout), allow_pickle=False) as arrays:
        for name in arrays.files:
            kind, _, layer = name.rpartition(".")
            states.setdefault(kind, {})[int(layer)] = arrays[name]
    return states


def _main() -> int:
    request = json.load(sys.stdin)
    output, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever a model's code prints
    try:
        model = load_reference(request["folder"], request["n_parameters"], **request["options"])
        states = reference_states(model, request["prompts"], request["kinds"])
    except NoReferenceError as missing:
        print(missing, file=sys.stderr)
        return 1
    file = io.BytesIO()
    parts: dict[str, Any] = {
        f"{kind}.{layer}": rows for kind, places in states.items() for layer, rows in places.items()
    }
    np.savez(file, **parts)
    output.write(file.getvalue())
    return 0


def _taps(model: Any, kind: str) -> dict[int, Tap]:
    taps: dict[int, Tap] = {}
    missing: ActdsError | None = None
    for layer in find_kind(kind).layers(len(decoder_layers(model))):
        try:
            taps[layer] = find_kind(kind).reference(model, layer)
        except ActdsError as error:
            missing = error
    if not taps:
        raise NoReferenceError(f"transformers' model has no {kind}: {missing or 'no layers'}"[:300])
    return taps


def _require_own_states(
    states: dict[int, np.ndarray], returned: Mapping[int, torch.Tensor]
) -> None:
    for layer, state in returned.items():
        if layer not in states:
            continue
        want = state.flatten(0, -2).float().cpu().numpy()
        if want.shape != states[layer].shape:
            continue
        if not np.linalg.norm(states[layer] - want) <= SAME * np.linalg.norm(want):
            raise NoReferenceError(
                f"transformers' own hidden_states are not what its layer {layer} has"
            )


@contextlib.contextmanager
def _watched(
    taps: Mapping[str, Mapping[int, Tap]], rows: dict[tuple[str, int], torch.Tensor]
) -> Iterator[None]:
    def keep(
        key: tuple[str, int], tap: Tap, _module: Any, args: Any, kwargs: Any, output: Any = None
    ) -> None:
        with contextlib.suppress(ActdsError):  # another form than the kind reads: rows are missing
            first, second = tap.read(args, kwargs, output)
            rows[key] = first.clone() if second is None else first + second

    with contextlib.ExitStack() as hooks:
        for kind, places in taps.items():
            for layer, tap in places.items():
                hooks.callback(watch_tap(tap, functools.partial(keep, (kind, layer), tap)))
        yield


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Restore torch's random state afterwards: the engine samples with it."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


if __name__ == "__main__":
    sys.exit(_main())
