"""Stop strings, on the scheduler side: where a request ends for its client.

vLLM looks for stop strings where it makes text of tokens, in the front end, which then aborts the
request; to the scheduler that is no other abort than a client's. Here the tokens that the scheduler
hands to the front end are read as the front end reads them, by its own detokenizer.
"""

from __future__ import annotations

from typing import Any


class StopStrings:
    """Looks for the stop strings of one request.

    Args:
        tokenizer: the one that the front end has.
        request: of the scheduler; its sampling parameters have stop strings.
    """

    def __init__(self, tokenizer: Any, request: Any) -> None:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        self._n_read = 0
        self.n_delivered: int | None = None
        """Sampled tokens up to the one that completes a stop string, once there is one."""

    def read(self, request: Any) -> bool:
        """Read the tokens of a step, as one piece; return whether they complete a stop string."""
        tokens = list(request.output_token_ids[self._n_read : request.num_output_tokens])
        self._n_read += len(tokens)
        if self.n_delivered is not None or not tokens:
            return False
        # With the token that ended it the front end gets no text.
        ended = request.is_finished() and str(request.get_finished_reason()) == "stop"
        if not self._detokenizer.update(tokens, ended):
            return False
        self.n_delivered = self._detokenizer.num_output_tokens()
        return True


def tokenizer_of(scheduler: Any) -> Any:
    """Return the tokenizer of the front end of a scheduler, ``None`` where it has none."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = scheduler.vllm_config.model_config
    return None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)
