"""The audit from Python: `audit`, which the command calls as well."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actds_validators.sections import need_extra, settings_of

if TYPE_CHECKING:
    from actds_validators.audit.passes import ExecutorName
    from actds_validators.audit.result import Limits
    from actds_validators.audit.run import AuditResult


def audit(
    path: str | Path,
    *,
    limits: Limits | Mapping[str, float] | None = None,
    weights: str | Path | None = None,
    classes: str | Path | None = None,
    accept: Sequence[str] = (),
    follow_up: str | Path | None = None,
    sae: Sequence[str | os.PathLike[str]] = (),
    model: str | os.PathLike[str] | None = None,
    executor: ExecutorName = "threads",
    progress: Callable[[str], None] = lambda what: None,
) -> AuditResult:
    """Estimate what a dataset lost, and whether it matters.

    Args:
        path: the dataset, sealed and valid.
        limits: settings by name, or as the result has them; those of the spec by default.
        weights: file to write, inverse-probability weights of the stored rows; not written when
            the accounting does not match.
        classes: Parquet file of token classes: request, start, stop, class, and maybe run.
        accept: places that are waived by name, though they do not pass: ``source``, ``cache``,
            ``rules``, ``ends``, ``queues``, ``values``, ``identity``.
        follow_up: a replay of a random part of its requests (``actds replay --fraction``): what
            means the losses moved is then known by design, from the rows of both. Ignored where
            nothing was lost.
        sae: dictionaries, each ``[HOOK=]PATH``, one to a hook: of a dataset whose rows were drawn,
            how often each of their features is active over all rows. Ignored where no row was left
            out by a draw.
        model: what the dictionaries call the model of the rows; the name in the run record by
            default.
        executor: where the rows are read, ``threads`` of this process or ``ray``: the numbers are
            the same.
        progress: called with what is being done.

    Returns:
        The result with its verdict. Activations are read with ``follow_up``, and where rows were
        drawn: whether two parts of a dataset hold the same values is what `actds.regimes` tests.

    Raises:
        ActdsError: E009 an argument that cannot be used, a follow-up of another dataset; E011 a
            package that is not installed; E015 a dictionary that does not fit the rows; E306 not
            sealed; E401, E403 without provenance, as imported rows are; E202 a file that changed;
            E503 weights that cannot be written; what ``actds.open`` raises.

    Spec: 0.1 section 14.
    """
    need_extra()
    from actds.store.folders import refuse_outputs
    from actds_validators.audit import run
    from actds_validators.audit.place import places_of
    from actds_validators.audit.result import Limits

    weights, classes = (None if p is None else Path(p) for p in (weights, classes))
    refuse_outputs({"weights": weights}, {"classes": [classes] if classes else []})
    chosen = settings_of(Limits, limits)
    waived = places_of(accept)
    return run.audit_dataset(
        path,
        chosen,
        progress,
        weights,
        classes,
        executor,
        waived,
        None if follow_up is None else str(follow_up),
        sae,
        None if model is None else os.fspath(model),
    )
