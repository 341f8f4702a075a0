"""PyTorch's own files: pickles of which only tensors and plain values are let in.

A pickle can run any program. `weights_only` loading refuses what is not data before it runs.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.checkpoints.source import status
from locater.errors import LocaterError

ZIP = b"PK\x03\x04"
PICKLES = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
_STATES = ("state_dict", "model_state_dict", "model", "module", "net", "params", "weights")
_CONFIGS = ("model_args", "config", "hyper_parameters", "args")
_ASKED = re.compile(r"WeightsUnpickler error:\s*([^\n]+?)\.?(?: Please use|\n|$)")  # torch's reason
_WHOLE = "a pickle of the kind that PyTorch wrote before 1.6, which can only be read whole"


class PytorchFile:
    """The state dict in a `.bin`, `.pt` or `.pth` file, mapped while it is read and then let go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_read = 0
        self._state: Mapping[str, Tensor] | None = None
        if path.suffix == ".safetensors":
            raise LocaterError(
                f"{path} is named .safetensors, but it is a pickle of PyTorch.",
                hint="whoever named it may want it to be taken for something safer; if you trust "
                "where it comes from, rename it to .bin.",
            )
        with path.open("rb") as file:
            self._mapped = file.read(4) == ZIP
        if self._mapped:
            self._check_stored()
        found = self._load(map_location="meta")
        state, self.config = state_of(found, str(path))
        self.caveats: tuple[str, ...] = () if self._mapped else (f"{path.name} is {_WHOLE}",)
        self._sizes = {
            name: tensor.numel() * tensor.element_size() for name, tensor in state.items()
        }
        room = status(path).st_size
        for name, size in self._sizes.items():  # strides of zero make much out of little
            if size > room:
                raise LocaterError(
                    f"{path} claims {size:,} bytes for {name!r:.60}, and has {room:,} in all.",
                    hint="it is damaged or made to fill memory: do not trust it.",
                )
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(tensor.shape) for name, tensor in state.items()
        }

    def _check_stored(self) -> None:
        """Refuse a zip whose parts are compressed: mapped, they would be read as weights."""
        try:
            with zipfile.ZipFile(self._path) as archive:
                parts = archive.infolist()
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
            raise self._damaged(error) from error
        packed = [part.filename for part in parts if part.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise LocaterError(
                f"{self._path} is compressed ({packed[0]!r:.60}); PyTorch stores its parts as "
                "they are.",
                hint="write it again where you trust it: torch.save(torch.load(path, "
                "weights_only=True), path).",
            )

    def _load(self, **options: Any) -> Any:
        """Load without running code, or say what to do instead."""
        try:
            with warnings.catch_warnings():  # of protocols that it may not know: then it raises
                warnings.filterwarnings("ignore", "Detected pickle protocol")
                return torch.load(self._path, weights_only=True, **options)  # noqa: TID251
        except pickle.UnpicklingError as error:
            asked = _ASKED.search(str(error))
            raise self._refused(asked[1] if asked else "it is not a state dict") from error
        except RuntimeError as error:
            if "TorchScript" in str(error):
                raise self._refused("it is a TorchScript program") from error
            raise self._damaged(error) from error
        except (
            OSError, ValueError, EOFError, LookupError, TypeError, AttributeError, ArithmeticError,
            MemoryError, AssertionError, RecursionError, zipfile.BadZipFile,
        ) as error:  # fmt: skip
            raise self._damaged(error) from error

    def _refused(self, why: str) -> LocaterError:
        return LocaterError(
            f"{self._path} is refused, for reading it may run code that it holds: {why[:300]}.",
            hint="load it where you trust it, convert it with safetensors.torch.save_file("
            "model.state_dict(), 'model.safetensors'), and give that.",
        )

    def _damaged(self, error: Exception) -> LocaterError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return LocaterError(
            f"{self._path} is damaged or not a PyTorch file: {reason[:200]}",
            hint="download or copy it again.",
        )

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copy these tensors out of the file."""
        state = self._state
        if state is None:
            options = {"mmap": True} if self._mapped else {}
            state, _ = state_of(self._load(map_location="cpu", **options), str(self._path))
            if not self._mapped:
                self._state = state
        found = {}
        for name in names:
            found[name] = state[name].detach().clone(memory_format=torch.contiguous_format)
            self.bytes_read += self._sizes[name]
        return found

    def close(self) -> None:
        """Let go of what was read."""
        self._state = None


def state_of(found: Any, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a loaded file, and what it says of the model, where training scripts put them.

    >>> state_of({"model": {"weight": torch.zeros(2)}, "model_args": {"n_head": 4}}, "ckpt.pt")
    ({'weight': tensor([0., 0.])}, {'n_head': 4})
    """
    if not isinstance(found, Mapping):
        raise LocaterError(
            f"{name} holds a {type(found).__name__}, not a state dict.",
            hint="save model.state_dict() and give that.",
        )
    places = [found, *(found[key] for key in _STATES if isinstance(found.get(key), Mapping))]
    for place in places:
        state = {str(key): value for key, value in place.items() if isinstance(value, Tensor)}
        if state:
            break
    else:
        seen = ", ".join(map(str, list(found)[:8]))
        raise LocaterError(
            f"{name} holds no tensors where a state dict has them; it holds {seen or 'nothing'}.",
            hint="save model.state_dict() and give that.",
        )
    configs = [found[key] for key in _CONFIGS if isinstance(found.get(key), Mapping)]
    return state, {str(key): value for config in configs[:1] for key, value in config.items()}
