from __future__ import annotations

from locater.errors import unknown


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    error = unknown("process", "wlak", ("walk", "iid"))
    assert str(error) == "unknown process 'wlak'.\nhint: choose one of: walk, iid."
