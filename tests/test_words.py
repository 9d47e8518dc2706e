"""What a user reads is plain English of the field: no word of the list of banned ones."""

from __future__ import annotations

import pytest

from actds_testing.words import BANNED, NOT_YET, find, hits, visible_texts


def test_no_user_reads_a_banned_word() -> None:
    found = [hit for hit in hits() if hit.name not in NOT_YET.get(hit.file, ())]
    assert not found, "\n" + "\n".join(map(str, found))


def test_the_list_of_files_that_still_have_one_only_shrinks() -> None:
    found = {(hit.file, hit.name) for hit in hits()}
    gone = [(file, name) for file, names in NOT_YET.items() for name in names
            if (file, name) not in found]  # fmt: skip
    assert gone == [], "these are gone: take them out of NOT_YET"
    assert {name for names in NOT_YET.values() for name in names} <= BANNED.keys()


def test_everything_that_a_user_reads_is_scanned() -> None:
    files = {file for file, _, _ in visible_texts()}
    report = "validators/actds_validators/pages"
    assert {"README.md", "docs/cli.md", "docs/audit.md", "error code E101"} <= files
    assert {"spec/0.1/07-conservation.md", "spec/0.1/annexes/14-audit.md"} <= files
    assert {"docstring of actds.open", "actds/explore/stats.py"} <= files
    assert {f"{report}/report.py", f"{report}/templates/page.html.j2"} <= files
    said = [words for file, _, words in visible_texts() if file == f"{report}/missingness.py"]
    assert "no token was lost: there is none to compare with the stored ones" in said


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("weights mend it", ["mend"]),
        ("Mended, and it stands in the ledger", ["mend", "stand"]),
        ("a standard deviation, understood; it stands alone", []),
        ("the two\nwitnesses do not add up", ["witness", "add up"]),
        ("losses go\n    with load", ["go with"]),  # over two lines
        ("losses go with load: audit --engine ray, --engine vllm", ["go with", "--engine ray"]),
    ],
)
def test_banned_words_are_found_as_words(text: str, names: list[str]) -> None:
    assert sorted(name for name, _, _ in find(text)) == sorted(names)
