"""Parting: after equal tokens, how often the two arms sampled different ones.

Asked of pairs by token in which both arms sampled the next token, and said their margins
(``--entropy``). Greedy answers part where the difference of two computations exceeds the margin
between the two largest logits; answers that are drawn at a temperature part by chance.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from actds_validators.arrays import Floats
from actds_validators.regimes.inference import Measure
from actds_validators.regimes.instruments.base import Sums
from actds_validators.regimes.sums import Part


def parting_parts(parted: npt.NDArray[np.int8]) -> Iterator[Part]:
    """Yield what is added up of pairs: whether both sampled, and whether different tokens.

    Args:
        parted: 1 for different tokens, 0 for the same, -1 unknown ``(n,)``.
    """
    yield Part("sampled", (parted >= 0).astype(np.float64))
    yield Part("parted", (parted > 0).astype(np.float64))


def _share(pairs: Sums, _: Sums) -> Floats:
    n = pairs["sampled"]
    return np.asarray(pairs["parted"] / np.where(n > 0, n, np.nan))


PARTING = Measure(
    "forks of the sampled token",
    _share,
    "share of pairs that both sampled after",
    "described",
    of_pairs=True,
)
"""Share of the pairs after which the arms sampled different tokens; only described."""
