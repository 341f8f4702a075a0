"""Texts become the token ids they should, and every step has one batch whatever came before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locater import ConfigError, InputError, LocaterError
from locater.paper.lab.batches import (
    IGNORED,
    Batches,
    MaskedBatches,
    Source,
    load_digits,
)
from locater.paper.lab.text import (
    HUB,
    SPLITS,
    Corpus,
    HubText,
    cache_folder,
    embedded_text,
    hub_text,
    load_corpus,
    paragraphs,
    text_digest,
)

ROOT = Path(__file__).parents[3]
WIKITEXT = Path(os.environ.get("LOCATER_WIKITEXT", ROOT.parent / "shared/data/wikitext-2"))
needs_wikitext = pytest.mark.skipif(
    not WIKITEXT.is_dir(), reason="set LOCATER_WIKITEXT to the folder with WikiText-2's files"
)
TEXT = "the cat saw the dog .\n\nthe dog saw a cat and the cat\n"


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the embedded text."""
    cache = tmp_path_factory.mktemp("cache")
    embedded_text(cache)
    return cache


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path / "cache"))


def folder(path: Path, *, pattern: str = "{}.txt", train: str = TEXT) -> Path:
    path.mkdir(exist_ok=True)
    for split, text in (("train", train), ("valid", "the bird saw a dog\n"), ("test", "a cat\n")):
        (path / pattern.format(split)).write_text(text, encoding="utf-8")
    return path


def words(text: Corpus, split: str) -> list[str]:
    return [text.vocabulary[place] for place in getattr(text, split).tolist()]


@needs_wikitext
@pytest.mark.paper("Section 7")
def test_wikitext_2_has_its_standard_counts() -> None:
    text = load_corpus(WIKITEXT)
    assert [text.train.numel(), text.valid.numel(), text.test.numel()] == [
        2_088_628,
        217_646,
        245_569,
    ]
    assert len(text.vocabulary) == 33_278
    start = [text.vocabulary[place] for place in text.train[:7].tolist()]
    assert start == ["<eos>", "=", "Valkyria", "Chronicles", "III", "=", "<eos>"]
    for split in SPLITS:  # the files are those that the hub's digests were taken from
        lines = (WIKITEXT / f"{split}.txt").read_text(encoding="utf-8").split("\n")[:-1]
        assert text_digest(lines) == HUB["wikitext-2"].digests[split]
    cut = load_corpus(WIKITEXT, size=10_000)
    assert cut.train.numel() == 2_088_628 and int(cut.train.max()) == 9_999
    counts = torch.bincount(text.train)  # both are numbered in the same order, by frequency
    assert cut.vocabulary == text.vocabulary[:10_000]
    assert counts[2:10_000].min() >= counts[10_000:].max()
    assert torch.equal(cut.train, torch.where(text.train < 10_000, text.train, 1))


def test_the_embedded_prose_is_english_and_large_enough(embedded: Path) -> None:
    texts = embedded_text(embedded)
    tokens = {split: text.split() for split, text in texts.items()}
    total = sum(map(len, tokens.values()))
    assert total > 250_000
    assert 0.85 < len(tokens["train"]) / total < 0.95
    assert min(len(tokens["valid"]), len(tokens["test"])) > 8_000
    counts = Counter(word for part in tokens.values() for word in part if word[0].isalpha())
    assert {"the", "a", "is", "to", "of"} <= {word for word, _ in counts.most_common(8)}
    lines = [line for text in texts.values() for line in text.splitlines()]
    assert len(lines) == len(set(lines))
    assert not any("> > >" in line for line in lines)


def test_the_embedded_corpus_loads_from_its_cache(
    embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCATER_CACHE", str(embedded))
    monkeypatch.setattr("locater.paper.lab.text.documents", lambda: pytest.fail("read again"))
    text = load_corpus()
    assert (text.name, cache_folder()) == ("embedded", embedded)
    counts = Counter(words(text, "train"))
    assert min(counts[word] for word in text.vocabulary) >= 3
    lines = embedded_text(embedded)["valid"].splitlines()
    assert text.valid.numel() == sum(len(line.split()) + 1 for line in lines)
    assert load_corpus(size=1000).digest != text.digest == load_corpus().digest


@pytest.mark.slow
def test_the_embedded_text_is_the_same_in_every_process(embedded: Path, tmp_path: Path) -> None:
    code = "import sys, pathlib; from locater.paper.lab import text; "
    code += "text.embedded_text(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "77"})
    stored = sorted(tmp_path.glob("python-*.txt"))
    assert len(stored) == 3
    for path in stored:
        assert path.read_bytes() == (embedded / path.name).read_bytes()


def test_code_and_tables_are_no_prose() -> None:
    text = """Return the sum of the numbers that were given to it.

    >>> sum([1, 2, 3])
    6

    ================= =========
    Name              Meaning
    ================= =========

        for index in range(10):
            total += values[index]

    *All* of the ``items`` must be
    numbers, or an error is raised.
    """
    assert list(paragraphs(text)) == [
        "Return the sum of the numbers that were given to it.",
        "All of the items must be numbers, or an error is raised.",
    ]


@pytest.mark.parametrize("pattern", ["{}.txt", "wiki.{}.tokens"])
def test_words_are_numbered_by_frequency_and_cut_to_unknown(tmp_path: Path, pattern: str) -> None:
    path = folder(tmp_path / "text", pattern=pattern)
    text = load_corpus(path, size=5)
    assert text.vocabulary == ("<eos>", "<unk>", "the", "cat", "dog")
    assert " ".join(words(text, "train")) == (
        "the cat <unk> the dog <unk> <eos> <eos> the dog <unk> <unk> cat <unk> the cat <eos>"
    )
    assert " ".join(words(text, "valid")) == "the <unk> <unk> <unk> dog <eos>"
    whole = load_corpus(path)  # without <unk> of its own: words seen three times
    assert whole.vocabulary == ("<eos>", "<unk>", "the", "cat")
    marked = load_corpus(folder(tmp_path / "marked", train=TEXT + "<unk>\n"))
    assert set(marked.vocabulary) == {*TEXT.split(), "<eos>", "<unk>"}


def test_a_plain_file_is_split_by_lines_and_punctuation(tmp_path: Path) -> None:
    path = tmp_path / "plain.txt"
    path.write_text("\n".join(f"It's line {number}." for number in range(40)), encoding="utf-8")
    text = load_corpus(path, size=6)
    assert [text.train.numel(), text.valid.numel(), text.test.numel()] == [36 * 5, 2 * 5, 2 * 5]
    assert words(text, "test") == ["It's", "line", "<unk>", ".", "<eos>"] * 2


def test_pieces_of_words_spell_the_text_and_are_learned_once(
    embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "small"
    source.mkdir()
    for split, text in embedded_text(embedded).items():
        (source / f"{split}.txt").write_text(text[:40_000] + "\n<unk> ünknöwn\n", encoding="utf-8")
    text = load_corpus(source, vocabulary="bpe", size=600)
    assert len(text.vocabulary) == 600 and int(text.train.max()) < 600
    again = load_corpus(source, vocabulary="bpe", size=600)
    (stored,) = cache_folder().glob("bpe-600-*")
    assert text.digest == again.digest and text.vocabulary == again.vocabulary
    alphabet = byte_alphabet()
    end = text.vocabulary.index("<eos>")
    lines, line = [], []
    for place in text.valid.tolist():
        if place == end:
            lines.append("".join(line))
            line = []
        else:
            line.append(text.vocabulary[place])
    original = (source / "valid.txt").read_text(encoding="utf-8").splitlines()
    spelled = [
        bytes(alphabet[sign] for sign in one.replace("<unk>", "Ġ<unk>")).decode() for one in lines
    ]
    assert [one.split() for one in spelled] == [one.split() for one in original]
    stored.write_bytes(stored.read_bytes()[:-10])  # damaged: learned again, not believed
    assert load_corpus(source, vocabulary="bpe", size=600).digest == text.digest


def byte_alphabet() -> dict[str, int]:
    """The signs that byte-level BPE writes for the 256 bytes, after GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


def test_texts_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no text at .*nowhere"):
        load_corpus(tmp_path / "nowhere")
    with pytest.raises(InputError, match="has no train text; it holds nothing"):
        (tmp_path / "hollow").mkdir()
        load_corpus(tmp_path / "hollow")
    with pytest.raises(InputError, match="the train text of blank is empty"):
        load_corpus(folder(tmp_path / "blank", train=" \n\n"))
    plain = tmp_path / "one.txt"
    plain.write_text("")
    with pytest.raises(InputError, match="a text of 0 lines cannot be split"):
        load_corpus(plain)
    plain.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text in UTF-8"):
        load_corpus(plain)
    small = folder(tmp_path / "small")
    with pytest.raises(ConfigError, match="words from this text has 3 to 9, got 500"):
        load_corpus(small, size=500)
    with pytest.raises(ConfigError, match=r"pieces from this text has at most \d+, got 500"):
        load_corpus(small, vocabulary="bpe", size=500)
    with pytest.raises(ConfigError, match="needs a size above 258, got None"):
        load_corpus(small, vocabulary="bpe")
    with pytest.raises(InputError, match="no text 'wikitext-9' is known on the hub"):
        load_corpus("hub:wikitext-9")


def hub_folder(path: Path) -> HubText:
    """A data set as the hub stores it, with the digests of its text."""
    import pyarrow
    from pyarrow import parquet

    path.mkdir()
    texts = {"train": TEXT, "valid": "the bird\n", "test": "a cat\n"}
    for split, theirs in zip(texts, ("train", "validation", "test"), strict=True):
        rows = [f"{line}\n" if line else "" for line in texts[split].splitlines()]
        parquet.write_table(pyarrow.table({"text": rows}), path / f"{theirs}-00000.parquet")
    digests = {split: text_digest(text.splitlines()) for split, text in texts.items()}
    return HubText(path=str(path), config=None, digests=digests)


def test_a_text_of_the_hub_is_checked_by_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    source = hub_folder(tmp_path / "hub")
    known = {"small": source}
    assert hub_text("small", known=known)["train"] == TEXT
    changed = HubText(path=source.path, config=None, digests=source.digests | {"valid": "0" * 64})
    with pytest.raises(InputError, match=r"the valid text of .* is not the expected one"):
        hub_text("small", known={"small": changed})


def test_without_a_network_the_hub_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def refuse(*args: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        LocaterError, match=r"could not be loaded from the hub(.|\n)*takes a folder"
    ):
        load_corpus("hub:wikitext-2")


@settings(max_examples=30)
@given(
    tokens=st.integers(2, 400),
    length=st.integers(1, 20),
    batch=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_every_epoch_covers_every_block_once(
    tokens: int, length: int, batch: int, seed: int
) -> None:
    if tokens <= length:
        return
    text = torch.arange(tokens)
    batches = Batches(text, length=length, batch=batch, seed=seed)
    blocks = (tokens - 1) // length
    firsts = []
    for step in range(3 * batches.steps_per_epoch):
        inputs, targets = batches.at(step)
        assert inputs.shape == (batch, length)
        assert torch.equal(inputs + 1, targets)
        firsts += (inputs[:, 0] // length).tolist()
    for epoch in range(len(firsts) // blocks):
        assert sorted(firsts[epoch * blocks : (epoch + 1) * blocks]) == list(range(blocks))


def test_a_step_depends_on_seed_and_step_alone() -> None:
    text = torch.arange(10_000) % 97
    straight = Batches(text, length=8, batch=16, seed=5)
    seen = [straight.at(step)[0] for step in range(200)]
    for step in (150, 3, 199, 78, 79):  # epochs are 79 steps long
        assert torch.equal(Batches(text, length=8, batch=16, seed=5).at(step)[0], seen[step])
    other = Batches(text, length=8, batch=16, seed=6)
    assert not torch.equal(other.at(0)[0], seen[0])
    orders = Source(torch.arange(1249), torch.arange(1249), batch=1249, seed=5)
    assert not torch.equal(orders.indices(0), orders.indices(1))


def test_evaluation_reads_the_text_in_order_and_whole() -> None:
    batches = Batches(torch.arange(44), length=4, batch=3, seed=None)
    assert batches.steps_per_epoch == 4
    assert torch.cat([batches.at(step)[0] for step in range(4)]).flatten().tolist() == [*range(40)]
    assert batches.at(3)[0].shape == (1, 4)
    assert torch.equal(batches.at(5)[0], batches.at(1)[0])


def test_blocks_longer_than_the_text_are_refused() -> None:
    with pytest.raises(InputError, match="a text of 64 tokens has no block of 64"):
        Batches(torch.arange(64), length=64, seed=0)
    with pytest.raises(ConfigError, match="batch must be one or more, got 0"):
        Batches(torch.arange(65), length=64, batch=0, seed=0)


def test_masks_hide_fifteen_percent_and_keep_the_rest() -> None:
    text = torch.arange(60_001) % 500
    batches = MaskedBatches(text, vocabulary=500, length=60, batch=200, seed=1)
    plain = Batches(text, length=60, batch=200, seed=1)
    hidden = replaced = kept = 0
    for step in range(5):
        inputs, targets = batches.at(step)
        original = plain.at(step)[0]
        chosen = targets != IGNORED
        assert (chosen.sum(1) == 9).all()
        assert torch.equal(targets[chosen], original[chosen])
        assert torch.equal(inputs[~chosen], original[~chosen])
        assert torch.equal(batches.at(step)[0], inputs)
        shown = inputs[chosen]
        hidden += int((shown == 500).sum())
        kept += int((shown == targets[chosen]).sum())
        replaced += int(((shown != 500) & (shown != targets[chosen])).sum())
    total = 5 * 200 * 9
    assert hidden + kept + replaced == total
    for count, share in ((hidden, 0.8), (replaced, 0.1 * 499 / 500), (kept, 0.1 + 0.1 / 500)):
        error = (total * share * (1 - share)) ** 0.5
        assert abs(count - total * share) < 5.5 * error


def test_evaluation_masks_are_the_same_every_time() -> None:
    batches = MaskedBatches(torch.arange(100), vocabulary=100, length=8, batch=4, seed=None)
    first = batches.at(1)
    again = batches.at(1 + batches.steps_per_epoch)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("patch", [2, 4])
def test_digits_are_cut_in_patches(patch: int) -> None:
    from sklearn import datasets

    digits = load_digits(3, patch=patch)
    (train, train_labels), (valid, _) = digits["train"], digits["valid"]
    images, labels = datasets.load_digits(return_X_y=True)
    assert len(train) + len(valid) == 1797 and len(valid) == 359
    assert train.shape[1:] == ((8 // patch) ** 2, patch**2)
    side = 8 // patch
    whole = train.unflatten(1, (side, side)).unflatten(3, (patch, patch))
    back = (whole.transpose(2, 3).reshape(-1, 64) * 16).round().to(torch.int64)
    known = {
        tuple(image): int(label) for image, label in zip(images.astype(int), labels, strict=True)
    }
    assert [known[tuple(row)] for row in back.tolist()] == train_labels.tolist()
    first, label = Source(train, train_labels, batch=7, seed=0).at(400)
    assert first.shape[0] == label.shape[0] == 7
    with pytest.raises(ConfigError, match="not cut in patches of 3"):
        load_digits(0, patch=3)
