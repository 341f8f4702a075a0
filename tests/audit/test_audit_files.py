"""Audits of every format agree, are stored without loss, and compare; the commands show them."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints.loopback import serving
from tests.checkpoints.test_open import write_gguf
from tests.models.families import built

from locater import MissingExtraError, QKForm
from locater.audit import (
    Audit,
    HeadRecord,
    audit_checkpoint,
    audit_model,
    audit_timeline,
    compare_checkpoints,
)
from locater.audit.compare import relative_change
from locater.audit.table import COLUMNS, LIST_COLUMNS
from locater.cli import main
from locater.errors import InputError

EVIL = "layers.0.<script>alert(1)</script>[bold]\x1b[2J"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    built("llama").save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def audit(folder: Path) -> Audit:
    return audit_checkpoint(folder, tokens=16)


DRAWN = ("deviation", "entropy", "entropy_error", "entropy_bound", "effective_tokens")


def assert_same_numbers(
    ours: Audit, theirs: Audit, tolerance: float, *, is_redrawn: bool = False
) -> None:
    """The same rows; drawn columns to five standard errors where a head's basis is another."""
    assert len(ours.rows) == len(theirs.rows) > 0
    for one, other in zip(ours.rows, theirs.rows, strict=True):
        numbers = {k: v for k, v in one.to_dict().items() if isinstance(v, float | int)}
        if is_redrawn:
            numbers = {k: v for k, v in numbers.items() if k not in DRAWN}
            error = math.hypot(one.entropy_error, other.entropy_error)
            assert abs(one.entropy - other.entropy) < 5 * error
        expected = {k: other.to_dict()[k] for k in numbers}
        assert numbers == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_shards_make_the_rows_of_one_file(audit: Audit, tmp_path: Path) -> None:
    built("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded = audit_checkpoint(tmp_path, tokens=16)
    assert sharded.rows == audit.rows


def test_a_url_gives_the_rows_of_the_file_for_fewer_bytes(audit: Audit, folder: Path) -> None:
    with serving(folder) as server:
        remote = audit_checkpoint(
            f"{server.url}/model.safetensors",
            tokens=16,
            config=json.loads((folder / "config.json").read_text()),
        )
    assert remote.rows == audit.rows
    assert 0 < remote.bytes_read < (folder / "model.safetensors").stat().st_size


ARCHITECTURES: dict[str, tuple[str, bool, dict[str, float]]] = {
    "llama": ("llama", True, {}),
    "granite": ("granite", True, {"attention__scale": 0.2}),
    "cohere": ("command-r", False, {}),  # its pairs lie side by side in every format
    "qwen2": ("qwen2", False, {}),
    "gemma": ("gemma", False, {"attention__key_length": 16}),
}
"""By family: what llama.cpp calls it, whether its converter reorders heads, what else it stores."""


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_has_the_rows_of_the_model_it_came_from(family: str, tmp_path: Path) -> None:
    import gguf

    model, kind = built(family), gguf.GGMLQuantizationType.F32
    name, is_reordered, more = ARCHITECTURES[family]
    model.save_pretrained(tmp_path / "model")
    tensors = {}
    for layer, block in enumerate(model.layers):
        for side in "qk":
            for leaf, value in getattr(block.self_attn, f"{side}_proj").named_parameters():
                rows = value.detach().float()
                if is_reordered:  # the halves of a head's rotary pairs side by side
                    rows = rows.unflatten(0, (-1, 2, 4)).transpose(1, 2).reshape(rows.shape)
                tensors[f"blk.{layer}.attn_{side}.{leaf}"] = (rows, kind)
        gain = block.input_layernorm.weight.detach().float() + (family == "gemma")
        tensors[f"blk.{layer}.attn_norm.weight"] = (gain, kind)
    path = tmp_path / "tiny.gguf"
    said = {
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
        "embedding_length": 32,
        "block_count": 2,
        "rope__freq_base": float(model.config.rope_parameters["rope_theta"]),
        **more,
    }
    write_gguf(path, tensors, name, **{f"{name}__{key}": value for key, value in said.items()})
    places = (path, tmp_path / "model")
    stored, audit = (audit_checkpoint(one, tokens=16) for one in places)
    assert stored.format == "gguf"
    assert_same_numbers(stored, audit, 1e-5, is_redrawn=True)  # the weights were rounded to float32
    turned = [audit_checkpoint(one, tokens=16, offset=3) for one in places]
    assert_same_numbers(*turned, 1e-5, is_redrawn=True)
    assert any("offset 3" in caveat for caveat in turned[0].caveats)
    assert turned[0].rows[0].trace != pytest.approx(stored.rows[0].trace, rel=1e-2)


def test_an_adapter_is_audited_on_top_of_its_base(folder: Path, tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model = peft.get_peft_model(built("llama"), config).double()
    model.save_pretrained(tmp_path)
    on = audit_checkpoint(tmp_path, base=folder, tokens=16)
    assert_same_numbers(on, audit_model(model, tokens=16), 1e-9)
    with model.disable_adapter():
        off = audit_model(model, tokens=16)
    assert_same_numbers(off, audit_checkpoint(folder, tokens=16), 1e-9)
    comparison = compare_checkpoints(folder, tmp_path, base=folder, tokens=16)
    assert len(comparison.rows) == 8 and all(row.distance > 0 for row in comparison.rows)
    before = {(row.layer, row.head): row.r for row in off.rows}
    after = {(row.layer, row.head): row.r for row in on.rows}
    for row in comparison.rows:
        change = after[row.layer, row.head] - before[row.layer, row.head]
        assert row.changes["r"] == pytest.approx(change)


def test_json_is_stored_without_loss(audit: Audit) -> None:
    assert Audit.from_json(audit.to_json()) == audit
    for text, message in (("{", "not JSON"), ("[1]", "not an audit"), ("{}", "not an audit")):
        with pytest.raises(InputError, match=message):
            Audit.from_json(text)
    data = audit.to_dict()
    del data["rows"][0]["trace"]
    with pytest.raises(InputError, match="lacks trace"):
        Audit.from_dict(data)


def test_csv_is_stored_without_loss(audit: Audit) -> None:
    def value(column: str, cell: str) -> Any:
        if column in LIST_COLUMNS:
            return tuple(json.loads(cell))
        kind = type(getattr(audit.rows[0], column))
        return None if cell == "" else kind(cell)

    lines = csv.DictReader(io.StringIO(audit.to_csv()))
    rows = [HeadRecord(**{k: value(k, cell) for k, cell in line.items()}) for line in lines]
    assert tuple(rows) == audit.rows


def test_parquet_is_stored_without_loss(audit: Audit) -> None:
    from pyarrow import parquet

    table = parquet.read_table(io.BytesIO(audit.to_parquet()))
    assert tuple(HeadRecord.from_dict(row) for row in table.to_pylist()) == audit.rows
    assert json.loads(table.schema.metadata[b"locater"])["summary"] == audit.summary


def test_parquet_needs_its_package(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="pyarrow is not installed"):
        audit.to_parquet()


def dense_change(before: QKForm, after: QKForm) -> torch.Tensor:
    return torch.linalg.matrix_norm(after.matrix() - before.matrix()) / torch.linalg.matrix_norm(
        before.matrix()
    )


def test_the_distance_is_that_of_the_dense_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, move, other = torch.randn(4, 5, 3, 9, generator=generator, dtype=torch.float64)
    before = QKForm(query, key, 1.0)
    for size in (1.0, 1e-6):
        after = QKForm(query + size * move, key - size * other, 1.0)
        # the dense difference itself loses eps/size digits
        tolerance = 1e-15 / size + 1e-12
        torch.testing.assert_close(
            relative_change(before, after), dense_change(before, after), rtol=tolerance, atol=0
        )
    assert relative_change(before, before).tolist() == [0.0] * 5


def test_a_comparison_ranks_heads_and_names_what_has_no_partner(tmp_path: Path) -> None:
    first, second = built("llama"), built("llama")
    with torch.no_grad():
        second.layers[1].self_attn.q_proj.weight[:8] *= 3  # head 0 of layer 1
    comparison = compare_checkpoints(first, second, tokens=16)
    top, *rest = comparison.rows
    assert (top.layer, top.head, top.distance) == (1, 0, pytest.approx(2.0))
    assert all(row.distance == 0 for row in rest)
    assert "1 of 8 heads changed" in comparison.summary
    assert json.loads(json.dumps(comparison.to_dict()))["rows"][0]["changes"]["r"] != 0
    del second.layers[1]
    alone = compare_checkpoints(first, second, tokens=16)
    assert [one.reason for one in alone.skipped] == ["only the first model has it"]
    with pytest.raises(InputError, match="no attention in common"):
        compare_checkpoints(first, built("t5"), tokens=16)


def test_a_timeline_follows_every_head(folder: Path, tmp_path: Path) -> None:
    model = built("llama")
    with torch.no_grad():
        model.layers[0].self_attn.q_proj.weight *= 2
    model.save_pretrained(tmp_path)
    line = audit_timeline([folder, tmp_path], tokens=16)
    tracks = line.trajectories()
    assert len(tracks) == 8
    for track in tracks:
        before, after = track["r"]
        assert after == pytest.approx(before * (2 if track["layer"] == 0 else 1))
    json.dumps(line.to_dict())


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    sides = {side: torch.randn(8, 8, generator=generator) for side in ("q_proj", "k_proj")}
    save_file(
        {f"{EVIL}.{side}.weight": value for side, value in sides.items()},
        tmp_path / "a.safetensors",
    )
    return tmp_path / "a.safetensors"


def test_names_with_markup_are_inert(evil: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = evil.with_name("page.html")
    line = ["audit", str(evil), "--heads", "2", "--tokens", "8", "--out", str(page)]
    assert main(line) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "<script>alert(1)" not in page.read_text()
    assert main([*line[:-2], "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows"][0]["name"] == EVIL and len(data["rows"]) == 2


def test_the_table_fits_100_columns_and_shows_the_worst_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = built("llama")
    with torch.no_grad():
        for block in model.layers:
            block.self_attn.q_proj.weight *= 100
    model.save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["audit", str(tmp_path), "--tokens", "16", "--process", "random-walk"]) == 0
    shown = capsys.readouterr()
    assert max(map(len, shown.out.splitlines())) <= 100
    first = " ".join(shown.out.split())
    assert first.startswith("verified: llama gives the model's own logits")
    assert first.index("no text was read: use --text") < first.index("stands out")
    assert "healthy" not in first
    rows = audit_checkpoint(tmp_path, tokens=16, process="random-walk").worst_first()
    heads = [line.split()[:4] for line in shown.out.splitlines() if line.startswith(" layer")]
    assert heads == [["layer", str(row.layer), "head", str(row.head)] for row in rows]


def test_files_are_written_beside_the_table(
    audit: Audit, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["audit", str(folder), "--tokens", "16", "--top", "1"]
    files = [tmp_path / "heads.csv", tmp_path / "heads.parquet"]
    assert main([*line, "--csv", str(files[0]), "--parquet", str(files[1])]) == 0
    assert files[0].read_text() == audit.to_csv()
    assert files[1].read_bytes()[:4] == b"PAR1"
    assert "and 7 more heads" in capsys.readouterr().out
    assert len(files[0].read_text().splitlines()[0].split(",")) == len(COLUMNS)


def test_json_on_the_command_line_is_the_audit(
    audit: Audit, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(folder), "--tokens", "16", "--json"]) == 0
    assert Audit.from_json(capsys.readouterr().out) == audit
    assert main(["audit", str(folder), str(folder), "--tokens", "16", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["checkpoints"]) == 2 and len(data["trajectories"]) == 8
    assert main(["compare", str(folder), str(folder), "--tokens", "16", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["distance"] for row in data["rows"]} == {0.0}


def test_comparisons_and_timelines_have_tables(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(folder), str(folder), "--tokens", "16"]) == 0
    assert main(["compare", str(folder), str(folder), "--tokens", "16", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    out = " ".join(out.split())
    assert "0 of 8 heads changed" in out and "and 6 more heads" in out


def test_a_timeline_and_a_comparison_say_what_they_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = built("llama")
    with torch.no_grad():
        model.layers[1].self_attn.k_proj.weight[0, 0] = math.nan
    model.save_pretrained(tmp_path)
    for command in ("audit", "compare"):
        line = [command, str(tmp_path), str(tmp_path), "--tokens", "16"]
        capsys.readouterr()
        assert main(line) == 0
        shown = capsys.readouterr()
        said = shown.err.splitlines()
        assert shown.out.count("no text was read: use --text") == 1
        assert sum(one.startswith("skipped: layers.1.self_attn: ") for one in said) == 1
        assert main([*line, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert {one["name"] for one in data["skipped"]} == {"layers.1.self_attn"}
        assert any("no text was read" in sentence for sentence in data["head"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top", "x"], "x"),
        (["--out", "page.bmp"], "cannot write a figure as 'page.bmp'"),
        (["--out", "map.svg", "--color", "taste"], "no map of 'taste'"),
        (["--csv", "/proc/nowhere/a.csv"], "cannot write /proc/nowhere/a.csv"),
        (["--tokens", "1"], "at least 2 tokens"),
        (["--offset", "-1"], "offset must be zero or more"),
    ],
)
def test_mistakes_say_what_to_do(
    folder: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(folder), *flags]) in (1, 2)
    assert message in capsys.readouterr().err


def test_several_checkpoints_do_not_fit_one_csv(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(folder), str(folder), "--csv", "a.csv"]) == 1
    assert "hint: use --json" in capsys.readouterr().err


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fails)
    return


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_what_stood_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "heads.csv"
    path.write_text("older")
    assert main(["audit", str(folder), "--tokens", "16", "--csv", str(path)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_summaries_count_what_they_say(audit: Audit) -> None:
    assert f"{len(audit.rows)} heads in 2 attention layers (safetensors)" in audit.summary
    assert "T = 16" in audit.summary
    low, high = (f(row.entropy for row in audit.rows) for f in (min, max))
    assert f"{low:.2f} to {high:.2f} of at most {math.log(16):.2f} nats" in audit.summary


def test_heads_whose_biases_alone_changed_have_changed() -> None:
    before, after = built("gpt2"), built("gpt2")
    after.load_state_dict(before.state_dict())
    with torch.no_grad():
        after.h[1].attn.c_attn.bias[:8] += 3.0
    found = compare_checkpoints(before, after, tokens=16)
    assert {row.layer for row in found.rows if row.has_moved} == {1}
    assert "0 of" not in found.summary


def test_one_checkpoint_that_cannot_be_read_does_not_end_a_timeline(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (200, 1000, 30):
        place = tmp_path / f"checkpoint-{step}"
        shutil.copytree(folder, place)
    (tmp_path / "checkpoint-30" / "model.safetensors").write_bytes(b"short")
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    assert paths[0].endswith("-1000")  # as a shell lists them
    assert main(["audit", *paths, "--tokens", "16", "--json"]) == 1
    captured = capsys.readouterr()
    assert "left out" in captured.err and "checkpoint-30" in captured.err
    assert "1 of 3 checkpoints could not be read" in captured.err
    names = json.loads(captured.out)["checkpoints"]
    assert [name.rpartition("-")[2] for name in names] == ["200", "1000"]
