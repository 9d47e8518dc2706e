"""Whether the process behind an open chain is gone, and who it is that lives.

On the data path this stands above the ledger, where a run is recovered or a dataset rewritten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from actds.dataset.heartbeat import Owner, busy, read_heartbeat
from actds.dataset.ledger import ChainState
from actds.errors import BusyError
from actds.store import Store, layout, local_folder

SILENCE_S = 60.0
"""Seconds without a beat and without a record after which a process of another machine is gone."""
_POLL_S = 1.0


@dataclass
class Owners:
    """Who is behind the open chains of a dataset.

    Args:
        gone: by chain, the process that is gone, in words.
        living: by run, the refusal to touch what a process may still write.
    """

    ended: dict[str, str] = field(default_factory=dict)
    living: dict[str, BusyError] = field(default_factory=dict)

    def require_gone(self) -> None:
        """Raise E010 for the first process that lives."""
        for error in self.living.values():
            raise error


def find_owners(
    store: Store,
    chains: Iterable[ChainState],
    *,
    silence_s: float = SILENCE_S,
    each: bool = False,
    alone: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Owners:
    """Return which processes of the open chains of a dataset are gone.

    A process of this machine is gone when it is not there any more. One of another machine is gone
    when neither its heartbeat nor its chain has changed while this one watched. A chain without a
    heartbeat is that of a dead process in a local folder whose lock the caller holds alone, and is
    watched elsewhere.

    Args:
        store: the dataset's store.
        chains: its chains; those that have ended are passed over.
        silence_s: how long to watch; 0 takes every process of another machine for alive.
        each: watch every process to the end, also when one is known to live.
        alone: whether the caller holds the lock of a local folder alone.
        say: takes a line for the user before a wait.

    Raises:
        ActdsError: E104 when the store does not answer.

    Spec: 0.1 section 9.9.
    """
    owners, unseen = Owners(), []
    is_locked = alone and local_folder(store.uri) is not None
    for state in chains:
        if state.state != "open":
            continue
        owner, _ = read_heartbeat(store, layout.heartbeat_path(state.run, state.chain))
        if owner is not None and owner.is_here:
            if owner.lives(state.chain):
                owners.living[state.run] = _busy(state, owner)
            else:
                owners.ended[state.chain] = f"{owner} is gone"
        elif owner is None and is_locked:
            owners.ended[state.chain] = "its process is gone"
        else:
            unseen.append(_Unseen(state, owner, _signs(store, state)))
    if unseen and (each or not owners.living) and silence_s:
        runs = ", ".join(sorted({chain.state.run for chain in unseen}))
        say(f"Watching run {runs} for {silence_s:.0f} s: its processes may be at work elsewhere.")
    _watch(store, unseen, silence_s if each or not owners.living else 0, each, owners)
    return owners


@dataclass(frozen=True)
class _Unseen:
    """A chain whose process this one cannot see, and the signs of life of it so far."""

    state: ChainState
    owner: Owner | None
    signs: tuple[bytes, int]


def _watch(
    store: Store, unseen: list[_Unseen], silence_s: float, each: bool, owners: Owners
) -> None:
    """Watch chains until one, or ``each``, shows a sign of life, or the time is over."""
    deadline = time.monotonic() + silence_s
    while unseen and (each or not owners.living) and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left))
        for candidate in [*unseen]:
            if _signs(store, candidate.state) != candidate.signs:
                owners.living[candidate.state.run] = _busy(candidate.state, candidate.owner)
                unseen.remove(candidate)
    for candidate in unseen:
        if (owners.living and not each) or not silence_s or candidate.state.run in owners.living:
            owners.living.setdefault(candidate.state.run, _busy(candidate.state, candidate.owner))
        else:
            who = candidate.owner or "its process"
            owners.ended[candidate.state.chain] = (
                f"{who} gave no sign of life for {silence_s:.0f} s"
            )


def _signs(store: Store, state: ChainState) -> tuple[bytes, int]:
    """Return what changes while the process of a chain lives: its last beat, and its records."""
    _, beat = read_heartbeat(store, layout.heartbeat_path(state.run, state.chain))
    return beat, len(store.list(f"ledger/{state.chain}"))


def _busy(state: ChainState, owner: Owner | None) -> BusyError:
    got = f"run {state.run}, which {owner or 'a process'} may still write"
    return busy(f"ledger/{state.chain}", got)
