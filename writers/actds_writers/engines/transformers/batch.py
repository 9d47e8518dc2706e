"""A batch: requests that run through the model together, padded on the left.

A batch is prefilled in chunks of columns, then decodes a column per step; requests that end leave
it. With left padding every request samples from the last column, and the distance between two
tokens is that of their positions, which sliding windows depend on.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from actds_writers.ipc.messages import IntArray


@dataclass
class Sequence:
    """One running or waiting request.

    Args:
        number: its number in the run.
        token_ids: prompt, then sampled tokens.
        max_tokens: tokens to sample at most.
        generator: source of randomness, ``None`` for greedy sampling.
    """

    key: str
    number: int
    token_ids: list[int]
    prompt_len: int
    max_tokens: int
    generator: torch.Generator | None = None

    @property
    def n_sampled(self) -> int:
        """Return the number of sampled tokens."""
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True)
class Columns:
    """The columns of a padded batch that a step computes.

    Args:
        width: rows of the forward per request, padding included.
        sequences: requests with a token in the columns, in row order.
        n_rows: tokens of each.
        positions: position of each token.
        index: row of each token in the flattened forward.
    """

    width: int
    sequences: list[Sequence]
    n_rows: IntArray
    positions: IntArray
    index: IntArray


@dataclass
class Batch:
    """A static batch.

    Args:
        model: a causal language model.
        sequences: requests, none of them computed yet.
        max_tokens: tokens of a step at most, padding included.
    """

    model: Any
    sequences: list[Sequence]
    max_tokens: int
    cache: Any = None
    input_ids: torch.Tensor | None = None
    _column: int = 0
    _pads: IntArray = field(init=False)
    _mask: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        lengths = np.array([s.prompt_len for s in self.sequences], np.int64)
        self._width = int(lengths.max())
        self._pads = self._width - lengths
        columns = np.arange(self._width)
        self._mask = self._tensor((columns[None] >= self._pads[:, None]).astype(np.int64))
        self._sparing = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @property
    def n_columns(self) -> int:
        """Return the columns of the next step."""
        chunk = max(1, self.max_tokens // len(self.sequences))
        return min(chunk, self._width - self._column)

    def next_columns(self) -> Columns:
        """Return the columns of the next forward."""
        columns = self._column + np.arange(self.n_columns)
        positions = columns[None] - self._pads[:, None]
        real = positions >= 0
        counts = real.sum(axis=1)
        return Columns(
            width=len(columns),
            sequences=[s for s, n in zip(self.sequences, counts, strict=True) if n],
            n_rows=counts[counts > 0],
            positions=positions[real],
            index=np.flatnonzero(real),
        )

    def forward(self, columns: Columns) -> torch.Tensor | None:
        """Run the model; return the logits of the last column, ``None`` within the prefill."""
        stop = self._column + columns.width
        ids = np.zeros((len(self.sequences), columns.width), np.int64)
        for row, (sequence, pad) in enumerate(zip(self.sequences, self._pads, strict=True)):
            first = self._column - int(pad)
            tokens = sequence.token_ids[max(first, 0) : max(first + columns.width, 0)]
            ids[row, columns.width - len(tokens) :] = tokens
        self.input_ids = self._tensor(ids)
        mask = self._mask[:, :stop]
        positions = (torch.arange(self._column, stop, device=mask.device)[None]
                     - self._tensor(self._pads)[:, None]).clamp(min=0)  # fmt: skip
        output = self.model(
            input_ids=self.input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            **({"logits_to_keep": 1} if self._sparing else {}),
        )
        self.cache, self._column = output.past_key_values, stop
        return output.logits[:, -1] if stop == self._width else None

    def append(self, tokens: list[int], alive: list[bool]) -> None:
        """Append the sampled tokens; requests that ended leave the batch."""
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.token_ids.append(token)
        self._width += 1
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self.keep(alive)

    def keep(self, alive: list[bool]) -> None:
        """Remove the requests that are not alive."""
        if all(alive):
            return
        rows = np.flatnonzero(alive)
        self.sequences = [self.sequences[row] for row in rows]
        self._pads = self._pads[rows]
        index = self._tensor(rows)
        self._mask = self._mask[index]
        if len(rows) and self.cache is not None:
            # Made for beam search; the only selection that every kind of cache has.
            self.cache.reorder_cache(index)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.model.device)
