"""SHA256SUMS: what a seal pins, as the list that ``sha256sum --check`` reads.

It follows from the ledger alone: no file is read for it. What may be written again beside the data
(the card, signatures, the list itself) is not in it.
"""

from __future__ import annotations

from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.format.schema import ReplaceBody, RunBody, ShardBody
from actds.format.shard import data_files
from actds.store import layout


def sums(catalog: Catalog) -> bytes:
    """Return the list of a sealed dataset: one line per file, sorted by path.

    A line is the digest, two blanks and the path. Of a replaced shard only the manifest is there.

    Spec: 0.1 section 15.1.
    """
    found = {layout.GENESIS: catalog.genesis_sha256, **catalog.pins}
    for n, digest in enumerate(catalog.seal_digests, start=1):
        found[layout.seal_path(n)] = digest
    for state in catalog.chains.values():
        for record, following in zip(state.records, [*state.records[1:], None], strict=True):
            digest = state.head if following is None else following.prev
            found[layout.record_path(state.chain, record.seq)] = digest
            body = record.typed_body()
            if isinstance(body, RunBody):
                found[layout.run_path(body.run)] = body.sha256
            elif isinstance(body, ShardBody | ReplaceBody):
                found[layout.manifest_path(body.shard)] = body.manifest_sha256
    for manifest in catalog.replaced:
        for path in data_files(manifest):
            found.pop(path, None)
    return "".join(f"{found[path]}  {path}\n" for path in sorted(found)).encode()


def put_sums(catalog: Catalog) -> None:
    """Write the list of a sealed dataset over an older one.

    Raises:
        ActdsError: E503 when the disk refuses.

    Spec: 0.1 section 15.1.
    """
    catalog.store.replace(layout.SUMS, sums(catalog))


def check_sums(catalog: Catalog) -> None:
    """Check that the list, where there is one, says what the seal does.

    Raises:
        ActdsError: E806 it does not; E104 it cannot be read; E107 it is no regular file.

    Spec: 0.1 section 15.1.
    """
    store = catalog.store
    if not store.exists(layout.SUMS):
        return
    expected = sums(catalog)
    # By the size first: another one is not read.
    if store.size(layout.SUMS) != len(expected) or store.read(layout.SUMS) != expected:
        raise ActdsError(
            "E806", layout.SUMS, got="another list", expected=f"that of seal {len(catalog.seals)}"
        )
