"""A plain forward of the same weights by transformers: what the hooks' rows are held against.

Beside the data path, before the first row. Runs on the CPU, in the process of whoever asks, or in a
fresh one where an engine has changed transformers' classes in its own:

    python -m actds_writers.capture.reference < request.json > states.npz
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actds.errors import ActdsError
from actds_writers.capture.hooks import Tap, find_kind
from actds_writers.capture.op import decoder_layers

__all__ = [
    "NoReferenceError",
    "States",
    "load_reference",
    "reference_states",
    "states_in_fresh_process",
]

MEMORY_SHARE = 0.25
"""Share of the free memory that a second copy of the weights may take."""
MAX_PARAMETERS = 8_000_000_000
"""Beyond this, loading float32 weights and running them on a CPU takes minutes."""
TIMEOUT_S = 300.0
"""vLLM waits ten minutes for its engine, this check included."""
States = Mapping[str, Mapping[int, np.ndarray]]
"""Rows by hook kind and layer."""
SAME = 1e-5
"""Relative L2 at which transformers' own ``hidden_states`` are what its layers return."""


class NoReferenceError(Exception):
    """No plain forward can be had, and why."""


def load_reference(
    folder: str | Path,
    n_parameters: int,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return the model as transformers loads it, float32 on the CPU.

    Args:
        folder: model folder, or the name under which the engine loaded it.
        n_parameters: parameters of the model.
        revision: revision of a named model.
        trust_remote_code: as the engine was told.

    Raises:
        NoReferenceError: transformers does not load it, or not all of it, or there is no room.
    """
    free = _free_nbytes()
    if 4 * n_parameters > MEMORY_SHARE * free:
        room = f"{4 * n_parameters / 1e9:.1f} GB of float32 weights, {free / 1e9:.1f} GB free"
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
                revision=revision,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever a model's own code raises, there is no reference then
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise NoReferenceError(f"transformers does not load it: {words}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise NoReferenceError(f"transformers finds no weight {missing[0]}")
    return model.eval()


def reference_states(
    model: Any, prompts: Sequence[Sequence[int]], kinds: Sequence[str] = ("resid_post",)
) -> States:
    """Return what hooks of some kinds would see at every decoder layer of plain forwards.

    Taken where each kind's ``reference`` says, and held against what the model itself says of the
    place (of the stream, ``hidden_states``): two ways by which transformers says what it is.

    Args:
        model: a transformers model; its own dtype and device.
        prompts: token ids.
        kinds: names of hook kinds.

    Returns:
        float32 ``(n, d_model)`` by kind and layer, prompt behind prompt; layers without such a
        place are left out.

    Raises:
        NoReferenceError: the forward fails, a layer does not run, or the two ways differ.
    """
    taps = {kind: _taps(model, kind) for kind in kinds}
    found: dict[str, dict[int, list[np.ndarray]]] = {
        kind: {layer: [] for layer in places} for kind, places in taps.items()
    }
    for prompt in prompts:
        rows: dict[tuple[str, int], torch.Tensor] = {}
        with _watched(taps, rows), torch.inference_mode(), _own_randomness():
            ids = torch.tensor([list(prompt)], device=model.device)
            try:
                said = model(input_ids=ids, use_cache=False, output_hidden_states=True)
            except Exception as error:  # as above
                words = " ".join(str(error).split())[:200] or type(error).__name__
                raise NoReferenceError(f"transformers does not run it: {words}") from error
        for kind, places in taps.items():
            n_ran = sum((kind, layer) in rows for layer in places)
            if n_ran < len(places):
                raise NoReferenceError(f"{n_ran} of {len(places)} decoder layers ran")
            one = {layer: rows[kind, layer].float().cpu().numpy() for layer in places}
            _hold_against(one, find_kind(kind).said(said))
            for layer, state in one.items():
                found[kind][layer].append(state)
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
        folder: as ``load_reference``, like the options.
        n_parameters: parameters of the model.
        prompts: token ids.
        kinds: names of hook kinds.
        options: further arguments of ``load_reference``.

    Raises:
        NoReferenceError: as the two.
    """
    request = {
        "folder": str(folder),
        "n_parameters": n_parameters,
        "options": options,
        "prompts": [list(prompt) for prompt in prompts],
        "kinds": list(kinds),
    }
    command = [sys.executable, "-m", "actds_writers.capture.reference"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoReferenceError(f"no process for transformers: {error}"[:200]) from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise NoReferenceError(" ".join(last)[:300] or "the process of transformers ended")
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
    """Return where a kind's rows are at every layer that has such a place."""
    found: dict[int, Tap] = {}
    missing: ActdsError | None = None
    for layer in sorted(decoder_layers(model)):
        try:
            found[layer] = find_kind(kind).reference(model, layer)
        except ActdsError as error:
            missing = error
    if not found:
        raise NoReferenceError(f"transformers' model has no {kind}: {missing or 'no layers'}"[:300])
    return found


def _hold_against(states: dict[int, np.ndarray], said: Mapping[int, torch.Tensor]) -> None:
    """Compare what was taken with what the model says, at the layers of which it says anything."""
    if len(said) != len(states) - 1:
        return
    for layer, state in said.items():
        want = state.flatten(0, -2).float().cpu().numpy()
        gap = np.linalg.norm(states[layer] - want)
        if want.shape == states[layer].shape and not gap <= SAME * np.linalg.norm(want):
            raise NoReferenceError(
                f"transformers' hidden_states[{layer + 1}] is not what its layer {layer} returns"
            )


@contextlib.contextmanager
def _watched(
    taps: Mapping[str, Mapping[int, Tap]], rows: dict[tuple[str, int], torch.Tensor]
) -> Iterator[None]:
    """Keep the rows of every tap, by kind and layer."""

    def keep(key: tuple[str, int], tap: Tap) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any, output: Any = None) -> None:
            first, second = tap.read(args, kwargs, output)
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
    """Leave the random numbers that the engine will sample with as they are."""
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
