"""Errors: a class by what a caller can do, chosen by the code, whole in another process."""

import pickle
from pathlib import Path

import pytest

import actds
from actds import errors
from actds.errors import CODES, ActdsError

STANDARD = {
    errors.InvalidInputError: ValueError,
    errors.NotFoundError: FileNotFoundError,
    errors.ExistsError: FileExistsError,
    errors.BusyError: BlockingIOError,
    errors.StoreError: OSError,
    errors.EngineError: RuntimeError,
    errors.InternalError: RuntimeError,
    errors.MissingDependencyError: ImportError,
}
SAMPLES = {
    "E001": errors.NotFoundError,
    "E008": errors.ExistsError,
    "E009": errors.InvalidInputError,
    "E011": errors.MissingDependencyError,
    "E101": errors.NotFoundError,
    "E202": errors.InvalidDatasetError,
    "E306": errors.NotSealedError,
    "E308": errors.BusyError,
    "E401": errors.NoProvenanceError,
    "E402": errors.InvalidDatasetError,
    "E407": errors.InvalidDatasetError,
    "E503": errors.StoreError,
    "E504": errors.EngineError,
    "E901": errors.InternalError,
}


@pytest.mark.parametrize("code", CODES)
def test_each_code_makes_an_error_of_its_class(code: str) -> None:
    error = ActdsError(code, "shards/x", got="1", expected="2")
    assert type(error).__name__ == CODES[code].error
    assert type(error) is SAMPLES.get(code, type(error))
    assert type(error) is vars(errors)[CODES[code].error]
    step = CODES[code].next_step.replace("PLACE", "shards/x")
    assert str(error) == f"{code} shards/x: 1; expected 2.\n{step}"
    assert isinstance(error, STANDARD.get(type(error), Exception))


@pytest.mark.parametrize("code", CODES)
def test_an_error_survives_the_way_to_another_process(code: str) -> None:
    sent = ActdsError(code, "p", got="1", expected="2", next_step="Do it.")
    came = pickle.loads(pickle.dumps(sent))
    assert (type(came), vars(came), str(came)) == (type(sent), vars(sent), str(sent))
    named = pickle.loads(pickle.dumps(errors.BusyError(code, "p", got="1", expected="2")))
    assert type(named) is errors.BusyError, "a class that was asked for by name stays"


def test_a_missing_path_is_a_file_that_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"E101 .*no-such: no such path"):
        actds.open(tmp_path / "no-such")
    with pytest.raises(FileNotFoundError, match=r"E101 actds\.json: no such file in "):
        actds.open(tmp_path)
