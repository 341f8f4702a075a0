"""Audits that were edited, and names that are no text, through the real commands."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.models.families import built

from locater import audit_model
from locater.audit.table import Audit
from locater.cli import main

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 10**400, 1e308, 1e999, 0.5, "", "x", "\ud800", [], {}, [[]], [None],
    [1, "2"], {"a": 1}, "<script>", [0.5], -0.0, "healthy",
)  # fmt: skip


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a nested record; of long lists the ends."""
    found = [at] if at else []
    inner = list(data.items()) if isinstance(data, dict) else []
    if isinstance(data, list):
        inner = [(place, data[place]) for place in {0, len(data) - 1} if data]
    for key, value in inner:
        found += places(value, (*at, key))
    return found


def test_an_edited_audit_is_shown_or_refused_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    audit = json.loads(audit_model(built("gpt2"), tokens=8).to_json())
    draw, page, file = random.Random(seed), tmp_path / "page.html", tmp_path / "audit.json"
    refused = 0
    for _ in range(150):
        edited = copy.deepcopy(audit)
        *way, last = draw.choice(places(edited))
        inside = edited
        for key in way:
            inside = inside[key]
        if draw.random() < 0.2:
            del inside[last]
        else:
            inside[last] = draw.choice(ODD)
        file.write_text(json.dumps(edited))
        code = main(["report", str(file), "--out", str(page)])
        said = capsys.readouterr().err
        assert code == 0 or (code == 1 and "hint:" in said), (way, last, said)
        assert "please report" not in said, (way, last, said)
        refused += code
    assert refused > 30


@pytest.mark.parametrize("text", ["", "[", "{}", "[" * 10_000, '{"rows": 3}', "\x00"])
def test_what_is_no_audit_is_said(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "audit.json").write_text(text)
    assert main(["report", str(tmp_path / "audit.json"), "--out", str(tmp_path / "a.html")]) == 1
    assert "hint:" in capsys.readouterr().err


@pytest.fixture
def nameless(tmp_path: Path) -> Path:
    """A checkpoint whose attention is called by half of a surrogate pair, as a pickle can."""
    weights = {f"layers.0.\ud800.{side}.weight": torch.randn(8, 8) for side in ("q_proj", "k_proj")}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2}))
    return tmp_path


@pytest.mark.parametrize("flags", [(), ("--json",), ("--csv", "a.csv"), ("--parquet", "a.parquet"),
                                   ("--out", "a.html"), ("--out", "a.svg")])  # fmt: skip
def test_names_that_are_no_text_are_written_as_text(
    flags: tuple[str, ...], nameless: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    where = [str(nameless / flag) if "." in flag else flag for flag in flags]
    assert main(["audit", str(nameless), "--tokens", "8", *where]) == 0
    out, _ = capfdbinary.readouterr()
    out.decode("utf-8")
    if "--json" in flags:
        assert Audit.from_json(out.decode()).rows[0].name == "layers.0.?"
    if where and where[-1].endswith((".csv", ".html", ".svg")):
        Path(where[-1]).read_text(encoding="utf-8")


def test_a_safetensors_header_with_such_a_name_is_refused_or_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"layers.0.x.q_proj.weight": torch.ones(8, 8),
               "layers.0.x.k_proj.weight": torch.ones(8, 8)}, path)  # fmt: skip
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].replace(b".x.", b".\\ud800.")
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2}))
    assert main(["audit", str(tmp_path), "--tokens", "8", "--json"]) in (0, 1)
    shown = capsys.readouterr()
    assert "hint:" in shown.err or json.loads(shown.out)
