from __future__ import annotations

import pickle

from locater.errors import MissingExtraError, unforeseen, unknown


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    said = str(unknown("process", "wlak", ("walk", "iid")))
    assert said == "unknown process 'wlak'.\nhint: did you mean walk? choose one of: walk, iid."
    said = str(unknown("process", "none", ("walk", "iid")))
    assert said == "unknown process 'none'.\nhint: choose one of: walk, iid."


def test_a_missing_package_is_told_by_workers_too() -> None:
    """What a process raises is pickled, and an error that cannot be is a death without a reason."""
    again = pickle.loads(pickle.dumps(MissingExtraError("ray", extra="cluster")))  # noqa: S301
    assert str(again) == "ray is not installed.\nhint: run: pip install 'locater[cluster]'"


def test_the_smallest_extra_that_holds_a_package_is_named() -> None:
    names = {"altair": "report", "vl_convert": "report", "accelerate": "lab", "peft": "hf"}
    for name, extra in names.items():
        error = unforeseen(ModuleNotFoundError("no", name=f"{name}.part"))
        assert f"locater[{extra}]" in str(error)
