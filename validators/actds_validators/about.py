"""What a dataset is, as the head of every page says it: model, engine, hooks, when it was made."""

from __future__ import annotations

from dataclasses import dataclass

from actds.reading import Catalog

__all__ = ["About", "about"]


@dataclass(frozen=True)
class About:
    """What a dataset is, beyond what the result of an audit holds.

    Args:
        models: names of the models, one per run that has another.
        engines: names and versions of the engines.
        hooks: names with width and type.
        started_ns: when the first run began, wall clock.
        command: that made the report.
    """

    models: tuple[str, ...]
    engines: tuple[str, ...]
    hooks: tuple[str, ...]
    started_ns: int
    command: str


def about(catalog: Catalog, command: str) -> About:
    """Return what a dataset is, from its genesis and its run records.

    Args:
        catalog: of the dataset.
        command: that makes the report, as typed.
    """
    genesis, runs = catalog.genesis, list(catalog.runs.values())

    def named(*fields: str) -> tuple[str, ...]:
        of_runs = (
            [run.fields[field].value for field in fields if field in run.fields] for run in runs
        )
        words = (" ".join(str(v) for v in values if v is not None) for values in of_runs)
        return tuple(dict.fromkeys(filter(None, words)))

    return About(
        models=named("model.name"),
        engines=named("engine.name", "engine.version"),
        hooks=tuple(f"{h.name} ({h.d_model:,} × {h.dtype})" for h in genesis.hooks),
        started_ns=min((run.started_ns for run in runs), default=genesis.created_ns),
        command=command,
    )
