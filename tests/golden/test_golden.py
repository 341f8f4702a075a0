"""Outputs of commands and public names are what they were before the code was moved."""

import json

import pytest
from tests.golden.make import DATA, ITEMS, check, differences, packed


@pytest.mark.parametrize("name", ITEMS)
def test_output_is_what_it_was(name: str) -> None:
    assert check(name) == []


def test_every_stored_output_is_compared() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == set(ITEMS)
    assert sum(path.stat().st_size for path in DATA.glob("*.json")) < 500_000


def test_the_last_bit_counts_unless_a_tolerance_is_given() -> None:
    stored = packed({"short": [0.1, 0.2], "long": [k / 7 for k in range(100)]})
    for place in ("short", "long"):
        found = json.loads(json.dumps(stored))
        if place == "short":
            found["short"][1] += 2**-54
        else:
            found["long"] = packed([k / 7 + (k == 50) * 2**-50 for k in range(100)])
        assert len(differences(stored, found, 0.0)) >= 1
        assert differences(stored, found, 1e-12) == []
        assert differences(stored, {**found, "short": [0.1]}, 1e-12) != []
    assert differences([0.1], [0.1 + 1e-11], 1e-12) != []
