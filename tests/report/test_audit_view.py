import base64
import json
import re
import struct
from dataclasses import replace

import pytest
import torch
from torch import nn

from locater.audit import Audit, audit_model
from locater.errors import InputError
from locater.models.layout import Skipped
from locater.report.audit_view import (
    NUMBERS,
    WORDS,
    audit_labels,
    audit_map_chart,
    audit_page,
    head_chart,
    row_labels,
)


@pytest.fixture(scope="module")
def audit() -> Audit:
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4), 2, enable_nested_tensor=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in layers.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return audit_model(layers, name="small", tokens=300)


def data(html: str) -> dict[str, object]:
    found = re.search(r'id="audit-data">(.*?)</script>', html)
    assert found
    return dict(json.loads(found[1]))


def test_lists_are_kept_to_a_part_in_32767_of_their_largest(audit: Audit) -> None:
    (stored,) = data(audit_page([audit]))["audits"]
    raw = base64.b64decode(stored["lists"])
    shares = struct.unpack(f"<{len(raw) // 2}h", raw)
    start = 0
    for row, sizes, scales in zip(audit.rows, stored["sizes"], stored["scales"], strict=True):
        plane, singular, rho = sizes
        lists = (
            ((*row.eigenvalues_real, *row.eigenvalues_imag), 2 * plane),
            (row.singular_values, singular),
            (None, rho),
        )
        for (truth, count), scale in zip(lists, scales, strict=True):
            values = [share * scale / 32767 for share in shares[start : start + count]]
            start += count
            if truth is None:
                places = [audit.positions.index(round(x * 300)) for x in stored["theta"]]
                truth = [row.rho[place] for place in places]
            assert values == pytest.approx(list(truth), abs=scale / 32767)
    assert start == len(shares)


def test_columns_are_kept_to_five_digits_and_words_as_they_are(audit: Audit) -> None:
    (stored,) = data(audit_page([audit]))["audits"]
    for name in NUMBERS:
        values = [getattr(row, name) for row in audit.rows]
        if None in values:  # nothing was measured
            assert stored["columns"][name] == values
        else:
            assert stored["columns"][name] == pytest.approx(values, rel=5.1e-5)
    for name in (*WORDS, "reason"):
        words = stored["words"][name]
        assert [words["values"][k] for k in words["rows"]] == [getattr(r, name) for r in audit.rows]
    order = sorted(range(len(audit.rows)), key=lambda k: stored["concern"][k])
    assert [audit.rows[k] for k in order] == audit.worst_first()


def test_many_positions_are_thinned_and_keep_their_ends(audit: Audit) -> None:
    long = replace(
        audit,
        tokens=5000,
        positions=tuple(range(1, 5001)),
        rows=tuple(replace(row, rho=(0.5,) * 5000) for row in audit.rows),
    )
    theta = data(audit_page([long]))["audits"][0]["theta"]
    assert (len(theta), theta[0], theta[-1]) == (256, pytest.approx(1 / 5000), 1.0)


def test_what_was_skipped_and_caveats_are_said(audit: Audit) -> None:
    told = replace(
        audit, caveats=("watch <b>out</b>",), skipped=(Skipped(name="layer 7", reason="no key"),)
    )
    html = audit_page([told])
    assert "watch &lt;b&gt;out&lt;/b&gt;" in html
    assert "layer 7: no key" in html


def test_an_audit_without_heads_is_still_a_page(audit: Audit) -> None:
    html = audit_page([replace(audit, rows=())])
    assert re.findall(r'<section id="([^"]+)"', html) == ["summary", "basis"]
    with pytest.raises(InputError, match="no audit to show"):
        audit_page([])


def test_a_list_that_was_not_asked_for_is_missing_quietly(audit: Audit) -> None:
    bare = replace(
        audit,
        rows=tuple(
            replace(
                row, eigenvalues_real=(), eigenvalues_imag=(), singular_values=(), variance=None
            )
            for row in audit.rows
        ),
    )
    (stored,) = data(audit_page([bare]))["audits"]
    assert stored["sizes"][0][:2] == [0, 0]
    assert stored["columns"]["variance"] == [None] * len(audit.rows)


def test_labels_are_short_and_distinct(audit: Audit) -> None:
    def labels(*names: str) -> list[str]:
        return audit_labels([replace(audit, name=name) for name in names])

    assert labels("runs/one/model", "runs/one/tuned") == ["model", "tuned"]
    assert labels("a/model", "b/model") == ["a/model", "b/model"]
    assert labels("model", "model") == ["model (1)", "model (2)"]
    assert labels("x") == ["x"]


def test_rows_that_share_a_layer_are_told_apart(audit: Audit) -> None:
    first, second = audit.rows[0], replace(audit.rows[0], name="other", kind="cross")
    assert len(set(row_labels([first, second]).values())) == 2
    twin = replace(first, name="twin")
    assert row_labels([first, twin]) == {first.name: first.name, "twin": "twin"}


@pytest.mark.parametrize("column", ["verdict", "regime", "r", "entropy"])
def test_maps_for_papers_are_valid(audit: Audit, column: str) -> None:
    spec = audit_map_chart(audit, column).to_dict(validate=True)
    assert len(spec["data"]["values"]) == len(audit.rows)
    assert spec["description"]


def test_the_detail_for_papers_is_valid_and_its_head_must_exist(audit: Audit) -> None:
    row = audit.rows[3]
    assert head_chart([audit, audit], row.name, row.head).to_dict(validate=True)
    with pytest.raises(InputError, match="no audit has head 99"):
        head_chart([audit], row.name, 99)
    with pytest.raises(InputError, match="no map of 'name'"):
        audit_map_chart(audit, "name")
