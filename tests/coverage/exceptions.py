"""What the rules that shrink configs and choose inputs get wrong, model type by model type."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {}
CLASSES: dict[str, str] = {}
