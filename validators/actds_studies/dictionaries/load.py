"""Loading: which of the formats a path has, by what is in it, and the dictionary in it."""

from __future__ import annotations

import os
from pathlib import Path

from actds_studies.dictionaries import dictionary_learning, gemma_scope, saelens
from actds_studies.dictionaries.dictionary import Dictionary
from actds_studies.dictionaries.refusal import refused
from actds_studies.dictionaries.tensors import is_npz, is_torch
from actds_studies.dictionaries.wanted import Wanted

_EXPECTED = (
    f"a folder with {saelens.CONFIG} and {saelens.WEIGHTS} (SAELens), with "
    f"{gemma_scope.PARAMETERS} (Gemma Scope) or {dictionary_learning.WEIGHTS} "
    "(dictionary_learning)"
)


def load_dictionary(
    path: str | Path,
    hook: str | None = None,
    d_model: int | None = None,
    *,
    model: str | None = None,
) -> Dictionary:
    """Return the dictionary of a path; no code in its files is run.

    What the files say of hook, width and model is compared with what is asked for before the
    weights are read. Where they do not say it, the caller's word is taken, and the dictionary
    notes that: ``source.hook_from``.

    Args:
        path: folder of a dictionary, or its file of weights.
        hook: of the rows, in the names of actds, such as ``resid_post.8``.
        d_model: channels of the rows.
        model: name of the model of the rows, or the path of its folder.

    Raises:
        ActdsError: E015 no dictionary there, or more than one; one of another hook, width or
            model; normalization that is not folded into the weights; a pickle with code; weights
            that are damaged, of other shapes, or not finite. E011 without torch, for an ``ae.pt``.
    """
    path = Path(path)
    try:
        return _of_path(path, Wanted(hook, d_model, model))
    except OSError as error:
        raise refused(path, error.strerror or error, _EXPECTED) from None


def _of_path(path: Path, wanted: Wanted) -> Dictionary:
    if path.is_dir():
        return _of_folder(path, wanted)
    if not path.is_file():
        raise refused(path, "no such file or folder", _EXPECTED)
    if is_npz(path):
        return gemma_scope.read_gemma_scope(path, wanted)
    if is_torch(path):
        return dictionary_learning.read_dictionary_learning(path, wanted)
    if path.name in (saelens.CONFIG, saelens.WEIGHTS):
        return saelens.read_saelens(path.parent, wanted)
    with path.open("rb") as file:
        start = file.read(2)
    if start[:1] == b"\x80":
        next_step = "Nothing in it was run. Save it again with torch 1.6 or newer, weights alone."
        raise refused(path, "a bare pickle", _EXPECTED, next_step)
    got = "a zip that is cut, or without weights" if start == b"PK" else f"a file of {start!r}…"
    raise refused(path, got, _EXPECTED)


def _of_folder(path: Path, wanted: Wanted) -> Dictionary:
    names = (saelens.WEIGHTS, gemma_scope.PARAMETERS, dictionary_learning.WEIGHTS)
    found = [name for name in names if (path / name).is_file()]
    if len(found) > 1:
        raise refused(path, f"{' and '.join(found)}", "the path of one of them")
    if not found:
        for name in names:
            if os.path.lexists(path / name):
                raise refused(path / name, "no regular file", "a file of weights")
        inside = sorted(one.name for one in path.iterdir())[:8]
        raise refused(path, f"a folder with {', '.join(inside) or 'nothing'}", _EXPECTED)
    if found == [saelens.WEIGHTS]:
        return saelens.read_saelens(path, wanted)
    if found == [gemma_scope.PARAMETERS]:
        return gemma_scope.read_gemma_scope(path / gemma_scope.PARAMETERS, wanted)
    return dictionary_learning.read_dictionary_learning(path / dictionary_learning.WEIGHTS, wanted)
