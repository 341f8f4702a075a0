import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.paper.whole_page import make_whole_page

from locater.errors import ConfigError
from locater.paper.claims import Verdict
from locater.paper.parts import PARTS, Context, Part, Result, published
from locater.paper.reproduce import ReproduceConfig, reproduce
from locater.report.page import Section

ROOT = Path(__file__).parents[2]
FREE = {"quick": 0.0, "cpu": 0.0, "paper": 0.0}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two small parts in place of the real ones; the names of those that ran."""
    ran: list[str] = []

    def maker(name: str) -> Part:
        def make(context: Context) -> Result:
            ran.append(name)
            if (context.store / f"break-{name}").exists():
                raise KeyboardInterrupt
            verdict = Verdict(where=name, claim="c", outcome="reproduced", found="1", section=name)
            section = Section(key=name, title=f"the {name}")
            return Result(sections=(section,), verdicts=(verdict,))

        return Part(make, "Group", FREE)  # type: ignore[arg-type]

    kept = dict(PARTS)
    PARTS.clear()
    PARTS.update({name: maker(name) for name in ("one", "two")})
    yield ran
    PARTS.clear()
    PARTS.update(kept)


def test_the_verdicts_are_written_between_the_marks_of_a_page(
    made: list[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: verdicts -->\nstale words\n<!-- end -->\nafter\n")
    reproduce(ReproduceConfig(out=tmp_path / "out", table=page))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale words" not in text
    assert "2 claims: 2 reproduced" in text and "| one | c | **reproduced** | 1 |" in text
    with pytest.raises(ConfigError, match="nothing at"):
        ReproduceConfig(table=tmp_path / "none.md")


def study(name: str) -> dict[str, object]:
    """As benchmarks/study_reality.py writes it, in little."""
    errors = {"rho_error_printed": 0.61, "rho_error_given_query": 0.012, "rho_noise": 0.005}
    profiles = [
        {"panel": "layer 0, head 0", "curve": curve, "theta": theta, "rho": rho}
        for curve, rho in (("measured", 0.5), ("printed", 0.1), ("given_query", 0.5))
        for theta in (0.5, 1.0)
    ]
    summary = {**errors, "heads": 72, "entropy_error_given_query": 0.04}
    return {"model": name, "summary": summary, "profiles": profiles, "side": {"blocks": {}}}


def test_reproduce_writes_the_page_with_all_figures_and_errata(tmp_path: Path) -> None:
    published = tmp_path / "studies"
    published.mkdir()
    (published / "minilm.json").write_text(json.dumps(study("minilm")))
    said: list[str] = []
    page = make_whole_page(tmp_path / "out", report=said.append, reality=published)
    html = page.read_text()
    made = [re.split(r"[ ,]", line)[1] for line in said if line.startswith("[")]
    assert made == [name for name, part in PARTS.items() if "quick" in part.scales]
    figures = ["explorer", "fig1", "fig2", "fig3", "fig4", "fig5", "fig5-beyond", "fig6", "fig7"]
    audit = ["summary", "heads", "head", "table", "basis"]
    sections = re.findall(r'<section id="([^"]+)"', html)
    real = ["published", "reality"]
    assert sections == [*real, *audit, "verdicts", *figures, "errata", "settings"]
    assert "minilm (72 heads): as printed off by 0.61" in html
    charts = [*figures, *real]
    assert html.count('data-chart="') == len(charts) + 3  # a head's eigenvalues, singular values, ρ
    assert len(html) < 5_000_000
    exports = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    charts += [f"audit-{place}{part}" for place in (1, 2, 3) for part in ("", "-head")]
    assert exports == {f"{key}.{suffix}" for key in charts for suffix in ("svg", "png", "pdf")}


def test_only_the_named_parts_are_made(tmp_path: Path) -> None:
    config = ReproduceConfig(out=tmp_path, only="fig4, fig1", exports=False)
    html = reproduce(config).read_text()
    sections = re.findall(r'<section id="([^"]+)"', html)
    assert sections == ["verdicts", "fig1", "fig4", "settings"]
    assert not (tmp_path / "figures").exists()


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, made: list[str]) -> None:
    (tmp_path / "break-two").touch()
    with pytest.raises(KeyboardInterrupt):
        reproduce(ReproduceConfig(out=tmp_path))
    (tmp_path / "break-two").unlink()
    html = reproduce(ReproduceConfig(out=tmp_path)).read_text()
    assert made == ["one", "two", "two"]
    assert "the one" in html
    assert "the two" in html
    reproduce(ReproduceConfig(out=tmp_path))
    assert made == ["one", "two", "two"]
    reproduce(ReproduceConfig(out=tmp_path, fresh=True))
    assert made == ["one", "two", "two", "one", "two"]


@pytest.mark.parametrize("rubbish", ["", "{", "[]", '{"sections": [{"key": 1}]}'])
def test_a_spoiled_part_is_made_again(tmp_path: Path, made: list[str], rubbish: str) -> None:
    reproduce(ReproduceConfig(out=tmp_path, only="one"))
    (stored,) = (tmp_path / "parts").iterdir()
    stored.write_text(rubbish)
    assert "the one" in reproduce(ReproduceConfig(out=tmp_path, only="one")).read_text()
    assert made == ["one", "one"]


def test_other_data_and_another_scale_are_other_parts(tmp_path: Path, made: list[str]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    text = folder / "train.txt"
    text.write_text("one text")
    given = ({}, {"scale": "cpu"}, {"data": folder}, {"results": folder}, {"reality": folder})
    for changes in given:
        reproduce(ReproduceConfig(out=tmp_path / "out", only="one", **changes))  # type: ignore[arg-type]
    text.write_text("another text")  # in the same folder
    reproduce(ReproduceConfig(out=tmp_path / "out", only="one", data=folder))
    assert made == ["one"] * 6
    assert len(list((tmp_path / "out" / "parts").iterdir())) == 6


def test_the_time_left_follows_the_pace_of_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def first(context: Context) -> Result:
        nonlocal now
        for done in (90, 92, 94, 100):  # 90 were there before; each of the others takes 3 s
            now += 3 * (2 if done < 100 else 6) * (done > 90)
            context.progress(done, 100)
        return Result(sections=())

    monkeypatch.setitem(PARTS, "fig1", Part(first, "", {"quick": 6.0, "cpu": 1.0, "paper": 1.0}))
    monkeypatch.setitem(
        PARTS, "fig2", Part(lambda _: Result(sections=()), "", dict(FREE, quick=10.0))
    )
    said: list[str] = []
    config = ReproduceConfig(out=tmp_path, only="fig1,fig2", exports=False)
    reproduce(config, report=said.append)
    assert said == [
        "[1/2] fig1, about 16 s left",
        "    fig1: 92 of 100, about 34 s left",  # 8 more of 3 s, and fig2
        "    fig1: 94 of 100, about 28 s left",
        "[2/2] fig2, about 50 s left",  # fig1 took 30 s for 6
    ]


def test_where_nothing_is_trained_no_hours_are_announced(tmp_path: Path) -> None:
    said: list[str] = []
    config = ReproduceConfig(out=tmp_path, only="fig8", scale="cpu", train=False, exports=False)
    reproduce(config, report=said.append)
    assert said[0] == "[1/1] fig8"


@pytest.mark.slow
def test_a_killed_reproduction_goes_on_where_it_was(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "locater.cli", "reproduce", "--only", "fig1,fig5",
               "--no-exports", "--out", str(tmp_path)]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob("simulate/*/unit-*.json")):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    process.kill()
    process.wait()
    assert not (tmp_path / "index.html").exists()
    kept = {
        path: path.stat().st_mtime_ns
        for path in (*tmp_path.glob("parts/*"), *tmp_path.glob("simulate/*/unit-*.json"))
    }
    assert len(kept) > 1
    subprocess.run(command, check=True, capture_output=True)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert "Fig. 5" in (tmp_path / "index.html").read_text()


def test_an_edited_part_is_never_taken_for_a_result(tmp_path: Path) -> None:
    config, said = ReproduceConfig(out=tmp_path, only="fig4", exports=False), list[str]()
    page = reproduce(config).read_text()
    (part,) = tmp_path.glob("parts/*.json")
    part.write_text(part.read_text().replace("only falls", "only rises"))
    again = reproduce(config, report=said.append).read_text()
    assert "only falls" in page and "only rises" not in again and "only falls" in again
    assert any("is not what was stored there" in one for one in said)


def test_data_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing at .*missing"):
        ReproduceConfig(data=tmp_path / "missing")


def test_a_result_survives_its_json() -> None:
    section = Section(key="h", title="H", chart={"mark": "point"})
    verdict = Verdict(where="Eq. 5", claim="c", outcome="differs", found="2", section="h")
    result = Result(sections=(section,), verdicts=(verdict,), finding="**so** it is")
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_what_the_package_carries_is_found_where_it_lies() -> None:
    """In a wheel beside the module that asks, under the name that it has in the source tree."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    carried = build["targets"]["wheel"]["force-include"]
    assert set(carried) == {"docs/errata.md", "results/lab", "results/reality"}
    for name, place in carried.items():
        assert place == f"locater/paper/{name}" and published(name) == ROOT / name
    assert published("results/none") is None
