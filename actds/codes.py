"""The stable error codes: what each means, what to do about it, and which class raises it.

A new code is a new entry here; a code that was used before is never used again.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CODES", "Code"]

_OF_FAMILY: dict[str, str] = {
    "usage": "InvalidInputError",
    "structure": "InvalidDatasetError",
    "integrity": "InvalidDatasetError",
    "ledger": "InvalidDatasetError",
    "provenance": "NoProvenanceError",
    "accounting": "InvalidDatasetError",
    "writer": "EngineError",
    "values": "InvalidDatasetError",
    "internal": "InternalError",
}


@dataclass(frozen=True)
class Code:
    """One stable code.

    Args:
        family: ``usage``, ``structure``, ``integrity``, ``ledger``, ``provenance``,
            ``accounting``, ``writer``, ``values`` or ``internal``.
        title: the code in a few words.
        meaning: what it says about the input.
        next_step: what to do about it.
        clause: the section of spec 0.1 that it follows from.
        error: the class of ``actds.errors`` that it raises; by default that of its family.
    """

    family: str
    title: str
    meaning: str
    next_step: str
    clause: str
    error: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", self.error or _OF_FAMILY[self.family])

    @property
    def exit_code(self) -> int:
        """Return the process exit code when a command ends with this code."""
        return {"usage": 2, "internal": 4, "writer": 4}.get(self.family, 3)


CODES: dict[str, Code] = {
    "E001": Code(
        "usage",
        "prompts not readable",
        "The prompts source does not exist, or its type is not supported.",
        "Name a JSONL, Parquet or text file, or hf:FOLDER.",
        "12.1",
        "NotFoundError",
    ),
    "E002": Code(
        "usage",
        "broken prompt",
        "A prompt record cannot be read as a prompt.",
        "Fix the named line; each record needs a `prompt` string or a `messages` list.",
        "12.1",
    ),
    "E003": Code(
        "usage",
        "no prompts",
        "The prompts source holds no prompt.",
        "Give a source with at least one record.",
        "12.1",
    ),
    "E004": Code(
        "usage",
        "prompt too long",
        "A prompt leaves no room in the model's context for a generated token; it is skipped.",
        "Shorten it, or raise max_model_len with --engine-arg max_model_len=N.",
        "12.1",
    ),
    "E005": Code(
        "usage",
        "model not found",
        "The model path is not a readable model folder.",
        "Give the path of a folder with config.json, weights and tokenizer.",
        "12.1",
        "NotFoundError",
    ),
    "E006": Code(
        "usage",
        "nothing to harvest",
        "No prompt can be sent to the engine.",
        "See the skipped prompts in the report; give prompts that fit the model.",
        "12.1",
    ),
    "E007": Code(
        "usage",
        "unknown hook",
        "The model has no such hook.",
        "Use KIND:LAYER,... with layers of the named range, for example resid_post:10,20.",
        "12.1",
    ),
    "E008": Code(
        "usage",
        "OUT exists",
        "The output path exists already.",
        "Choose a new path, or continue with --resume.",
        "12.1",
        "ExistsError",
    ),
    "E009": Code(
        "usage",
        "bad option",
        "An option has a value that cannot be used.",
        "Correct the named option.",
        "12.1",
    ),
    "E010": Code(
        "usage",
        "cannot resume",
        "The dataset was written with another model, hooks or precision than this command has.",
        "Resume with the model, hooks and precision of the dataset, or write a new one.",
        "12.1",
    ),
    "E011": Code(
        "usage",
        "missing dependency",
        "An optional package is not installed.",
        "Install the named extra.",
        "12.1",
        "MissingDependencyError",
    ),
    "E012": Code(
        "usage",
        "unsupported engine configuration",
        "Capture does not support this engine configuration.",
        "Remove the named engine option.",
        "12.1",
    ),
    "E013": Code(
        "usage",
        "unknown code",
        "There is no such code.",
        "List the codes with actds explain.",
        "12.1",
    ),
    "E014": Code(
        "usage",
        "bad selection",
        "A loader argument selects nothing or names something the dataset lacks.",
        "Correct the argument; actds info shows hooks and phases.",
        "12.1",
    ),
    "E015": Code(
        "usage",
        "bad probes",
        "The probes file does not fit the hooks.",
        "Give a .safetensors or .npy file with (n_probes, d_model) float values per hook.",
        "12.1",
    ),
    "E016": Code(
        "usage",
        "store without create-only puts",
        "The store overwrites a file that it was asked to create.",
        "Use a store that honours If-None-Match on puts, or a local disk.",
        "8.1",
        "StoreError",
    ),
    "E017": Code(
        "usage",
        "bad capture configuration",
        "The capture settings of a live engine cannot be used.",
        "Correct the named key of --additional-config; see docs/live.md.",
        "12.1",
    ),
    "E018": Code(
        "usage",
        "bad weights",
        "The weights file belongs to another dataset, or does not have one weight per stored row.",
        "Write it again from the dataset as it is now: actds audit --weights FILE.",
        "10.4",
    ),
    "E019": Code(
        "usage",
        "bad foreign set",
        "A set to import is truncated, mixes widths or types, or has a form that is not known.",
        "Make the named file anew; docs/exchange.md says which forms can be imported.",
        "12.1",
    ),
    "E101": Code(
        "structure",
        "not a dataset",
        "The path holds no actds.json.",
        "Give the folder that holds actds.json.",
        "2",
        "NotFoundError",
    ),
    "E102": Code(
        "structure",
        "malformed document",
        "A JSON document is not canonical JSON within the limits.",
        "Do not edit documents by hand; restore the file or write the dataset again.",
        "2",
    ),
    "E103": Code(
        "structure",
        "schema violation",
        "A document lacks a field, has an unknown one, or a value out of range.",
        "Restore the file, or write the dataset again with a conforming writer.",
        "2",
    ),
    "E104": Code(
        "structure",
        "file missing",
        "A file that the ledger refers to is missing.",
        "Restore it from a copy; without it the dataset is incomplete.",
        "2",
    ),
    "E105": Code(
        "structure",
        "unreachable file",
        "The ledger does not refer to this file.",
        "It is not part of the dataset: delete it, or move it elsewhere.",
        "2",
    ),
    "E106": Code(
        "structure",
        "unsupported version",
        "The dataset has a format version that this reader does not know.",
        "Upgrade actds.",
        "2",
    ),
    "E107": Code(
        "structure",
        "bad path",
        "A path segment breaks the naming rule or leaves the dataset.",
        "Do not open the dataset; its writer is broken or hostile.",
        "2",
    ),
    "E108": Code(
        "structure",
        "array metadata",
        "An array's metadata differs from the fixed form of the spec.",
        "Write the shard again with a conforming writer.",
        "2",
    ),
    "E109": Code(
        "structure",
        "table schema",
        "A table's columns differ from the spec.",
        "Write the table again with a conforming writer.",
        "2",
    ),
    "E201": Code(
        "integrity",
        "size differs",
        "A file's size differs from its manifest.",
        "Restore the file from a copy; it was cut or changed.",
        "2.3",
    ),
    "E202": Code(
        "integrity",
        "digest differs",
        "A file's SHA-256 differs from its manifest.",
        "Restore the file from a copy; it was changed after the commit.",
        "2.3",
    ),
    "E203": Code(
        "integrity",
        "row counts differ",
        "Arrays, token table and manifest of a shard disagree on the number of rows.",
        "Write the shard again: actds write --resume.",
        "2.3",
    ),
    "E204": Code(
        "integrity",
        "damaged chunk",
        "A chunk cannot be decoded, or its checksum differs.",
        "Restore the file from a copy.",
        "2.3",
    ),
    "E205": Code(
        "integrity",
        "root differs",
        "A Merkle root is not that of the entries beside it.",
        "Restore the manifest from a copy.",
        "2.3",
    ),
    "E206": Code(
        "integrity",
        "unreadable table",
        "A Parquet file cannot be read, fails its page checksum, or carries an Arrow schema.",
        "Restore the file from a copy.",
        "2.3",
    ),
    "E301": Code(
        "ledger",
        "gap in a chain",
        "A chain lacks a record, or a record has the wrong number.",
        "Restore the record; committed data may be missing.",
        "8",
    ),
    "E302": Code(
        "ledger",
        "chain broken",
        "A record's `prev` is not the digest of the record before it.",
        "The history was changed: restore the chain from a copy.",
        "8",
    ),
    "E303": Code(
        "ledger",
        "foreign record",
        "A record names another dataset, chain or number than its place.",
        "Remove what was copied in, or restore the chain.",
        "8",
    ),
    "E304": Code(
        "ledger",
        "record after the end",
        "A chain continues after its close or fence.",
        "A writer continued after it was ended; do not use what it added.",
        "8",
    ),
    "E305": Code(
        "ledger",
        "open chain",
        "A chain is neither closed nor fenced.",
        "Wait for its writer, or end it with actds recover.",
        "8",
        "NotSealedError",
    ),
    "E306": Code(
        "ledger",
        "not sealed",
        "The dataset has no seal for its current ledger.",
        "Finish it with actds write --resume, or seal it with actds seal.",
        "8",
        "NotSealedError",
    ),
    "E307": Code(
        "ledger",
        "seal differs",
        "The seal's heads, totals or root differ from the ledger.",
        "Restore the seal and the ledger from a copy.",
        "8",
    ),
    "E308": Code(
        "ledger",
        "fenced",
        "A writer tried to commit to a chain that another process has ended.",
        "Start a new run; the fence worked as intended.",
        "8",
        "BusyError",
    ),
    "E309": Code(
        "ledger",
        "document exists",
        "A document that may be written only once exists already.",
        "Two writers used one name; start a new run.",
        "8",
        "StoreError",
    ),
    "E310": Code(
        "ledger",
        "shard committed twice",
        "Two ledger records commit the same shard or part.",
        "Restore the ledger from a copy.",
        "8",
    ),
    "E311": Code(
        "ledger",
        "replacement does not fit",
        "A record replaces a shard that is not committed, is replaced already, or has other rows.",
        "Restore the ledger from a copy.",
        "8.5",
    ),
    "E312": Code(
        "ledger",
        "broken journal",
        "The journal of a census lacks a segment, or one is not the next of its chain.",
        "Restore the segment from a copy; its rows stay readable, the run cannot be sealed.",
        "8.6",
    ),
    "E401": Code(
        "provenance",
        "no run record",
        "A shard names a run that has no run record.",
        "The shard has no provenance: do not train on it.",
        "6",
    ),
    "E402": Code(
        "provenance",
        "unexplained field",
        "A provenance field is null without a reason, or has a reason beside a value.",
        "Write the run again with a conforming writer.",
        "6",
        "InvalidDatasetError",
    ),
    "E403": Code(
        "provenance",
        "no census",
        "A run has rows but no census.",
        "The rows cannot be accounted for: do not train on them.",
        "6",
    ),
    "E404": Code(
        "accounting",
        "gap",
        "A position of a request has no disposition.",
        "The census is incomplete; do not use the run.",
        "7",
    ),
    "E405": Code(
        "accounting",
        "overlap",
        "A position of a request has two dispositions.",
        "The census contradicts itself; do not use the run.",
        "7",
    ),
    "E406": Code(
        "accounting",
        "rows differ from the census",
        "The rows of the shards are not the positions that the census calls captured.",
        "A row was lost, added or swapped; do not use the run.",
        "7",
    ),
    "E407": Code(
        "accounting",
        "row twice",
        "The same position of a request has two rows in one run.",
        "Write the run again.",
        "7",
    ),
    "E408": Code(
        "accounting",
        "drops differ",
        "The drop log and the census disagree.",
        "A loss is unexplained; do not use the run.",
        "7",
    ),
    "E409": Code(
        "accounting",
        "scheduled tokens differ",
        "Scheduled tokens are not the sum of what became of them.",
        "Some computed rows are not accounted for; do not use the run.",
        "7",
    ),
    "E410": Code(
        "accounting",
        "unresolved cache hit",
        "A prefix-cache hit refers to a position that has no row.",
        "The reused tokens count as lost; decide whether that matters.",
        "7",
    ),
    "E411": Code(
        "accounting",
        "cached count differs",
        "The prefix-cache hits of the census are not those the engine reported.",
        "The census missed a hit; do not use the run.",
        "7",
    ),
    "E412": Code(
        "accounting",
        "step differs",
        "A step has another number of rows than the census says, or is unknown to it.",
        "Rows were moved between steps; do not use the run.",
        "7",
    ),
    "E413": Code(
        "accounting",
        "multiplicity differs",
        "The multiplicity table does not follow from the prefix-cache hits.",
        "Seal the dataset again with actds seal.",
        "7",
    ),
    "E414": Code(
        "accounting",
        "row labels differ",
        "A row's phase, step or token differs from the census.",
        "The label is wrong; do not use the run.",
        "7",
    ),
    "E415": Code(
        "accounting",
        "totals differ",
        "The totals of a document are not those of its tables.",
        "Restore the document, or seal again.",
        "7",
    ),
    "E416": Code(
        "accounting",
        "readouts incomplete",
        "A computed row has no readout, or a readout names a row that was never computed.",
        "The row set of the readouts is wrong; do not use them.",
        "7.8",
    ),
    "E417": Code(
        "accounting",
        "readout differs from its row",
        "A readout differs from one computed from the stored row, or names another token.",
        "The row and its readout do not belong together; do not use the shard.",
        "7.8",
    ),
    "E418": Code(
        "accounting",
        "row of another request",
        "A canary replay shows that a stored row belongs to another request.",
        "Capture mixes requests up: do not use the run, and report the engine's version.",
        "7.9",
    ),
    "E501": Code(
        "writer",
        "rows differ from the schedule",
        "The rows captured in a step are not those the scheduler scheduled.",
        "Report it with the engine's version; the hook does not run as expected.",
        "9",
    ),
    "E502": Code(
        "writer",
        "writer process ended",
        "The writer process ended before the harvest did.",
        "See its message above; continue with actds write --resume.",
        "9",
    ),
    "E503": Code(
        "writer",
        "storage failed",
        "The disk refused a write, a sync or a close.",
        "Free space or fix the disk, then actds write --resume.",
        "9",
        "StoreError",
    ),
    "E504": Code(
        "writer",
        "engine failed",
        "The engine could not start or stopped.",
        "See the engine's message above.",
        "9",
    ),
    "E505": Code(
        "writer",
        "census process ended",
        "The census process ended before the harvest did.",
        "See its message above; account for the run with actds recover.",
        "9",
    ),
    "E506": Code(
        "writer",
        "no response",
        "A process of the pipeline did not answer in time.",
        "See its log; continue with actds write --resume.",
        "9",
    ),
    "E507": Code(
        "writer",
        "rows are not the model's",
        "Before the first row, a hook's rows of two short prompts differed from the model's own.",
        "Harvest it with --engine transformers, and report model and engine version.",
        "9.1",
    ),
    "E601": Code(
        "values",
        "not finite",
        "A row holds NaN or infinity.",
        "Filter the named rows, and check the model's numerics.",
        "4.4",
    ),
    "E602": Code(
        "values",
        "zero row",
        "A row is zero in every channel.",
        "The hook may not be reached; filter the rows or leave the hook out.",
        "4.4",
    ),
    "E603": Code(
        "values",
        "repeated row",
        "Rows of different tokens are bitwise equal.",
        "Check the lifetime of the capture buffer.",
        "4.4",
    ),
    "E901": Code(
        "internal",
        "internal error",
        "actds failed unexpectedly.",
        "Run it again with --debug and report what it prints.",
        "12.1",
    ),
}
