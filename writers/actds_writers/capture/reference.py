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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actds_writers.capture.op import decoder_layers
from actds_writers.capture.streams import residual_stream

__all__ = [
    "NoReferenceError",
    "load_reference",
    "states_after_layers",
    "states_in_fresh_process",
]

MEMORY_SHARE = 0.25
"""Share of the free memory that a second copy of the weights may take."""
MAX_PARAMETERS = 8_000_000_000
"""Beyond this, loading float32 weights and running them on a CPU takes minutes."""
TIMEOUT_S = 300.0
"""vLLM waits ten minutes for its engine, this check included."""
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


def states_after_layers(model: Any, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the residual stream after every decoder layer of a plain forward, prompt by prompt.

    Taken from the layers' outputs, and held against ``output_hidden_states`` where the model has
    it: two ways by which transformers itself says what the stream is.

    Args:
        model: a transformers model; its own dtype and device.
        prompts: token ids.

    Returns:
        float32 ``(n_layers, n, d_model)`` for each prompt.

    Raises:
        NoReferenceError: the forward fails, or the two ways differ.
    """
    layers = decoder_layers(model)
    found: list[np.ndarray] = []
    for prompt in prompts:
        outputs: dict[int, torch.Tensor] = {}
        with _watched(layers, outputs), torch.inference_mode(), _own_randomness():
            ids = torch.tensor([list(prompt)], device=model.device)
            try:
                said = model(input_ids=ids, use_cache=False, output_hidden_states=True)
            except Exception as error:  # as above
                words = " ".join(str(error).split())[:200] or type(error).__name__
                raise NoReferenceError(f"transformers does not run it: {words}") from error
        if sorted(outputs) != list(range(len(layers))):
            raise NoReferenceError(f"{len(outputs)} of {len(layers)} decoder layers ran")
        states = np.stack([outputs[n].float().cpu().numpy() for n in range(len(layers))])
        _hold_against_hidden_states(states, getattr(said, "hidden_states", None))
        found.append(states)
    return found


def states_in_fresh_process(
    folder: str | Path, n_parameters: int, prompts: Sequence[Sequence[int]], **options: Any
) -> list[np.ndarray]:
    """Return ``states_after_layers`` of ``load_reference``, computed in a process of its own.

    Args:
        folder: as ``load_reference``, like the options.
        n_parameters: parameters of the model.
        prompts: token ids.
        options: further arguments of ``load_reference``.

    Raises:
        NoReferenceError: as the two.
    """
    request = {
        "folder": str(folder),
        "n_parameters": n_parameters,
        "options": options,
        "prompts": [list(prompt) for prompt in prompts],
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
    with np.load(io.BytesIO(done.stdout), allow_pickle=False) as states:
        return [states[f"states{number}"] for number in range(len(prompts))]


def _main() -> int:
    request = json.load(sys.stdin)
    output, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever a model's code prints
    try:
        model = load_reference(request["folder"], request["n_parameters"], **request["options"])
        found = states_after_layers(model, request["prompts"])
    except NoReferenceError as missing:
        print(missing, file=sys.stderr)
        return 1
    states = io.BytesIO()
    parts: dict[str, Any] = {f"states{number}": part for number, part in enumerate(found)}
    np.savez(states, **parts)
    output.write(states.getvalue())
    return 0


def _hold_against_hidden_states(states: np.ndarray, hidden: Any) -> None:
    """Compare all layers but the last, behind which ``hidden_states`` has the final norm."""
    if hidden is None or len(hidden) != len(states) + 1:
        return
    for layer in range(len(states) - 1):
        want = hidden[layer + 1].flatten(0, -2).float().cpu().numpy()
        gap = np.linalg.norm(states[layer] - want)
        if want.shape == states[layer].shape and not gap <= SAME * np.linalg.norm(want):
            raise NoReferenceError(
                f"transformers' hidden_states[{layer + 1}] is not what its layer {layer} returns"
            )


@contextlib.contextmanager
def _watched(
    layers: dict[int, torch.nn.Module], outputs: dict[int, torch.Tensor]
) -> Iterator[None]:
    def keep(number: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            # In transformers a layer returns its stream, alone or before caches and weights.
            outputs[number] = residual_stream(output, "first", f"layer {number}")[0].clone()

        return hook

    handles = [layer.register_forward_hook(keep(number)) for number, layer in layers.items()]
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
