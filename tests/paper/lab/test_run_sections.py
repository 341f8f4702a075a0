import json
import math
import re
from pathlib import Path

import pytest
from torch import nn

from locater import cli
from locater.audit import audit_model
from locater.errors import InputError
from locater.paper.lab.figures import gates_chart, run_curves, run_labels, run_sections, runs_chart
from locater.paper.lab.run import Run
from locater.paper.lab.settings import TrainConfig


def run(path: Path | None = None, *, seed: int = 0, end: str = "finished") -> Run:
    records = [
        {
            "step": step,
            "valid_loss": 3.0 - step / 1000,
            "trace": [1.0, 3.0],
            "frobenius_squared": [2.0, 2.0],
            "entropy": [1.0, 1.5],
            "rho": [[0.1, 0.9], [0.5, 0.5]],
        }
        for step in (0, 500, 1000)
    ]
    return Run(TrainConfig(seed=seed), {}, [*records, {"step": 1000, "end": end}], path)


def test_layers_are_averaged_and_losses_are_perplexities() -> None:
    at_end = {name: curve[1000] for name, curve in run_curves(run()).items()}
    assert at_end == {
        "trace": 2.0,
        "frobenius_squared": 2.0,
        "entropy": 1.25,
        "perplexity": pytest.approx(math.exp(2.0)),
    }


def test_runs_of_one_name_are_told_apart() -> None:
    same = [run(Path("a/one"), seed=seed) for seed in (0, 1)]
    assert len(set(run_labels(same))) == 2
    assert run_labels([run(Path("a/one")), run(Path("b/two.jsonl"))]) == ["one", "two"]


def test_charts_of_runs_are_valid_and_described() -> None:
    both = [run(Path("one")), run(Path("two"), seed=1)]
    spec = runs_chart(both).to_dict(validate=True)
    assert all(panel["description"] for panel in spec["concat"])
    spec = gates_chart("one", both[0]).to_dict(validate=True)
    values = spec["data"]["values"]
    assert values[1] == {"step": 0, "until": 500, "token": 2, "next": 3, "rho": 0.9}


def test_what_sets_runs_apart_comes_first() -> None:
    sections = run_sections([run(Path("one")), run(Path("two"), seed=1, end="diverged")])
    rows = sections[-1].text.split("\n")
    assert rows[2:4] == ["| end | finished | diverged |", "| seed | 0 | 1 |"]


def test_no_runs_is_an_error() -> None:
    with pytest.raises(InputError, match="no run to show"):
        run_sections([])


def test_report_mixes_runs_stored_audits_and_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = run().export(tmp_path)
    audit = tmp_path / "audit.json"
    audit.write_text(audit_model(nn.TransformerEncoderLayer(8, 2), tokens=8).to_json())
    out, figures = tmp_path / "page.html", tmp_path / "figures"
    arguments = ["report", str(stored), str(audit), "--out", str(out), "--json"]
    assert cli.main([*arguments, "--figures", str(figures)]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 1
    keys = re.findall(r'<section id="([^"]+)"', out.read_text())
    assert keys == ["runs", "run-1", "run-settings", "summary", "heads", "head", "table", "basis"]
    names = {path.stem for path in figures.iterdir()}
    assert names == {"runs", "run-1", "audit-1", "audit-1-head"}
    assert len(list(figures.iterdir())) == 3 * len(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run and no audit"),
        (["x", "--out", "page.txt"], "end it in .html"),
        (["missing.jsonl"], "is not a run"),
    ],
)
def test_a_report_says_what_it_lacks(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", *arguments]) == 1
    assert message in capsys.readouterr().err
