"""What ``actds.Loader.config`` left beside a dictionary that was trained on its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actds_validators.dictionaries.refusal import refused

NEXT_STEP = (
    "Fold the normalization into the weights, set `normalize` and `normalization` of the recorded "
    "configuration to null, and save again."
)


@dataclass(frozen=True)
class Recorded:
    """Which rows a dictionary was trained on.

    Args:
        hook: their hook; None where batches had several.
        held_out: share of the requests that the loader held out; None where it read all.
        model: name of their model; None where several are named, or none.
        weights: digests of the weights of their models.
    """

    digests: tuple[str, ...] = ()
    hook: str | None = None
    held_out: float | None = None
    model: str | None = None
    weights: tuple[str, ...] = ()


def recorded(place: object, config: Any) -> Recorded:
    """Return what a loader recorded; nothing where the value is not of one.

    Raises:
        ActdsError: E015 rows that the loader normalized: the weights are not for rows as they are.
    """
    if not isinstance(config, dict) or config.get("format") != "actds.loader":
        return Recorded()
    if config.get("normalization") or config.get("normalize"):
        how = config.get("normalize")
        got = f"trained on rows that the loader normalized ({how})"
        raise refused(place, got, "weights for rows as they are", NEXT_STEP)
    sets = [one for one in _list(config.get("datasets")) if isinstance(one, dict)]
    digests = [config.get("digest"), *(one.get("digest") for one in sets)]
    hooks = [one for one in _list(config.get("hooks")) if isinstance(one, str)]
    only = hooks[0] if len(hooks) == 1 else None
    known = tuple(dict.fromkeys(one for one in digests if isinstance(one, str)))
    models = [one for one in _list(config.get("models")) if isinstance(one, dict)]
    names = {one.get("name") for one in models}
    name = names.pop() if len(names) == 1 else None
    weights = {text for one in models if isinstance(text := one.get("weights_sha256"), str)}
    model = name if isinstance(name, str) else None
    return Recorded(known, only, _held_out(config), model, tuple(sorted(weights)))


def _held_out(config: dict[str, Any]) -> float | None:
    split = config.get("split")
    if not isinstance(split, list) or len(split) != 2 or split[0] != "train":
        return None
    return float(split[1]) if isinstance(split[1], float) and 0 < split[1] < 1 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
