"""What compiled models and functions compute and send; ``make compile-matrix`` tries many more."""

from __future__ import annotations

from .functions import OF_A_NUMBER
from .trial import Case, try_cases

MODELS = (
    ("conv1d", "uneven", "backward"),
    ("attend", "even", "forward"),
    ("amax", "even", "backward"),
    ("twice", "empty", "backward"),
    ("mlp_rows", "empty", "recomputing"),
    ("norm", "even", "budget"),
)


def test_compiled_models_send_and_compute_as_others_do() -> None:
    cases = [Case(*case, "aot_eager") for case in MODELS]
    assert [outcome for outcome in try_cases(cases, 2) if outcome.told] == []


def test_compiled_functions_of_numbers_work_for_every_number() -> None:
    cases = [Case(name, "uneven", "forward", "aot_eager") for name in OF_A_NUMBER]
    assert [outcome for outcome in try_cases(cases, 2) if outcome.told] == []
