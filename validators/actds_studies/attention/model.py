"""The model that a dataset was made with, as far as its attention follows from its folder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds_validators.sections import recorded
from actds_writers.capture.hooks import n_heads_of
from actds_writers.capture.scheme import Scheme, full_config, sinks_of
from actds_writers.model_folder import file_sha256, find_model, model_config, weights_sha256


class Model:
    """The folder of the model that a dataset was made with.

    Args:
        folder: or ``org/name`` of the local hub cache; None takes the name in the run record.

    Raises:
        ActdsError: E005 no such folder; E014 another model than that of the dataset.
    """

    def __init__(self, dataset: Dataset, folder: str | Path | None) -> None:
        self._dataset = dataset
        names = recorded(dataset.catalog, "model.name")
        if folder is None and len(names) != 1:
            got = f"{len(names)} models in the run records"
            raise ActdsError("E014", "model", got=got, expected="model, the folder of one")
        try:
            self.folder = find_model(names[0] if folder is None else folder)
            self.config = full_config(model_config(self.folder), self.folder)
        except ActdsError as error:
            if folder is not None:
                raise
            raise ActdsError(
                "E005",
                error.place,
                got=error.got,
                expected="the folder of the model, for the scale and the reach of its attention",
                next_step="Name it: model=FOLDER, or org/name of the local hub cache.",
            ) from None
        self.is_checked = self._check("config", file_sha256(self.folder / "config.json"))

    def _check(self, what: str, sha256: str | None) -> bool:
        """Return whether the dataset says which it is; E014 where it is another."""
        digests = recorded(self._dataset.catalog, f"model.{what}_sha256")
        if digests and digests != (sha256,):
            raise ActdsError(
                "E014",
                f"model {self.folder}",
                got=f"another {what} than that of the rows ({(sha256 or 'none')[:16]})",
                expected=f"{', '.join(digest[:16] for digest in digests)}, by the run record",
            )
        return bool(digests)

    def scheme(self, layer: int) -> Scheme:
        """Return how a layer attends; E014 where its hooks' widths do not fit the heads."""
        hooks = self._dataset.hooks
        q, k = (hooks[f"{kind}.{layer}"].d_model for kind in "qk")
        sinks = sinks_of(self.folder, layer, n_heads_of(self.config))
        if sinks is not None:
            self._check("weights", self._weights_sha256)
        try:
            return Scheme.of(self.config, layer, q, k, sinks)
        except ValueError as error:
            expected = f"those of {n_heads_of(self.config)} heads, as {self.folder} has"
            place = f"layer {layer}"
            raise ActdsError("E014", place, got=str(error), expected=expected) from None

    @cached_property
    def _weights_sha256(self) -> str | None:
        return weights_sha256(self.folder)
