"""Families that were verified stay so; the whole sweep is `python -m tests.coverage.sweep`."""

from __future__ import annotations

import json

import pytest
from tests.coverage.check import check
from tests.coverage.publish import PAGE, README, RESULTS, TABLE, counted, known_of, page, types

from locater.models.recipes import known

MOST_USED = [
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "electra",
    "albert",
    "deberta-v2",
    "mpnet",
    "modernbert",
    "esm",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "gpt_bigcode",
    "opt",
    "bloom",
    "falcon",
    "llama",
    "mistral",
    "mixtral",
    "llama4_text",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3",
    "gemma4_text",
    "phi",
    "phi3",
    "starcoder2",
    "smollm3",
    "olmo2",
    "deepseek_v2",
    "deepseek_v3",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "granitemoehybrid",
    "cohere2",
    "minimax_m2",
    "t5",
    "bart",
    "mbart",
    "marian",
    "m2m_100",
    "whisper",
    "wav2vec2",
    "clip",
    "siglip",
    "vit",
    "dinov2",
    "dinov3_vit",
    "swin",
    "llava",
    "sam",
    "parakeet_ctc",
    "speecht5",
]
"""The families that people use most, as far as downloads tell."""

KNOWN = json.loads(RESULTS.read_text())["families"]
VERIFIED = [name for name, one in KNOWN.items() if one["status"] == "verified"]


GUARDS = {
    "bert", "deberta-v2", "modernbert", "gpt2", "gpt_neox", "gptj", "gpt_bigcode", "bloom",
    "falcon", "llama", "llama4_text", "qwen3_next", "qwen2_vl", "gemma3", "phi3", "deepseek_v3",
    "gpt_oss", "granitemoehybrid", "cohere2", "t5", "whisper", "clip", "vit", "llava",
    "swin", "parakeet_ctc",
}  # fmt: skip
"""One for each way in which families differ; the others are put to the test with the slow ones."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=[] if one in GUARDS else pytest.mark.slow)
        for one in MOST_USED
        if one in VERIFIED
    ],
)
def test_a_family_that_people_use_stays_verified(family: str) -> None:
    record = check(family)
    assert record.status == "verified", record.missing


@pytest.mark.slow  # ten minutes
@pytest.mark.parametrize("family", [one for one in VERIFIED if one not in MOST_USED])
def test_a_verified_family_stays_verified(family: str) -> None:
    record = check(family)
    assert record.status == "verified", record.missing


def test_every_family_that_people_use_was_put_to_the_test() -> None:
    assert set(MOST_USED) <= KNOWN.keys()
    assert all(KNOWN[name]["status"] != "cannot build" for name in MOST_USED)


def test_the_page_says_what_the_table_holds() -> None:
    assert PAGE.read_text() == page(known_of(json.loads(TABLE.read_text())))
    assert counted(known_of(json.loads(TABLE.read_text()))) in README.read_text()
    told = known_of(json.loads(TABLE.read_text()))
    assert told == [known(one.model_type) for one in told]


def test_the_table_says_what_the_sweep_found() -> None:
    """Status and gap come from the results; words of `missing` need the whole records."""
    found = types({name: {"family": name, "sites": [], **one} for name, one in _whole().items()})
    table = json.loads(TABLE.read_text())["types"]
    assert {name: one["status"] for name, one in found.items()} == {
        name: one["status"] for name, one in table.items()
    }


def _whole() -> dict[str, dict[str, object]]:
    return {name: {"missing": [], **one} for name, one in KNOWN.items()}


def test_what_is_known_of_a_type_is_one_sentence() -> None:
    assert known("bert").status == "verified"
    assert "verified" in known("bert").sentence
    assert known(None).status is None
    assert known("align_vision_model").sentence == ("unverified: it has no softmax attention")
