import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import locater
from locater import QKForm, TokenProcess, propagation
from locater.cli import _COMMANDS, main
from locater.cli.terminal import flag, print_json, with_first
from locater.files import write_file

THEORY = ["theory", "--xi", "5", "--eta", "0.1", "--tokens", "40", "--dim", "128"]


def test_help_lists_every_command_without_importing_torch() -> None:
    script = (
        "import sys; from locater.cli import main; code = main(['--help']); "
        "assert code == 0; assert 'torch' not in sys.modules and 'tyro' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in _COMMANDS)


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_of_a_command_ends_in_its_example_and_offers_json(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "--json" in out
    assert out.rstrip().endswith(_COMMANDS[command][1])


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_flag_is_described_in_words(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    out = capsys.readouterr().out
    assert "None" not in out
    flags = re.split(r"\n[│ ] (?=--[a-z])", out.partition("example:")[0])[1:]
    assert len(flags) > 3
    for flag_help in flags:
        words = re.sub(r"\((default|required).*", "", flag_help, flags=re.DOTALL)
        words = re.sub(r"--[a-z-]+,?|[A-Z]{3,}|\{[^}]*\}|[\[\]|. ]", " ", words)
        assert re.search(r"[a-z]{2,}", words), flag_help


def test_quiet_says_nothing_but_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figure.json"
    assert main([*THEORY, "--out", str(out)]) == 0
    assert "wrote" in capsys.readouterr().err
    assert main(["--quiet", *THEORY, "--out", str(out)]) == 0
    quiet = capsys.readouterr()
    assert quiet.err == "" and "regime: late" in quiet.out
    assert main(["simulat", "--quiet"]) == 2
    assert "did you mean simulate?" in capsys.readouterr().err


def test_the_shell_completes_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    for words, place, wanted in (
        ("locater the", 1, "theory theories" if "theories" in _COMMANDS else "theory"),
        ("locater theory --x", 2, "--xi"),
    ):
        line = f"COMP_WORDS=({words}); COMP_CWORD={place}; _locater; echo ${{COMPREPLY[@]}}"
        result = subprocess.run(["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True)
        assert (result.stdout.strip(), result.stderr) == (wanted, "")


def test_theory_prints_the_numbers_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*THEORY, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    exact = [record["rho"] for record in data["curves"] if record["curve"].startswith("exact")]
    form = QKForm.from_xi_eta(5.0, 0.1, dim=128)
    assert exact == propagation(form, TokenProcess.random_walk(40)).rho.tolist()
    assert data["regime"] == "late"


def test_theory_without_a_file_is_a_table_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(THEORY) == 0
    captured = capsys.readouterr()
    assert "as printed" in captured.out
    assert "regime: late" in captured.out
    assert captured.err == ""
    assert max(map(len, captured.out.splitlines())) <= 100


def test_theory_knows_other_processes(capsys: pytest.CaptureFixture[str]) -> None:
    regimes = {}
    for process in ("random-walk", "autoregressive", "independent"):
        assert main([*THEORY, "--process", process, "--json"]) == 0
        regimes[process] = json.loads(capsys.readouterr().out)["tokens_on"]
    assert regimes == {"random-walk": 22, "autoregressive": 40, "independent": 40}


@pytest.mark.parametrize(
    ("suffix", "opening"),
    [(".html", b"<!doctype html>"), (".svg", b"<svg"), (".png", b"\x89PNG"), (".pdf", b"%PDF")],
)
def test_theory_draws_in_every_format(suffix: str, opening: bytes, tmp_path: Path) -> None:
    path = tmp_path / "made" / f"figure{suffix}"
    assert main([*THEORY, "--out", str(path)]) == 0
    assert path.read_bytes().lstrip().startswith(opening)
    assert suffix != ".html" or b"https://cdn" not in path.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, ""),
        (["dance"], 2, "unknown command 'dance'"),
        (["theory", "--xi", "5"], 2, "--eta"),
        (["theory", "--xi", "5", "--eta", "x"], 2, "x"),
        (["theory", "--xi", "50", "--eta", "1"], 1, "hint: Eq. 5 asks for"),
        ([*THEORY, "--tokens", "1"], 1, "at least 2 tokens"),
        ([*THEORY, "--out", "figure.bmp"], 1, "cannot write a figure as 'figure.bmp'"),
        ([*THEORY, "--out", "/proc/nowhere/figure.svg"], 1, "cannot write"),
        (["reproduce", "--only", "fig99"], 1, "unknown part 'fig99'"),
    ],
)
def test_mistakes_have_an_exit_code_and_say_what_to_do(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["theory --xi 5 --eta 0.1", "theory --xi 5 --eta 0.1 --json", "sweep --help"]
)
def test_a_closed_pipe_is_no_error(line: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "locater.cli", *line.split()]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


def test_json_has_null_where_a_number_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"xi": math.nan, "rows": [1.0, math.inf]})
    assert json.loads(capsys.readouterr().out) == {"xi": None, "rows": [1.0, None]}


@pytest.mark.parametrize(
    "arguments",
    [
        ["audit", "no-model", "--out", "map.jpg"],
        ["audit", "no-model", "--out", "map.svg", "--color", "mood"],
        ["probe", "no-model", "--text", "no-text", "--out", "page.doc"],
        ["simulate", "fig5", "--out", "figure"],
        ["sweep", "fig6-cpu", "--figure", "figure.bmp"],
        ["audit", ""],
        ["audit", "no-model", "--top", "-1"],
        ["compare", "no-model", "no-model", "--top", "-1"],
        ["what-if", "no-model", "--top", "-1"],
        ["theories", "no-model", "--layers", "["],
    ],
)
def test_flags_that_cannot_work_are_refused_before_the_work(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    told = capsys.readouterr().err
    words = "cannot write", "no map", "no checkpoint is named", "top must be", "no regular"
    assert any(word in told for word in words)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full (Linux)")
def test_output_that_does_not_fit_is_an_error_of_one_line() -> None:
    command = f"{sys.executable} -m locater.cli theory --xi 5 --eta 0.1 --json > /dev/full"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: the output cannot be written: No space left")


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_file(pipe, "rows")
    reader.join()
    assert found == ["rows"] and pipe.is_fifo()


def test_names_from_files_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "nowhere/\x1b[2J\x07"]) == 1
    told = capsys.readouterr().err
    assert "\x1b" not in told and "\x07" not in told and "\nhint: " in told


def test_a_flag_of_the_settings_changes_every_panel_and_the_rest_stays(tmp_path: Path) -> None:
    sizes = ["--draws", "1", "--sequences", "4", "--model", "4", "--tokens", "4", "--means", "1"]
    out = tmp_path / "chart.json"
    flags = [*sizes, "--scales", "0.1", "--workers", "1", "--store", str(tmp_path / "kept")]
    assert main(["simulate", "fig5", *flags, "--panels", "W_QK", "--out", str(out)]) == 0
    assert out.stat().st_size
    stored = [json.loads(path.read_text()) for path in (tmp_path / "kept").rglob("unit-*.json")]
    assert {(one["kept"]["mean"], one["kept"]["scale"]) for one in stored} == {(1.0, 0.1)}


def test_a_preset_is_read_before_the_flags_whose_defaults_it_decides() -> None:
    for arguments in (["tiny"], ["--preset", "tiny"], ["--seed", "1", "--preset=tiny"]):
        assert flag("preset", with_first("preset", arguments), "fig5") == "tiny"
    assert flag("preset", with_first("preset", ["--seed", "1"]), "fig5") == "fig5"


@pytest.mark.parametrize(
    ("missing", "extra", "command"),
    [
        ("altair", "report", "report model --out {out}.html"),
        ("accelerate", "lab", "sweep tiny --out {out}"),
    ],
)
def test_a_missing_package_is_named_at_once_with_what_installs_it(
    missing: str, extra: str, command: str, samples: Path, tmp_path: Path
) -> None:
    """Through the program, in an interpreter that cannot import it."""
    absent = f"raise ModuleNotFoundError('No module named {missing}', name={missing!r})"
    (tmp_path / f"{missing}.py").write_text(absent)
    paths = [str(tmp_path), str(Path(locater.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-m", "locater.cli", *command.format(out=tmp_path / "out").split()],
        capture_output=True, text=True, check=False, cwd=samples,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {missing} is not installed.\nhint: run: pip install")
    assert done.stderr.endswith(f"'locater[{extra}]'\n")


def test_whatever_escapes_is_one_message_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(arguments: list[str]) -> None:
        raise KeyError("a \x1b[2J name")

    monkeypatch.setattr("locater.cli.theory.do_theory", broken)
    assert main(["theory"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and "\x1b" not in told.err and "Traceback" not in told.err
    assert told.err.startswith("error: this should not have happened: KeyError: ")
    assert "\nhint: LOCATER_TRACEBACK=1 " in told.err
    monkeypatch.setenv("LOCATER_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["theory"])


def test_a_file_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(arguments: list[str]) -> None:
        raise PermissionError(13, "Permission denied", "secret.txt")

    monkeypatch.setattr("locater.cli.theory.do_theory", broken)
    assert main(["theory"]) == 1
    assert capsys.readouterr().err.startswith("error: secret.txt: Permission denied.\nhint: ")


@pytest.mark.parametrize(
    "command",
    ["audit org/name", "audit org/name --text text.txt", "compare model org/name",
     "report org/name --out {out}", "probe org/name --text text.txt",
     "explain org/name --text text.txt"],
)  # fmt: skip
def test_every_command_says_that_it_asks_the_hub_before_it_waits(
    command: str,
    samples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import transformers

    from locater.checkpoints import remote

    asked: list[str] = []

    def ask(*_: object, **__: object) -> None:
        asked.append(capsys.readouterr().err)
        raise remote.UnreachableError("no network")

    monkeypatch.setattr(remote.HubRepository, "_ask", ask)
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", ask)
    monkeypatch.chdir(samples)
    assert main(command.format(out=tmp_path / "page.html").split()) == 1
    assert asked[0].endswith("org/name is not found here; asking the hub\n")
    assert "\nhint: " in capsys.readouterr().err


def test_a_model_that_takes_long_says_so(
    samples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    def slow(*_: object, **__: object) -> None:
        for _ in range(100):
            time.sleep(0.05)
            if "still waiting" in (told := capsys.readouterr().err):
                raise OSError(told)
        raise OSError("nothing was said")

    monkeypatch.setattr("locater.models.loading.PATIENCE", 0.1)
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", slow)
    monkeypatch.chdir(samples)
    assert main(["probe", "model", "--text", "text.txt"]) == 1
    assert "still waiting for model, 0 s so far" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["./modle", "model/step-500", "a/b/c", "~/nothing", "/nothing"])
def test_a_misspelt_path_of_a_model_is_never_asked_for(
    path: str, samples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    monkeypatch.setattr(transformers, "AutoModel", None)
    monkeypatch.chdir(samples)
    assert main(["probe", path, "--text", "text.txt"]) == 1
    assert capsys.readouterr().err.startswith("error: there is no ")
