"""What the caller's rows are, and whether a dictionary says that it is for others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actds_validators.dictionaries.places import layers_of, same_model, same_place
from actds_validators.dictionaries.refusal import refused

HookFrom = Literal["file", "path", "caller"]


@dataclass(frozen=True)
class Wanted:
    """The rows that a dictionary is wanted for; None for what the caller does not say.

    Args:
        model: name of the model, or the path of its folder.
    """

    hook: str | None = None
    d_model: int | None = None
    model: str | None = None

    def refuse_other_model(self, place: object, model: str | None) -> None:
        """Refuse a dictionary of another model, where both are named.

        Raises:
            ActdsError: E015.
        """
        if self.model is None or model is None or same_model(self.model, model):
            return
        next_step = "Give a dictionary of this model: directions of another mean nothing here."
        raise refused(place, f"a dictionary of {model}", self.model, next_step)

    def refuse_other_width(self, place: object, d_model: int) -> None:
        """Refuse a dictionary of another width.

        Raises:
            ActdsError: E015.
        """
        if self.d_model is not None and d_model != self.d_model:
            expected = f"{self.d_model:,}{f', as {self.hook} has' if self.hook else ''}"
            raise refused(place, f"a dictionary of {d_model:,} channels", expected)

    def hook_of(
        self, place: object, called: str | None, places: tuple[str, ...], said_by: HookFrom
    ) -> tuple[str | None, HookFrom | None]:
        """Return the hook of a dictionary, and who says so.

        Args:
            called: what the dictionary calls its hook; None where it says nothing.
            places: hooks that this may be, the usual one first.
            said_by: where it is called so.

        Raises:
            ActdsError: E015 it is another one, or one that cannot be known to be the caller's.
        """
        if called is None:
            return self.hook, None if self.hook is None else "caller"
        if self.hook is None:
            return (places[0], said_by) if places else (None, None)
        if any(same_place(self.hook, one) for one in places):
            return self.hook, said_by
        got = f"a dictionary of {called}"
        if places and places[0] != called:
            got += f", which is {' or '.join(places)}"
        raise refused(place, got, self.hook)

    def refuse_other_layer(self, place: object, layer: int | None) -> None:
        """Refuse a dictionary of another layer, where its kind of hook is not known.

        Raises:
            ActdsError: E015.
        """
        if self.hook is not None and layer is not None and layer not in layers_of(self.hook):
            raise refused(place, f"a dictionary of layer {layer}", self.hook)
