"""A study of arms: an instrument with its words; all else comes from here.

Arms in words, choice and pairing of rows, estimates with intervals, floors and tests, verdicts, the
answer, JSON, page, terminal and command are those of ``actds regimes``, which is the first study.
Nothing heavy is imported before a study runs: a command's help needs none of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from actds_studies.regimes.contrast import Pairing
    from actds_studies.regimes.result import StudyLimits, StudyResult
    from actds_studies.regimes.run import AnyInstrument
    from actds_studies.regimes.wording import Words
    from actds_validators.pages.answer import AnswerPage


@dataclass(frozen=True)
class Study:
    """A study that compares arms by instruments of its own.

    Args:
        name: of its command, and of its result, ``actds.NAME/1``.
        summary: the first line of its help.
        question: that its page answers: yes where an instrument shifts.
        instruments: makes instruments that nothing else uses, an `Instrument` or `PairInstrument`
            each: they keep what they learn of a reference.
        words: of each instrument, by its name.
        limits: by name the default of a limit, and what it limits: a number above 0. Instruments
            read them by these names, callers set them by ``limits``.
    """

    name: str
    summary: str
    question: str
    instruments: Callable[[], Sequence[AnyInstrument]]
    words: Mapping[str, Words]
    limits: Mapping[str, tuple[float, str]]

    @cached_property
    def result(self) -> type[StudyResult]:
        """The model of the result."""
        from pydantic import Field, create_model

        from actds_studies.regimes.result import StudyLimits, StudyResult

        fields: dict[str, Any] = {
            name: (float, Field(default=default, gt=0, description=words))
            for name, (default, words) in self.limits.items()
        }
        limits = create_model("Limits", __base__=StudyLimits, __doc__=self.question, **fields)
        schema = f"actds.{self.name}/1"
        fields = {
            "schema_": (Literal[schema], Field(default=schema, alias="schema")),
            "limits": (limits, Field()),
        }
        return create_model(
            f"{self.name.capitalize()}Result", __base__=StudyResult, __doc__=self.summary, **fields
        )

    def run(
        self,
        *arms: str | os.PathLike[str],
        contrasts: Sequence[str] = (),
        hooks: Sequence[str] = (),
        held_out: float | None = None,
        pairing: Pairing | None = None,
        floor: str | None = None,
        limits: StudyLimits | Mapping[str, float] | None = None,
        progress: Callable[[str], None] = lambda what: None,
    ) -> StudyResult:
        """Compare arms; arguments and errors are those of `actds.regimes`."""
        from actds_validators.sections import need_extra

        need_extra()
        from actds_studies.regimes.asking import dataset_results, open_arms
        from actds_studies.regimes.run import Asked, compare
        from actds_studies.regimes.wording import register_words
        from actds_validators.sections import settings_of

        for instrument, words in self.words.items():
            register_words(instrument, words)
        model: Any = self.result.model_fields["limits"].annotation
        chosen = settings_of(model, limits)
        compared, pairs, shared = open_arms(arms, contrasts, hooks, held_out, floor)
        given = [
            Asked(f"{b}-{a}", compared[a], compared[b], hook, self.instruments(), pairing)
            for a, b in pairs
            for hook in shared
        ]
        result = compare(given, chosen, progress, floor=floor, kind=self.result)
        datasets = dataset_results(compared.values(), shared)
        return result.model_copy(update={"datasets": datasets})

    def page(self, result: StudyResult, command: str = "") -> AnswerPage:
        """Return the page of a result; it has ``html()`` and, for a terminal, ``lines()``."""
        from actds_studies.pages.regimes import page
        from actds_studies.regimes.wording import register_words

        for instrument, words in self.words.items():
            register_words(instrument, words)
        return page(result, command or f"actds {self.name}", self.question)
