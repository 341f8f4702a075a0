"""Which families are put to the test: every model type, and settings of some that change attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VARIANTS: dict[str, tuple[str, Mapping[str, Any], str]] = {}
"""A family's name: its model type, what its config sets, its class where that is another."""


def families() -> list[str]:
    """Every family to put to the test."""
    from tests.coverage.tiny import model_types

    return [*model_types(), *VARIANTS]
