"""Known texts of the Hugging Face hub, through `datasets`, checked against their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from locater.errors import InputError, LocaterError, MissingExtraError
from locater.paper.lab.corpus import SPLITS


@dataclass(frozen=True, kw_only=True)
class HubText:
    """Where a text lies on the hub, and the SHA-256 of its lines' words."""

    path: str
    config: str | None
    digests: dict[str, str]


HUB = {
    "wikitext-2": HubText(
        path="Salesforce/wikitext",
        config="wikitext-2-v1",
        digests={
            "train": "f7ee69acf5cc3fd2321929d3e32dd6defd8199abe0cb95063b2b9f092584f96f",
            "valid": "4427e8fc24d5ceaaff4f1d9ee42f4e82172572b107d6a4e1f32d84fa7913c3ff",
            "test": "f68796e87c3250872a5a82da5027c4f75494ca617fbad67e36acce8a057ff3e8",
        },
    )
}


def text_digest(lines: Iterable[str]) -> str:
    """SHA-256 of a text whose words are separated by one space and whose lines by one newline."""
    total = hashlib.sha256()
    for line in lines:
        total.update((" ".join(line.split()) + "\n").encode())
    return total.hexdigest()


def hub_text(name: str, *, known: dict[str, HubText] | None = None) -> dict[str, str]:
    """Download a text, or take it from the cache of `datasets`, and check that it is that text."""
    known = HUB if known is None else known
    if name not in known:
        raise InputError(
            f"no text {name!r} is known on the hub.",
            hint=f"use hub:{', hub:'.join(known)}, or download it and give the folder.",
        )
    source = known[name]
    parts = _download(source)
    texts = {}
    for split, theirs in zip(SPLITS, ("train", "validation", "test"), strict=True):
        lines = [line.strip("\n") for line in parts[theirs]["text"]]
        found = text_digest(lines)
        if found != source.digests[split]:
            raise InputError(
                f"the {split} text of {source.path} is not the expected one: its SHA-256 is "
                f"{found}, not {source.digests[split]}.",
                hint="it was changed or damaged on its way; remove it from the cache of "
                "`datasets` and try again, or give a folder.",
            )
        texts[split] = "\n".join(lines) + "\n"
    return texts


def _download(source: HubText) -> Any:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:  # pragma: no cover - the dev environment has it
        raise MissingExtraError("datasets", extra="hub") from error
    try:
        return datasets.load_dataset(source.path, source.config)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise LocaterError(
            f"{source.path} could not be had from the hub: {error}",
            hint="check the network or HF_ENDPOINT; without one, --data takes a folder with "
            "train.txt, valid.txt and test.txt.",
        ) from error
