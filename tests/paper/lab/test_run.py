"""A run on disk: whole or not at all, and readable from a folder as from one file."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from locater.errors import ConfigError, InputError, LocaterError
from locater.paper.lab.run import Run, RunFolder, describe_environment, rounded
from locater.paper.lab.settings import TrainConfig

CONFIG = TrainConfig(steps=4)
ENVIRONMENT = {"corpus": {"name": "wikitext-2", "digest": "a"}}
TENSORS = {"weight": torch.arange(6.0).view(2, 3)}


def folder(path: Path) -> RunFolder:
    made = RunFolder(path)
    made.open(CONFIG, ENVIRONMENT)
    return made


def test_metrics_after_a_checkpoint_are_cut_when_it_is_restored(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.append({"step": 0, "loss": 2.0})
    run.save(1, TENSORS, {}, {"seconds": 1.5})
    run.append({"step": 2, "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # killed while writing
    checkpoint, said = RunFolder(tmp_path).restore()
    assert checkpoint is not None and said == []
    assert (checkpoint.step, checkpoint.carried) == (1, {"seconds": 1.5})
    assert torch.equal(checkpoint.model["weight"], TENSORS["weight"])
    assert Run.load(tmp_path).records == [{"step": 0, "loss": 2.0}]


def test_without_any_checkpoint_the_metrics_start_again(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.append({"step": 0})
    assert run.restore() == (None, [])
    assert Run.load(tmp_path).records == []


def test_a_checkpoint_in_the_making_is_not_taken_for_one(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.save(1, TENSORS, {}, {})
    (tmp_path / "checkpoints" / "step-00000001").rename(tmp_path / "checkpoints" / ".step-00000002")
    assert run.restore() == (None, [])
    run.save(2, TENSORS, {}, {})  # what was left there is no hindrance
    checkpoint, _ = run.restore()
    assert checkpoint is not None and checkpoint.step == 2


@pytest.mark.parametrize("change", [{"carried": {"seconds": 9.0}}, {"step": 7}, {"digests": []}])
def test_an_edited_manifest_is_not_believed(change: dict[str, object], tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.save(1, TENSORS, {}, {"seconds": 1.0})
    run.save(2, TENSORS, {}, {"seconds": 2.0})
    path = tmp_path / "checkpoints" / "step-00000002" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    checkpoint, said = run.restore()
    assert checkpoint is not None and checkpoint.step == 1
    (sentence,) = said
    assert "manifest.json is not what was written" in sentence


def test_only_one_of_several_processes_writes(tmp_path: Path) -> None:
    folder(tmp_path).append({"step": 0})
    other = RunFolder(tmp_path, is_writer=False)
    other.open(CONFIG, ENVIRONMENT)
    other.append({"step": 1})
    other.save(1, TENSORS, {}, {})
    other.restore()
    assert Run.load(tmp_path).records == [{"step": 0}]
    assert not (tmp_path / "checkpoints").exists()


def test_an_exported_file_is_the_run_without_its_checkpoints(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    run.append({"step": 4, "end": "finished", "entropy": [3.1]})
    run.save(4, TENSORS, {}, {})
    whole = Run.load(tmp_path / "run")
    path = whole.export(tmp_path / "results")
    assert path.name == f"{CONFIG.digest}.jsonl"
    again = Run.load(path)
    assert (again.config, again.environment) == (whole.config, whole.environment)
    assert again.records == whole.records
    assert again.final == whole.final is not None
    assert str(tmp_path) not in path.read_text()


def test_a_full_disk_is_said_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.save(1, TENSORS, {}, {})
    code = f"""
import resource, signal, torch
from pathlib import Path
from locater.errors import LocaterError
from locater.paper.lab.run import RunFolder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    RunFolder(Path({str(tmp_path)!r})).save(2, {{"weight": torch.zeros(10_000)}}, {{}}, {{}})
except LocaterError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout and "the checkpoint before it is whole" in done.stdout
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    checkpoint, said = run.restore()
    assert checkpoint is not None and (checkpoint.step, said) == (1, [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full (Linux)")
def test_metrics_that_cannot_be_written_say_how_to_go_on(tmp_path: Path) -> None:
    run = folder(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(LocaterError, match=r"No space left[\s\S]*goes on from the last checkpoint"):
        run.append({"step": 0})


@pytest.mark.parametrize("text", ["", "{", '{"config": {"stepz": 1}, "environment": {}}'])
def test_what_is_no_run_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(LocaterError, match=r"is not a run|unknown setting 'stepz'"):
        Run.load(path)
    with pytest.raises(InputError, match="is not a run"):
        Run.load(tmp_path / "nowhere")


def test_the_environment_names_versions_and_no_paths() -> None:
    environment = describe_environment({"name": "embedded"})
    text = json.dumps(environment)
    assert torch.__version__.startswith(environment["versions"]["torch"])
    assert str(Path.home()) not in text and str(Path.cwd()) not in text


def test_a_digest_names_the_settings_and_new_ones_leave_it_as_it_is() -> None:
    assert TrainConfig().digest == TrainConfig(seed=0).digest != TrainConfig(seed=1).digest
    assert TrainConfig().changes() == {}
    assert replace(CONFIG, dim=32).changes() == {"steps": 4, "dim": 32}
    assert TrainConfig.from_dict(CONFIG.changes()) == CONFIG


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive"),
        ({"dropout": 1.0}, "dropout must be from 0"),
        ({"weight_decay": float("nan")}, "weight_decay must be zero or more"),
        ({"scale_strength": -1.0}, "scale_strength must be zero or more"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


def test_rounding_reaches_into_lists_and_makes_nan_null() -> None:
    found = rounded({"a": [0.123456789, float("nan")], "b": 3, "c": (1.0,)}, 3)
    assert found == {"a": [0.123, None], "b": 3, "c": [1.0]}
