"""The process that replays canaries: a harvest of one request at a time.

``python -m actds_writers.harvest.canary_replay`` reads settings and plan from standard input. In a
separate process the engine starts afresh, without state of the harvest's.
"""

from __future__ import annotations

import os
import pickle
import sys

from actds.errors import ActdsError
from actds_writers.engine_protocol import Finished
from actds_writers.harvest.run import harvest_plan


def main() -> int:
    """Replay; write the sampled tokens by key, or the error, pickled."""
    settings, plan = pickle.load(sys.stdin.buffer)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # an engine may print
    sampled: dict[str, int] = {}

    def heard(finished: Finished) -> None:
        sampled[finished.key] = finished.token_ids[-1]

    with answer:
        try:
            result = harvest_plan(settings, plan, heard)
        except ActdsError as error:
            pickle.dump(error, answer)
            return 1
        pickle.dump(sampled, answer)
    return 0 if result.reason == "finished" else 2


if __name__ == "__main__":
    sys.exit(main())
