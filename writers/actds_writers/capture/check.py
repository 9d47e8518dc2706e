"""The check of the hooks: compares captured rows with the model's own before any is stored.

Each engine runs the check's prompts through its hooked model. The reference is a plain forward of
the same weights by transformers, on the CPU; in a process of its own where an engine has patched
transformers' classes: ``python -m actds_writers.capture.check < request.json > states.npz``. The
result is the fact ``capture.check`` of the run record.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from actds_writers.capture.laws import NEEDED, require_sums
from actds_writers.capture.taps import Tap, decoder_layers
from actds_writers.ipc.messages import Fact, HookSpec

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
        distances: mean relative L2 of the rows by hook.
        bounds: the largest one that passes, by hook.
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
        """Return the fact of the run record; fractions are decimal strings.

        Spec: 0.1 section 6.1.
        """
        document: dict[str, object] = {"against": self.against}
        if self.distances:
            bounds = {name: _decimal(self.bounds[name]) for name in self.distances}
            one = set(bounds.values())
            document["bound"] = one.pop() if len(one) == 1 else bounds
            document["hooks"] = {name: _decimal(d) for name, d in self.distances.items()}
            document["rows"] = self.n_rows
        if self.eager is not None:
            document["eager"] = _decimal(self.eager)
        if self.reason:
            document["reason"] = self.reason[:300]
        return Fact(FIELD, canonical.dump(document).decode().strip(), "observed")

    def require(self) -> Self:
        """Return this check if all rows are the model's.

        Raises:
            ActdsError: E507 with the hook, its distance and the bound.
        """
        for name, distance in self.distances.items():
            # Also true for not-a-number, the distance of rows without a finite value.
            if not distance <= self.bounds[name]:
                raise _mismatch(name, distance, self.bounds[name], f"against {self.against}")
        return self


def check_prompts(vocab_size: int, max_len: int) -> tuple[list[int], ...]:
    """Return two short prompts of token ids.

    Ids come from the middle of the vocabulary, where there are no special tokens: some of those
    represent images.
    """
    draw = np.random.default_rng(0)
    low, high = vocab_size // 8, max(vocab_size // 2, vocab_size // 8 + 1)
    return tuple(
        draw.integers(low, high, size=max(1, min(length, max_len))).tolist()
        for length in PROMPT_LENS
    )


def bound(computed: str, stored: str, *, coarse: bool = False) -> float:
    """Return the largest mean relative L2 that passes.

    Args:
        coarse: whether products, or keys and values, have a lower precision than that.
    """
    limit = BOUNDS[computed]
    if coarse:
        return BOUNDS["bfloat16"]
    return max(limit, CAST_BOUND) if stored != computed else limit


DID_NOT_RUN = -np.inf
"""Value of the rows of a hook that did not run in the check; no model computes only these."""


def require_finite(rows: Mapping[HookSpec, np.ndarray], computed: str) -> None:
    """Refuse rows of the check's prompts that are not finite: no distance says why.

    Args:
        rows: float32 ``(n, d_model)`` by hook, as they are stored.
        computed: the type that the model computes in.

    Raises:
        ActdsError: E601 with every hook that has such rows.
    """
    errors = []
    for hook, values in rows.items():
        bad = ~np.isfinite(values).all(axis=1)
        if not bad.any() or (values == DID_NOT_RUN).all():
            continue
        own = find_kind(hook.kind).dtype(cast("DType", computed))
        count = f"{int(bad.sum())} of {len(values)} rows of the check's prompts"
        if hook.dtype == own or np.isnan(values).any():
            got = f"NaN or infinity in {count}, as the model computes them in {own}"
            step = "Let the model compute in a wider type, or get its weights anew. "
        else:
            got = f"infinity in {count}, after the cast from {own} to {hook.dtype}"
            step = f'Store another type: store_dtype="{own}". '
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
    step has few rows, and a mean over all would hide them.

    Args:
        rows: float32 ``(n, d_model)`` by hook.
        states: float32 ``(n, d_model)`` by kind and layer.
        bounds: largest mean relative L2 that passes, by hook.
        decoded: bool ``(n,)``: rows of a decode step; ``None`` without one.

    Raises:
        ActdsError: E507 when rows differ, or equal another layer's; it names all such hooks.
    """
    n_rows = len(next(iter(rows.values())))
    parts = [np.ones(n_rows, bool)] if decoded is None else [~decoded, decoded]
    found: dict[str, float] = {}
    errors: list[ActdsError] = []
    for hook, got in rows.items():
        limit = bounds[hook.name]
        apart = {
            layer: row_distances(got, state)
            for layer, state in states[hook.kind].items()
            if state.shape == got.shape  # some families have layers of other widths
        }
        distances = {
            layer: float(np.max([one[part].mean() for part in parts if part.any()]))
            for layer, one in apart.items()
        }
        own, worst = distances[hook.layer], float(apart[hook.layer].max())
        finite = {layer: d for layer, d in distances.items() if np.isfinite(d)}
        nearest = min(finite, key=lambda layer: finite[layer], default=hook.layer)
        if nearest != hook.layer and not distances[nearest] >= CLEARLY * own:
            words = f"nearer to layer {nearest} ({_decimal(distances[nearest])})"
            errors.append(_mismatch(hook.name, own, limit, words))
        elif own <= limit and not worst <= ROW_FACTOR * limit:
            words = f"one row {_decimal(worst)}, against transformers"
            errors.append(_mismatch(hook.name, own, limit, words))
        elif not own <= limit:  # also true for not-a-number
            errors.append(_mismatch(hook.name, own, limit, "against transformers"))
        found[hook.name] = own
    raise_all(errors)
    return HookCheck("transformers", found, bounds, n_rows)


def compare_with_eager(
    rows: Mapping[str, np.ndarray],
    eager: Mapping[str, np.ndarray],
    bounds: Mapping[str, float],
    parts: Sequence[np.ndarray],
) -> float:
    """Return the largest distance of a hook's rows from those of the same engine in eager mode.

    Args:
        rows: float32 ``(n, d_model)`` by hook, of compiled code or graphs.
        eager: the same rows without either.
        bounds: largest mean relative L2 that passes, by hook.
        parts: bool ``(n,)`` each: rows that are compared apart, as prompts and decoded tokens.

    Raises:
        ActdsError: E507 with all hooks whose rows differ.
    """
    distances, errors = [], []
    for hook, got in rows.items():
        want = eager[hook]
        apart = np.where((got == want).all(axis=-1), 0.0, row_distances(got, want))
        distances.append(float(np.max([apart[part].mean() for part in parts])))
        if not distances[-1] <= bounds[hook]:  # also true for not-a-number
            words = "as the same engine computes them without compilation and graphs"
            errors.append(_mismatch(hook, distances[-1], bounds[hook], words))
    raise_all(errors)
    return max(distances)


def without_reference(rows: Mapping[HookSpec, np.ndarray], states: States) -> list[ActdsError]:
    """Return an error for every hook that a plain forward has no rows for."""
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


def _mismatch(hook: str, distance: float, limit: float, words: str) -> ActdsError:
    return ActdsError(
        "E507",
        f"hook {hook}",
        got=f"rows {_decimal(distance)} (mean relative L2) from the model's own, {words}",
        expected=f"at most {_decimal(limit)}",
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
        folder: model folder, or the name under which the engine loaded it.
        n_copies: processes that load it at the same time.

    Raises:
        NoReferenceError: transformers cannot load it completely, or it does not fit in memory.
    """
    free = _free_nbytes()
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

    Args:
        model: a transformers model, with its own dtype and device.

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
    found: dict[str, dict[int, list[np.ndarray]]] = {
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
            one = {
                layer: rows[kind, layer].float().cpu().numpy()
                for layer in places
                if (kind, layer) in rows
            }
            if kind == "resid_post" and len(one) < len(places):
                raise NoReferenceError(f"{len(one)} of {len(places)} decoder layers ran")
            for layer in set(places) - set(one):
                found[kind].pop(layer, None)
            _require_own_states(one, find_kind(kind).own_states(output, n_layers))
            for layer in set(one) & set(found[kind]):
                found[kind][layer].append(one[layer])
        for kind, layer in require_sums(rows, found):
            found[kind].pop(layer)
    return {
        kind: {layer: np.concatenate(parts) for layer, parts in places.items()}
        for kind, places in found.items()
    }


def states_in_fresh_process(
    folder: str | Path,
    n_parameters: int,
    prompts: Sequence[Sequence[int]],
    kinds: Sequence[str] = ("resid_post",),
    **options: Any,
) -> States:
    """Return ``reference_states`` of ``load_reference``, computed in a process of its own.

    Args:
        options: further arguments of ``load_reference``.

    Raises:
        NoReferenceError: as ``load_reference`` and ``reference_states``.
    """
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
    found: dict[str, dict[int, np.ndarray]] = {}
    with np.load(io.BytesIO(done.stdout), allow_pickle=False) as states:
        for name in states.files:
            kind, _, layer = name.rpartition(".")
            found.setdefault(kind, {})[int(layer)] = states[name]
    return found


def _main() -> int:
    request = json.load(sys.stdin)
    output, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever a model's code prints
    try:
        model = load_reference(request["folder"], request["n_parameters"], **request["options"])
        found = reference_states(model, request["prompts"], request["kinds"])
    except NoReferenceError as missing:
        print(missing, file=sys.stderr)
        return 1
    states = io.BytesIO()
    parts: dict[str, Any] = {
        f"{kind}.{layer}": rows for kind, places in found.items() for layer, rows in places.items()
    }
    np.savez(states, **parts)
    output.write(states.getvalue())
    return 0


def _taps(model: Any, kind: str) -> dict[int, Tap]:
    """Return the taps of a kind by layer, for the layers that have such a place."""
    found: dict[int, Tap] = {}
    missing: ActdsError | None = None
    layers = sorted(decoder_layers(model))
    for layer in find_kind(kind).layers(len(layers)):
        try:
            found[layer] = find_kind(kind).reference(model, layer)
        except ActdsError as error:
            missing = error
    if not found:
        raise NoReferenceError(f"transformers' model has no {kind}: {missing or 'no layers'}"[:300])
    return found


def _require_own_states(states: dict[int, np.ndarray], own: Mapping[int, torch.Tensor]) -> None:
    """Raise when hooked states differ from those that the model itself returns."""
    for layer, state in own.items():
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
    """Keep the rows of every tap, by kind and layer."""

    def keep(key: tuple[str, int], tap: Tap) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any, output: Any = None) -> None:
            try:
                first, second = tap.read(args, kwargs, output)
            except ActdsError:
                return  # another form than the kind reads: its rows are missing
            rows[key] = first.clone() if second is None else first + second

        if tap.before:
            return tap.module.register_forward_pre_hook(hook, with_kwargs=True)
        return tap.module.register_forward_hook(hook, with_kwargs=True)

    handles = [
        keep((kind, layer), tap) for kind, places in taps.items() for layer, tap in places.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Restore torch's random state afterwards: the engine samples with it."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _free_nbytes() -> int:
    """Return the memory that is free, within the limits of a container as well."""
    free = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                free = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = min(free, max(int(limit) - used, 0)) if limit != "max" else free
    return free


if __name__ == "__main__":
    sys.exit(_main())
