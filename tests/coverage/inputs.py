"""What to feed a model: tensors by the names of its forward arguments, several guesses for each."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tests.coverage.shrink import SPECIAL
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

BATCH = 2
TOKENS = 12
FRAMES = 4
WAVE = 3200


def setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these settings that a config or one of its parts has."""
    import transformers

    values = vars(config)
    for name in (*names, *(config.attribute_map.get(name, "") for name in names)):
        if values.get(name) is not None:
            return values[name]
    for value in values.values():
        if isinstance(value, transformers.PreTrainedConfig):
            found = setting(value, *names)
            if found is not None:
                return found
    return default


def normal(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(tokens: int = TOKENS, seed: int = 1, top: int = SPECIAL - 2) -> Tensor:
    return torch.randint(3, top, (BATCH, tokens), generator=torch.Generator().manual_seed(seed))


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, (list, tuple)):
        first, last = (value[-2], value[-1]) if len(value) > 1 else (value[0], value[0])
        return int(_one(first)), int(_one(last))
    return int(value), int(value)


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) else value


def _picture(config: Any) -> tuple[int, int, int]:
    channels = _one(setting(config, "num_channels", "in_channels", "in_chans", default=3))
    size = setting(config, "image_size", "img_size", "resolution", default=64)
    return (int(channels), *_pair(size))


def pictures(config: Any) -> Iterator[Tensor]:
    picture = _picture(config)
    frames = setting(config, "num_frames", "frames_per_clip")
    if isinstance(frames, int):
        yield normal(BATCH, frames, *picture)
    yield normal(BATCH, *picture)
    yield normal(BATCH, 1, *picture)
    yield normal(BATCH, picture[0], 64, 64)


def patches(config: Any) -> Tensor:
    """The pictures of a batch in patches, one after the other, as Qwen's encoders take them."""
    size = _pair(setting(config, "patch_size", default=8))[0]
    times = _pair(setting(config, "temporal_patch_size", default=1))[0]
    channels = setting(config, "in_channels", "num_channels", "in_chans", default=3)
    return normal(int(GRID.prod(1).sum()), channels * times * size**2)


GRID = torch.tensor([[1, 4, 4], [1, 4, 8]])
"""Time, height and width of two pictures, in patches."""


def features(config: Any) -> Iterator[Tensor]:
    bins = setting(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "mel_bins",
                   "n_mel_bins", "input_feat_size", "feature_projection_input_dim", "input_dim",
                   default=80)  # fmt: skip
    length = setting(config, "max_source_positions", default=0)
    if length:
        yield normal(BATCH, bins, 2 * length)
    yield normal(BATCH, 64, bins)
    yield normal(BATCH, bins, 64)
    yield normal(BATCH, 1, 64, bins)
    yield normal(BATCH, WAVE)


def _width(config: Any) -> int:
    return _one(setting(config, "hidden_size", "d_model", "embed_dim", "n_embd", default=32))


def hidden(config: Any) -> Iterator[Tensor]:
    if setting(config, "patch_size") and setting(config, "temporal_patch_size"):
        yield patches(config)
    yield normal(BATCH, TOKENS, _width(config))
    yield normal(TOKENS, _width(config))


Maker = Callable[[Any], Any]

MAKERS: dict[str, Maker] = {
    "input_ids": lambda config: [ids()],
    "decoder_input_ids": lambda config: [ids(9, seed=3)],
    "text_input_ids": lambda config: [ids()],
    "pixel_values": lambda config: pictures(config),
    "pixel_values_videos": lambda config: [normal(BATCH, FRAMES, *_picture(config))],
    "input_features": lambda config: features(config),
    "audio_features": lambda config: features(config),
    "input_values": lambda config: [normal(BATCH, WAVE), normal(BATCH, 1, WAVE), *features(config)],
    "audio_values": lambda config: [normal(BATCH, 1, WAVE)],
    "inputs_embeds": lambda config: [normal(BATCH, TOKENS, _width(config))],
    "hidden_states": lambda config: hidden(config),
    "encoder_hidden_states": lambda config: [normal(BATCH, 7, _width(config))],
    "query_embeds": lambda config: [normal(BATCH, 6, _width(config))],
    "grid_thw": lambda config: [GRID],
    "image_grid_thw": lambda config: [GRID],
    "bbox": lambda config: [torch.arange(4).expand(BATCH, TOKENS, 4).clone() * 3],
    "attention_mask": lambda config: [torch.ones(BATCH, TOKENS, dtype=torch.long)],
    "position_ids": lambda config: [torch.arange(TOKENS).expand(BATCH, TOKENS)],
    "pixel_attention_mask": lambda config: [torch.ones(BATCH, 16, dtype=torch.long)],
    "spatial_shapes": lambda config: [torch.tensor([[4, 4]] * BATCH)],
    "input_features_mask": lambda config: [torch.ones(BATCH, 64, dtype=torch.long)],
    "labels": lambda config: [ids(9, seed=3)],
}  # fmt: skip
MAIN = ("input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids")


def guesses(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """Arguments that a model may take, the fullest first."""
    known = inspect.signature(model.forward).parameters
    required = [
        name
        for name, one in known.items()
        if one.default is inspect.Parameter.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    if any(name not in MAKERS for name in required):
        return
    main = [name for name in MAIN if name in known]
    makers = dict(MAKERS)
    if known.keys() & {"grid_thw", "image_grid_thw", "spatial_shapes"}:
        makers["pixel_values"] = lambda config: [patches(config), *pictures(config)]
    off = {name: False for name in ("use_cache",) if name in known}
    subsets = [main, *([name] for name in main if name != "decoder_input_ids")]
    if "decoder_input_ids" in main:
        subsets += [[name, "decoder_input_ids"] for name in main if name != "decoder_input_ids"]
    tried: list[set[str]] = []
    for subset in subsets:
        names = list(dict.fromkeys([*required, *subset]))
        if set(names) in tried:
            continue
        tried.append(set(names))
        for values in itertools.product(*(list(makers[name](config)) for name in names)):
            yield dict(zip(names, values, strict=True)) | off


def cast(given: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Floating inputs in the model's own precision."""
    return tree_map_only(
        Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, dict(given)
    )
