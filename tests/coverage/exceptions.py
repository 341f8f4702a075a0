"""What the rules that shrink configs and choose inputs get wrong, model type by model type."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {}
CLASSES: dict[str, str] = {}
INPUTS: dict[Any, Any] = {}
"""What to feed a model type, or one of its classes: a function of the config that yields inputs."""
