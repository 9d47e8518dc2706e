"""Where the stream is in what a decoder layer returns: said, never guessed from a shape."""

from __future__ import annotations

import pytest
import torch

from actds.errors import ActdsError
from actds_writers.capture.taps import StreamForm, residual_stream

HIDDEN, RESIDUAL = torch.ones(3, 4), 2 * torch.ones(3, 4)


def stream(output: object, form: StreamForm) -> torch.Tensor:
    hidden, residual = residual_stream(output, form, "Model layer 0")
    return hidden if residual is None else hidden + residual


@pytest.mark.parametrize(
    ("form", "value"),
    [("sum", 3.0), ("first", 1.0), ("unverified", 3.0)],
)
def test_a_pair_is_what_the_form_says(form: StreamForm, value: float) -> None:
    assert (stream((HIDDEN, RESIDUAL), form) == value).all()


@pytest.mark.parametrize("form", ["first", "unverified"])
def test_one_tensor_is_the_stream(form: StreamForm) -> None:
    assert (stream(HIDDEN, form) == 1).all()


def test_rows_of_a_padded_batch_are_laid_flat() -> None:
    assert stream(torch.ones(2, 3, 4), "first").shape == (6, 4)


@pytest.mark.parametrize(
    ("output", "form"),
    [
        (HIDDEN, "sum"),
        ((HIDDEN, None), "sum"),
        ((HIDDEN, torch.ones(3, 5)), "sum"),
        ((HIDDEN, RESIDUAL, RESIDUAL), "unverified"),
        ((HIDDEN, torch.ones(3, 5)), "unverified"),
        ((HIDDEN,), "unverified"),
        ({"hidden": HIDDEN}, "first"),
        (None, "unverified"),
    ],
)
def test_what_does_not_have_the_form_is_refused(output: object, form: StreamForm) -> None:
    with pytest.raises(ActdsError, match="E007 Model layer 0: a decoder layer that returns"):
        residual_stream(output, form, "Model layer 0")


def test_a_verified_sum_may_have_more_beside_it() -> None:
    assert (stream((HIDDEN, RESIDUAL, "cache"), "sum") == 3).all()
