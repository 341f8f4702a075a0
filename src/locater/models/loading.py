"""A model with its tokenizer from a folder, a GGUF file or the hub, and a text in blocks."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn

from locater.errors import ConfigError, InputError, LocaterError, check_choice, needing
from locater.files import packaged

Dtype = Literal["float32", "bfloat16", "float16"]
_HEAD = re.compile(r"(?:^|\.)(?:pooler|head|lm_head|contact_head|classifier|cls|score)(?:\.|$)")
"""Weights on top of the layers, which many checkpoints do without."""
_WORDS = "put tokenizer.json, or the files of its vocabulary, beside config.json."
PATIENCE = 15.0
"""Seconds between two words to somebody who waits."""


def load_model(
    source: str | Path,
    *,
    device: str = "cpu",
    dtype: Dtype = "float32",
    head: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[nn.Module, Any]:
    """A model without its head, and its tokenizer; needs the extra `hf`.

    `source` is a local folder, a GGUF file, an id of the Hugging Face hub or `demo`, a small model
    that comes with this package; `say` hears where somebody has to wait.
    With its `head` it predicts the next token.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"there is no device {device!r} here.", hint="cpu, cuda, cuda:1 and mps are devices."
        ) from error
    with needing("transformers", extra="hf"):
        import transformers
    check_choice("dtype", dtype, get_args(Dtype))
    kind = getattr(torch, dtype)
    source = packaged(source)
    path = Path(source).expanduser()
    options: dict[str, Any] = {}
    name = str(path if path.exists() else source)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(
                f"{path} is a file, but no GGUF file.",
                hint="give the folder that holds config.json and the weights, or a .gguf file.",
            )
        name, options = str(path.parent), {"gguf_file": path.name}
    elif not path.exists():
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        if is_path or os.path.lexists(name.split("/")[0]):
            raise InputError(f"there is no {path}.", hint="give a folder, a GGUF file or a hub id.")
        say(f"{name} is not found here; asking the hub")
    talk: Any = transformers.utils.logging
    was_verbose, level = talk.is_progress_bar_enabled(), talk.get_verbosity()
    talk.disable_progress_bar()
    talk.set_verbosity_error()  # a head without weights, or weights without a head, is no news here
    whole = "give a folder with config.json, weights and tokenizer, a .gguf file, or a hub id with "
    try:
        with _patience(name, say), _loading(str(source), hint=f"{whole}network access."):
            auto: Any = transformers.AutoModelForCausalLM if head else transformers.AutoModel
            model, told = auto.from_pretrained(
                name, dtype=kind, output_loading_info=True, trust_remote_code=False, **options
            )
        lost = sorted(one for one in told["missing_keys"] if head or not _HEAD.search(one))
        if lost:
            raise LocaterError(
                f"{source} lacks {len(lost)} of the model's weights ({lost[0]} and the like): they "
                "would be random.",
                hint="is the checkpoint whole, and of the model that its config.json names?",
            )
        with _patience(name, say):
            tokenizer = _tokenizer(name, **options)
    finally:
        talk.set_verbosity(level)
        if was_verbose:
            talk.enable_progress_bar()
    if getattr(model.config, "is_encoder_decoder", False) and not head:
        model = model.get_encoder()  # a text alone feeds the encoder
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model.to(place).eval(), tokenizer


class Bytes:
    """A text's own bytes as tokens, for a model that has no tokenizer yet."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """What a tokenizer answers."""
        return {"input_ids": list(text.encode())}


def model_from_config(source: str | Path) -> Callable[[], nn.Module]:
    """What makes models with new weights from a config.json; needs the extra `hf`."""
    with needing("transformers", extra="hf"):
        import transformers
    auto: Any = transformers.AutoModelForCausalLM
    with _loading(str(source), hint="give a config.json of a model that predicts the next token."):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        config.use_cache = False
        return partial(auto.from_config, config, trust_remote_code=False)


def tokenizer_beside(config: Path) -> Any | None:
    """The tokenizer in a config's folder, if there is one; needs the extra `hf`."""
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((config.parent / file).exists() for file in files):
        return None
    return _tokenizer(str(config.parent))


def _tokenizer(source: str, **options: Any) -> Any:
    """A tokenizer that knows words: of config.json alone transformers makes an empty one."""
    with needing("transformers", extra="hf"):
        import transformers
    with _loading(f"the tokenizer of {source}", hint=_WORDS):
        auto: Any = transformers.AutoTokenizer
        tokenizer = auto.from_pretrained(source, trust_remote_code=False, **options)
        words = len(tokenizer) - len(tokenizer.all_special_tokens)
    if words < 2:  # a word boundary or a full stop may be left
        raise LocaterError(
            f"the tokenizer of {source} has no words but its special tokens.", hint=_WORDS
        )
    return tokenizer


@contextmanager
def _loading(what: str, *, hint: str) -> Iterator[None]:
    """Around transformers: whatever a file or a server makes it raise, in one sentence."""
    try:
        yield
    except Exception as error:
        if os.environ.get("LOCATER_TRACEBACK"):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if "trust_remote_code" in str(error):
            hint = "a model's own code is never run here; load it yourself, and give it to Probe."
        said = f"transformers cannot load {what}: {lines[0]:.300}"
        raise LocaterError(said, hint=hint) from error


@contextmanager
def _patience(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Speak now and then while the work goes on."""
    is_over, began = threading.Event(), time.monotonic()

    def talk() -> None:
        while not is_over.wait(PATIENCE):
            say(f"still waiting for {name}, {time.monotonic() - began:.0f} s so far")

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def read_text(path: str | Path) -> str:
    """A text file in UTF-8, or an error that says what to give."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no UTF-8 text'}.",
            hint="give a plain text file, some hundred kilobytes long.",
        ) from error


def text_blocks(
    tokenizer: Any, text: str, *, tokens: int, blocks: int, special: bool = False
) -> Int[Tensor, "blocks tokens"]:
    """Blocks of a text that do not overlap, evenly spread over it, in its order.

    They hold the text's own tokens alone; `special` puts the model's opening token ([CLS], or its
    beginning of a sequence) in front of each.  No closing token follows: the last token is the
    query, and a token that never changes has nothing to ask.
    """
    if tokens < 4 or blocks < 2:
        raise ConfigError(
            f"cannot make {blocks} blocks of {tokens} tokens.",
            hint="give at least 2 blocks, better a thousand, of 4 tokens or more.",
        )
    openings = [getattr(tokenizer, name, None) for name in ("cls_token_id", "bos_token_id")]
    before = [token for token in openings if token is not None][:1] if special else []
    found = list(_pieces(tokenizer, text, tokens - len(before), blocks))
    if len(found) < 2:
        raise InputError(
            f"the text holds {len(found)} blocks of {tokens} tokens.",
            hint="give a longer text or fewer tokens; a thousand blocks are a good number.",
        )
    return torch.tensor([before + piece for piece in found])


def _pieces(tokenizer: Any, text: str, wanted: int, blocks: int) -> Iterator[list[int]]:
    size = len(text) // blocks
    if size < 16 * wanted:  # too short to jump through: cut the whole
        ids = [token for start in _lines(text) for token in _encode(tokenizer, start)]
        whole = len(ids) // wanted
        places = torch.linspace(0, whole - 1, min(blocks, whole)).round().long().tolist()
        yield from (ids[place * wanted : (place + 1) * wanted] for place in places)
        return
    for block in range(blocks):
        piece = text[block * size : (block + 1) * size]
        start = piece.find(" ") + 1
        ids = _encode(tokenizer, piece[start : start + 16 * wanted])
        if len(ids) <= wanted:
            ids = _encode(tokenizer, piece[start:])
        if len(ids) > wanted:  # the last token of a piece may be cut
            yield ids[:wanted]


def _lines(text: str, size: int = 1 << 18) -> Iterator[str]:
    """A text in parts that end at a space."""
    start = 0
    while start < len(text):
        stop = text.find(" ", start + size)
        stop = len(text) if stop < 0 else stop
        yield text[start:stop]
        start = stop


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
