"""What a run record says that was looked at: of any other text an error of the format."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actds.errors import ActdsError
from actds.format import canonical
from actds.format.telemetry import (
    ATTENTION,
    PROFILE,
    Attending,
    attending_of,
    profile_entry,
    profile_field,
)

RIGHT = {"every": 2, "layers": [0, 3], "salt": "0" * 16, "share": "0.5"}


def record(name: str, value: object) -> Any:
    text = value if isinstance(value, str) else canonical.dump(value).decode().rstrip("\n")
    return SimpleNamespace(run="r", fields={name: SimpleNamespace(value=text)})


def test_fields_read_back_as_they_were_written() -> None:
    attending = Attending((0, 3), 64, 0.1, "00ff" * 4)
    assert attending_of(record(ATTENTION, attending.as_field())) == attending
    entry = profile_entry(record(PROFILE, profile_field(b"{}\n")))
    assert entry is not None and entry.nbytes == 3 and entry.path == "readouts/r/profile.json"
    assert entry.sha256 == canonical.digest(b"{}\n")
    assert (
        attending_of(record(PROFILE, "x")) is None and profile_entry(record(ATTENTION, "x")) is None
    )


@pytest.mark.parametrize(
    "changed",
    [
        *({"every": value} for value in (0, -1, True, "2", None)),
        *({"layers": value} for value in ([], [3, 0], [0, 0], ["0"], [[]], [True])),
        *({"layers": value} for value in ([-1], 3, [1 << 16])),
        *({"share": value} for value in ("0.0", "1.5", "1e999", "1e-999")),
        *({"share": value} for value in ("nan", "-0.5", 1, "\u0665")),
        *({"salt": value} for value in ("0" * 15, "0" * 15 + "G", 0, "")),
        {"more": 1},
    ],
)  # fmt: skip
def test_another_attention_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ActdsError, match="E103"):
        attending_of(record(ATTENTION, {**RIGHT, **changed}))


@pytest.mark.parametrize(
    "value",
    [
        {"nbytes": 0, "sha256": "0" * 64},
        {"nbytes": (1 << 24) + 1, "sha256": "0" * 64},
        {"nbytes": True, "sha256": "0" * 64},
        {"nbytes": 1, "sha256": "0" * 63},
        {"nbytes": 1, "sha256": None},
        {"nbytes": 1},
        [],
        "no JSON",
        '{"nbytes": 1}',
    ],
)
def test_another_profile_is_refused(value: object) -> None:
    with pytest.raises(ActdsError, match=r"E10[23]"):
        profile_entry(record(PROFILE, value))


def test_requests_are_drawn_by_the_hash_of_the_format() -> None:
    from actds_testing.independent.draw import number

    attending = Attending((0,), 1, 0.3, "9f86d081884c7d65")
    salt = int(attending.salt, 16)
    drawn = [number(salt, request, 0) < 0.3 for request in range(200)]
    assert attending.draws(range(200)).tolist() == drawn and 30 < sum(drawn) < 90
