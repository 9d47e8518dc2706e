"""What a dataset is, as the head of every page says it: model, engine, hooks, when it was made."""

from __future__ import annotations

from dataclasses import dataclass

from actds.dataset.reading import Catalog


@dataclass(frozen=True)
class About:
    """What a dataset is, beyond what the result of an audit holds.

    Args:
        models: names of the models, one per run that has another.
        started_ns: when the first run began, wall clock.
    """

    models: tuple[str, ...]
    engines: tuple[str, ...]
    hooks: tuple[str, ...]
    started_ns: int
    command: str


def about(catalog: Catalog, command: str) -> About:
    """Return what a dataset is, from its genesis and its run records."""
    return About(
        models=recorded(catalog, "model.name"),
        engines=recorded(catalog, "engine.name", "engine.version"),
        hooks=tuple(f"{h.name} ({h.d_model:,} × {h.dtype})" for h in catalog.genesis.hooks),
        started_ns=began(catalog),
        command=command,
    )


def recorded(catalog: Catalog, *fields: str) -> tuple[str, ...]:
    """Return the values of fields that the runs of a dataset recorded, joined, each once.

    Args:
        fields: names of fields; those of a run that are unknown are left out.
    """
    runs = (
        [run.fields[name].value for name in fields if name in run.fields]
        for run in catalog.runs.values()
    )
    words = (" ".join(str(value) for value in values if value is not None) for values in runs)
    return tuple(dict.fromkeys(text for text in words if text))


def began(catalog: Catalog) -> int:
    """Return when the first run of a dataset began, wall clock in ns."""
    return min(
        (run.started_ns for run in catalog.runs.values()), default=catalog.genesis.created_ns
    )
