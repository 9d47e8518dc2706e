"""The stable error codes: what each means, what to do about it, and which class raises it.

A new code is a new entry of the table; a code that was used before is never used again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One stable code; ``clause`` is of spec 0.1, ``error`` a class of ``actds.errors``."""

    family: str
    title: str
    meaning: str
    next_step: str
    clause: str
    error: str

    @property
    def exit_code(self) -> int:
        """Return the process exit code when a command ends with this code."""
        return {"usage": 2, "internal": 4, "writer": 4, "policy": 5}.get(self.family, 3)


_TABLE = """\
# usage: InvalidInputError, section 12.1
E001 prompts not readable [NotFoundError]
  The prompts source does not exist, or its type is not supported.
  Name a JSONL, Parquet or text file, or hf:FOLDER.
E002 broken prompt
  A prompt record cannot be read as a prompt.
  Write PLACE anew; each record needs a `prompt` string or a `messages` list.
E003 no prompts
  The prompts source holds no prompt.
  Give a source with at least one record.
E004 prompt too long
  A prompt leaves no room in the model's context for a generated token; it is skipped.
  Shorten it, or raise the engine's max_model_len.
E005 model not found [NotFoundError]
  The model path is not a readable model folder.
  Give the path of a folder with config.json, weights and tokenizer.
E006 nothing to harvest
  No prompt can be sent to the engine.
  See the skipped prompts in the report; give prompts that fit the model.
E007 unknown hook
  The model has no such hook.
  Use KIND:LAYER,... with layers of the named range, for example resid_post:10,20.
E008 OUT exists [ExistsError]
  The output path exists already.
  Choose a new path, or resume the harvest of this one.
E009 bad option
  An option has a value that cannot be used.
  Give PLACE as it is expected.
E010 cannot resume
  The dataset was written with another model, hooks or precision than this command has.
  Resume with the model, hooks and precision of the dataset, or write a new one.
E011 missing dependency [MissingDependencyError]
  An optional package is not installed.
  Install what PLACE needs, as it is expected.
E012 unsupported engine configuration
  Capture does not support this engine configuration.
  Leave PLACE out, or give it as it is expected.
E013 unknown code
  There is no such code.
  List the codes with actds explain.
E014 bad selection
  A loader argument selects nothing or names something the dataset lacks.
  Change the selection at PLACE; actds info shows hooks, phases and runs.
E015 bad probes
  A file of probes, or a dictionary, cannot be read or does not fit the hooks.
  Give a .safetensors or .npy file with (n_probes, d_model) float values per hook, or a dictionary
    of the hook.
E016 store without create-only puts [8.1, StoreError]
  The store overwrites a file that it was asked to create.
  Use a store that honours If-None-Match on puts, or a local disk.
E017 bad capture configuration
  The capture settings of a live engine cannot be used.
  Give PLACE as it is expected; it is part of the engine's additional_config.
E018 bad weights [14.11]
  The weights file belongs to another dataset, or does not have one weight per stored row.
  Write it again from the dataset as it is now: actds audit PATH --weights FILE.
E019 bad foreign set
  A set to import is truncated, mixes widths or types, or has a form that is not known.
  Make PLACE anew, in a form that actds import --help lists.
E020 bad policy
  A policy file cannot be read, has an unknown rule, or a value that the rule cannot have.
  Write PLACE as it is expected; actds schema policy lists all rules.
E021 bad key [15.4]
  A key file cannot be read, is of another kind, is locked, or is part of the dataset.
  Make a pair with openssl genpkey -algorithm ed25519, and keep it outside the dataset.
E022 cannot replay
  The model is not the one that the source was made with, or the tokens of a request are not all
    known.
  Give the model folder of the source; replay what is known with readouts.
E023 document too short
  A document has no token after the first P that are its prompt; it is skipped.
  Use longer documents, or take fewer tokens of each for its prompt.
E024 another regime
  A profile cannot be read, or was fitted with other weights, hooks, readouts or precision.
  Fit a profile to a dataset of the same model, hooks and precision: actds profile.
# structure: InvalidDatasetError, section 2
E101 not a dataset [NotFoundError]
  The path holds no actds.json.
  Give the folder that holds actds.json, or ask actds doctor what else is there.
E102 malformed document
  A JSON document is not canonical JSON within the limits.
  Do not edit documents by hand; restore the file or write the dataset again.
E103 schema violation
  A document lacks a field, has an unknown one, or a value out of range.
  Restore the file, or write the dataset again with a conforming writer.
E104 file missing
  A file that the ledger refers to is missing.
  Restore it from a copy; without it the dataset is incomplete.
E105 unreachable file
  The ledger does not refer to this file.
  It is not part of the dataset: delete it, or move it elsewhere.
E106 unsupported version
  The dataset has a format version that this reader does not know.
  Upgrade actds.
E107 bad path
  A path segment breaks the naming rule or leaves the dataset.
  Do not open the dataset; its writer is broken or hostile.
E108 array metadata
  An array's metadata differs from the fixed form of the spec.
  Write the shard again with a conforming writer.
E109 table schema
  A table's columns differ from the spec.
  Write the table again with a conforming writer.
E110 card differs [2.4]
  The card says something else than the dataset, or another version of actds made it.
  Believe the dataset; actds card PATH writes the card anew.
# integrity: InvalidDatasetError, section 2.3
E201 size differs
  A file's size differs from its manifest.
  Restore the file from a copy; it was cut or changed.
E202 digest differs
  A file's SHA-256 differs from its manifest.
  Restore the file from a copy; it was changed after the commit.
E203 row counts differ
  Arrays, token table and manifest of a shard disagree on the number of rows.
  Write the shard again: actds write --resume.
E204 damaged chunk
  A chunk cannot be decoded, its checksum differs, or it holds more than its rows.
  Restore the file from a copy.
E205 root differs
  A Merkle root is not that of the entries beside it.
  Restore the manifest from a copy.
E206 unreadable table
  A Parquet file cannot be read, lacks or fails a page checksum, has a footer that is not true of
    its pages, or carries an Arrow schema.
  Restore the file from a copy.
# ledger: InvalidDatasetError, section 8
E301 gap in a chain
  A chain lacks a record, or another record than its first opens it.
  Restore the record; committed data may be missing.
E302 chain broken
  A record's `prev` is not the digest of the record before it.
  The history was changed: restore the chain from a copy.
E303 foreign record
  A record names another dataset, chain or number than its place.
  Remove what was copied in, or restore the chain.
E304 record after the end
  A chain continues after its close or fence.
  A writer continued after it was ended; do not use what it added.
E305 open chain [NotSealedError]
  A chain is neither closed nor fenced.
  Wait for its writer, or end it with actds recover.
E306 not sealed [NotSealedError]
  The dataset has no seal for its current ledger.
  Finish it with actds write --resume, or seal it with actds seal.
E307 seal differs
  The seal's heads, totals or root differ from the ledger.
  Restore the seal and the ledger from a copy.
E308 fenced [BusyError]
  A writer tried to commit to a chain that another process has ended.
  Start a new run; the fence worked as intended.
E309 document exists [StoreError]
  A document that may be written only once exists already.
  Two writers used one name; start a new run.
E310 shard committed twice
  Two ledger records commit the same shard or part.
  Restore the ledger from a copy.
E311 replacement does not fit [8.5]
  A record replaces a shard that is not committed, is replaced already, or has other rows.
  Restore the ledger from a copy.
E312 broken journal [9.7]
  The journal of a census lacks a segment, or one is not the next of its chain.
  Restore the segment from a copy; its rows stay readable, the run cannot be sealed.
# provenance: NoProvenanceError, section 6
E401 no run record
  A shard names a run that has no run record.
  The shard has no provenance: do not train on it.
E402 unexplained field [InvalidDatasetError]
  A provenance field is null without a reason, or has a reason beside a value.
  Write the run again with a conforming writer.
E403 no census
  A run has rows but no census, or none that was closed.
  The rows cannot be accounted for: do not train on them.
# accounting: InvalidDatasetError, section 7
E404 gap
  A position of a request has no disposition.
  The census is incomplete; do not use the run.
E405 overlap
  A position of a request has two dispositions.
  The census contradicts itself; do not use the run.
E406 rows differ from the census
  The rows of the shards are not the positions that the census calls captured.
  A row was lost, added or swapped; do not use the run.
E407 row twice
  The same position of a request has two rows in one run.
  Write the run again.
E408 drops differ
  The drop log and the census disagree.
  A loss is unexplained; do not use the run.
E409 scheduled tokens differ
  Scheduled tokens are not the sum of what became of them.
  Some computed rows are not accounted for; do not use the run.
E410 unresolved cache hit
  A prefix-cache hit refers to a position that has no row, or that was a hit itself.
  The reused tokens count as lost; decide whether that matters.
E411 cached count differs
  The prefix-cache hits of the census are not those the engine reported.
  The census missed a hit; do not use the run.
E412 step differs
  A step has another number of rows than the census says, or is unknown to it.
  Rows were moved between steps; do not use the run.
E413 multiplicity differs
  The multiplicity table does not follow from the prefix-cache hits.
  Seal the dataset again with actds seal.
E414 row labels differ
  A row's phase, step or token differs from the census.
  The label is wrong; do not use the run.
E415 totals differ
  The totals of a document are not those of its tables.
  Restore the document, or seal again.
E416 readouts incomplete [7.8]
  A computed row has no readout, or a readout names a row that was never computed.
  The row set of the readouts is wrong; do not use them.
E417 readout differs from its row [7.8]
  A readout differs from one computed from the stored row, or names another token.
  The row and its readout do not belong together; do not use the shard.
E418 row of another request [7.9]
  A canary replay shows that a stored row belongs to another request.
  Capture mixes requests up: do not use the run, and report the engine's version.
E419 end of a request differs [7.2]
  A position computed past the end of a request is not `undelivered`, or one before it is.
  The census mixes rows that were delivered with others; do not use the run.
E420 role without a position [6.3]
  A line of the roles names no position of its request, or one that has a role already.
  Do not choose rows by role; write the run again with a conforming writer.
E421 losses not closed [8.3]
  The writer of a run ended before it could close its log of losses.
  Losses that it had not logged count as aborted; do not take what is not logged for zero.
E422 origin without a request [6.3]
  A line of the origins names no request of its run, one that has an origin already, or more given
    positions than the request has prompt tokens.
  Do not tell sampled from given tokens by it; replay the source again.
E423 sampled token differs [6.3]
  A line of the sampled tokens is of none that its request sampled, of one that has a line already,
    of another token, or of values that no softmax has; or a sampled token has none.
  Do not use entropies of the run; write it again with a conforming writer.
E424 draw differs [7.10]
  A row has another probability than its step, or is stored or left out against the draw by hash.
  The rows are no sample with known probabilities: do not use the run.
E425 mark differs [7.11]
  A row says of another intervention, or of none, than the run record implies of its position.
  Nobody knows which rows were changed: do not use the run.
E426 look differs [7.12]
  A line of alerts or attention is of a row that was not looked at, or its values cannot be.
  Leave these two tables out: the rows do not depend on them. Report it to the writer's program.
E427 redaction not whole [8.6]
  A request was redacted, and rows, lines or files of it are still there.
  Call actds redact again with the same request: it ends what was begun.
# writer: EngineError, section 9
E501 rows differ from the schedule
  The rows captured in a step are not those the scheduler scheduled.
  Report it with the engine's version; the hook does not run as expected.
E502 writer process ended
  The writer process ended before the harvest did.
  See its message above; continue with actds write --resume.
E503 storage failed [StoreError]
  The disk refused a write, a sync or a close.
  Free space or fix the disk, then actds write --resume.
E504 engine failed
  The engine could not start or stopped.
  Change what the engine's message names, and run it again: actds write --resume.
E505 census process ended
  The census process ended before the harvest did.
  See its message above; account for the run with actds recover.
E506 no response
  A process of the pipeline did not answer in time.
  Read in its log what it waited for; continue with actds write --resume.
E507 rows are not the model's [9.1]
  Before the first row, a hook's rows of two short prompts differed from the model's own.
  Harvest it with the engine transformers, and report model and engine version.
E508 hub failed [StoreError]
  The Hub refused a request or did not answer it.
  Run the same command again: it continues where this one ended.
E509 weights changed unseen [9.4]
  The weights in the engine are not those of the run, and nobody knows since when.
  Set weights by a call to the workers, such as reload_weights, or of every tensor at once.
# values: InvalidDatasetError, section 4.4
E601 not finite
  A row holds NaN or infinity.
  Leave such rows out by exclude, or harvest again in a type that holds them.
E602 zero row
  A row is zero in every channel.
  The hook may not be reached; filter the rows or leave the hook out.
E603 repeated row
  Rows of different tokens are bitwise equal.
  Do not train on them: a capture buffer was overwritten; report the engine's version.
E604 counts differ [5.2]
  A manifest counts other rows that are not finite, or zero, than the shard has.
  Do not judge the rows by these counts; write the shard again with a conforming writer.
# policy: RefusedError, section 12.2
E701 refused by a policy
  The dataset does not comply with a rule of the policy that was asked for.
  Harvest it as the policy asks, or talk to those who wrote the policy.
# trust: UntrustedError, section 15
E801 not signed [15.4]
  The seal has no signature of the kind that was asked for.
  Ask who publishes the dataset to sign it: actds sign.
E802 no trusted signature [15.4]
  Not enough of those whom the consumer trusts have signed the seal.
  Do not use it: get the dataset, or the right key, from who publishes it.
E803 statement differs [15.2]
  What was signed is not the statement about this seal.
  Do not use it: the signature belongs to another dataset, or to another state.
E804 not the pinned seal [15.5]
  The pinned seal is none of the dataset's: it was rolled back, forked, or is another one.
  Get the dataset of the pinned seal; if it is the right one after all, pin it anew.
E805 sealed rows replaced [15.5]
  Shards that the pinned seal covers were replaced since, and no digest says by the same.
  Validate the dataset as it is and pin its seal, or get it as it was pinned.
E806 list differs [15.1]
  SHA256SUMS does not list what the seal pins.
  Write it again from the seal: actds seal.
E807 Sigstore failed [15.6, StoreError]
  A service of Sigstore refused a request, or did not answer it.
  Try again where there is a network, or sign with a key.
# internal: InternalError, section 12.1
E901 internal error
  actds failed unexpectedly.
  Report it with the traceback, which actds --debug prints.
"""
"""A family with the error class and the section of most of its codes; by code a title, in brackets
what differs from the family, then what it means, and what to do."""
_FAMILY = re.compile(r"# (\w+): (\w+), section ([\d.]+)")
_CODE = re.compile(r"(E\d{3}) ([^\[]+)(?: \[([\d.]+)?(?:, )?(\w+)?\])?")


def _codes() -> Iterator[tuple[str, Code]]:
    lines = iter(_TABLE.replace("\n    ", " ").splitlines())
    family = error = clause = ""
    for line in lines:
        if of_family := _FAMILY.fullmatch(line):
            family, error, clause = of_family.groups()
        elif of_code := _CODE.fullmatch(line):
            name, title, its_clause, its_error = of_code.groups()
            words = next(lines).strip(), next(lines).strip()
            yield name, Code(family, title, *words, its_clause or clause, its_error or error)
        else:
            raise ValueError(f"no entry of the table of codes: {line}")


CODES: dict[str, Code] = dict(_codes())
