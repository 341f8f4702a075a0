"""Over the network only headers and the asked tensors travel, and a bad server is found out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.loopback import serving
from tests.checkpoints.test_open import LLAMA, assert_same, forms, llama, write_gguf, write_sharded

from locater import LocaterError, MissingExtraError
from locater.checkpoints import remote
from locater.checkpoints.open import open_checkpoint

LAYER = [f"model.layers.1.self_attn.{child}.weight" for child in ("q_proj", "k_proj")]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once, and through no proxy."""
    monkeypatch.setattr(remote, "BACKOFF", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    remote._opener.cache_clear()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama of which queries and keys are a small part."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = llama() | {"lm_head.weight": torch.zeros(200_000, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_a_files_url_gives_what_the_file_gives_and_moves_a_fraction(model: Path) -> None:
    path = model / "model.safetensors"
    with serving(model) as server:
        url = f"{server.url}/model.safetensors"
        with open_checkpoint(url) as checkpoint:
            assert (checkpoint.name, checkpoint.format) == (url, "safetensors")
            assert checkpoint.config == LLAMA
            there = forms(checkpoint)
            assert checkpoint.bytes_read < path.stat().st_size / 50
            assert server.sent < path.stat().st_size / 50
        with open_checkpoint(path) as local:
            for name, form in forms(local).items():
                assert torch.equal(form.query, there[name].query)
                assert torch.equal(form.key, there[name].key)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folders_url_is_read_with_its_config(
    model: Path, tmp_path: Path, sharded: bool, slash: str
) -> None:
    if sharded:
        write_sharded(tmp_path / "shards", llama())
    with serving(tmp_path) as server:
        url = f"{server.url}/{'shards' if sharded else 'model'}{slash}"
        with open_checkpoint(url) as checkpoint:
            assert checkpoint.config == LLAMA
            expected = {name: tensor for name, tensor in llama().items() if name in LAYER}
            assert_same(checkpoint.read(LAYER), expected)


def test_a_gguf_url_moves_its_header_and_the_asked_tensors(tmp_path: Path) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    big = torch.ones(1 << 15, 32)
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, {"big": (big, kind), "blk.0.attn_q.weight": (weight, kind)})
    with serving(tmp_path) as server, open_checkpoint(f"{server.url}/tiny.gguf") as checkpoint:
        (found,) = checkpoint.read(["blk.0.attn_q.weight"]).values()
        with open_checkpoint(path) as local:
            assert torch.equal(found, local.read(["blk.0.attn_q.weight"]).popitem()[1])
        assert checkpoint.bytes_read < path.stat().st_size / 3
        assert server.sent < path.stat().st_size / 3


def test_a_dropped_connection_is_taken_up_where_it_broke(model: Path) -> None:
    with (
        serving(model) as server,
        open_checkpoint(f"{server.url}/model.safetensors") as checkpoint,
    ):
        server.drops, server.sent, before = 3, 0, checkpoint.bytes_read
        server.requests.clear()
        found = checkpoint.read(["lm_head.weight"])
        assert_same(found, {"lm_head.weight": torch.zeros(200_000, dtype=torch.bfloat16)})
        assert server.drops == 0
        assert checkpoint.bytes_read - before == server.sent == 400_000  # no byte twice
        starts = [int(str(asked)[6:].split("-")[0]) for _, asked, _ in server.requests]
        assert [start - starts[0] for start in starts] == [0, 200_000, 300_000, 350_000]


def test_a_server_that_always_drops_is_given_up(model: Path) -> None:
    with (
        serving(model) as server,
        open_checkpoint(f"{server.url}/model.safetensors") as checkpoint,
    ):
        server.drops = 10**6
        with pytest.raises(LocaterError, match=r"in 6 attempts.*closed early"):
            checkpoint.read(["lm_head.weight"])


def test_a_busy_server_is_asked_again(model: Path) -> None:
    with (
        serving(model, busy=3) as server,
        open_checkpoint(f"{server.url}/model.safetensors") as checkpoint,
    ):
        assert checkpoint.read(LAYER).keys() == set(LAYER)
    with (
        serving(model, busy=10**6) as server,
        pytest.raises(LocaterError, match=r"6 attempts; the last one: HTTP 503"),
    ):
        open_checkpoint(f"{server.url}/model.safetensors")


def test_pauses_grow_and_a_server_may_ask_for_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    said: list[str] = []
    monkeypatch.setattr(remote, "BACKOFF", 0.5)
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    for failures in range(remote.RETRIES):
        remote._BrokenError("busy", 3.0).wait(failures, remote._Clock("it"), said.append)
    assert pauses == [3.0, 3.0, 3.0, 4.0, 8.0]
    assert said[0] == "waiting for it: busy; trying again in 3 s"
    with pytest.raises(remote.UnreachableError):
        remote._BrokenError("busy").wait(remote.RETRIES, remote._Clock("it"), said.append)
    monkeypatch.setattr(remote, "PATIENCE", 2.0)
    with pytest.raises(remote.UnreachableError, match="in 1 attempts; the last one: busy"):
        remote._BrokenError("busy", 3.0).wait(0, remote._Clock("it"), said.append)
    assert remote._retry_after("7") == 7
    assert remote._retry_after("Thu, 01 Jan 1970 00:00:00 GMT") < 0
    assert remote._retry_after("soon") == 0


def test_a_server_without_ranges_may_send_a_small_file_and_no_large_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model, ranges=False) as server:
        with open_checkpoint(f"{server.url}/model.safetensors") as checkpoint:
            expected = load_file(model / "model.safetensors")
            assert_same(checkpoint.read(LAYER), {name: expected[name] for name in LAYER})
            assert checkpoint.bytes_read == (model / "model.safetensors").stat().st_size
        monkeypatch.setattr(remote, "LARGEST_WHOLE", 10_000)
        server.sent = 0
        with pytest.raises(LocaterError, match=r"ignores byte ranges, and would send") as caught:
            open_checkpoint(f"{server.url}/model.safetensors")
        assert "honors ranges" in str(caught.value.hint)
        assert "at most 10,000" in caught.value.message


def test_a_large_file_from_a_server_without_ranges_is_refused_unread(model: Path) -> None:
    with (
        serving(model, ranges=False, announced=140 * 10**9) as server,
        pytest.raises(LocaterError, match="would send 140,000,000,000 bytes"),
    ):
        open_checkpoint(f"{server.url}/model.safetensors")


LIES = {
    "another size": ({"Content-Range": "bytes 0-63/7"}, 0, "bytes 0 to 63 for the first|for 7"),
    "no size": ({"Content-Range": "bytes 0-63/*"}, 0, "the Content-Range 'bytes 0-63/\\*'"),
    "no range": ({"Content-Range": "everything"}, 0, "the Content-Range 'everything'"),
    "a range further on": ({"Content-Range": "bytes 8-71/999"}, 0, "bytes 8 to 71 for the first"),
    "a length that differs": ({"Content-Length": "65"}, 0, "a Content-Length of 65 for 64 bytes"),
    "a later range that differs": ({"Content-Range": "bytes 1-2/3"}, 1, "'bytes 1-2/3' for bytes"),
    "a later length that differs": ({"Content-Length": "9"}, 1, "a Content-Length of 9 for"),
    "another file": ({"ETag": '"2"'}, 1, "was replaced on the server while it was being read"),
    "compressed": ({"Content-Encoding": "gzip"}, 0, "compresses what it sends"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_about_sizes_is_found_out(model: Path, lie: str) -> None:
    headers, lie_after, message = LIES[lie]
    (model / "config.json").unlink()
    with (
        serving(model, headers=headers, lie_after=lie_after) as server,
        pytest.raises(LocaterError, match=message),
    ):
        remote_file = remote.RemoteFile(f"{server.url}/model.safetensors")
        remote_file.read_into(0, memoryview(bytearray(500)))


def test_a_size_that_is_too_large_is_refused_by_the_header(model: Path) -> None:
    size = (model / "model.safetensors").stat().st_size
    with (
        serving(model, headers={"Content-Range": f"bytes 0-63/{size + 5}"}) as server,
        pytest.raises(LocaterError, match="contradict each other"),
    ):
        open_checkpoint(f"{server.url}/model.safetensors")


def test_what_is_not_there_or_not_allowed_says_so(model: Path) -> None:
    with serving(model) as server:
        with pytest.raises(LocaterError, match=r"nothing\.safetensors does not exist \(HTTP 404\)"):
            open_checkpoint(f"{server.url}/nothing.safetensors")
        with pytest.raises(LocaterError, match="holds no checkpoint; it holds nothing"):
            open_checkpoint(f"{server.url}/nowhere")
        (model / "empty.safetensors").touch()
        with pytest.raises(LocaterError, match="has 0 bytes"):
            open_checkpoint(f"{server.url}/empty.safetensors")
        torch.save(llama(), model / "model.bin")
        with pytest.raises(LocaterError, match="is a pickle, which cannot be read by ranges"):
            open_checkpoint(f"{server.url}/model.bin")
        index = {"weight_map": {"a": "gone.safetensors"}}
        (model / "x.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(LocaterError, match=r"gone\.safetensors does not exist"):
            open_checkpoint(f"{server.url}/x.safetensors.index.json")
    with serving(model, token="secret") as server:
        with pytest.raises(LocaterError, match=r"may not be read \(HTTP 401\)") as caught:
            open_checkpoint(f"{server.url}/model.safetensors")
        assert "HF_TOKEN" in str(caught.value.hint)


def test_a_closed_port_is_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(LocaterError, match=r"6 attempts.*refused") as caught:
            open_checkpoint(f"http://127.0.0.1:{taken.getsockname()[1]}/model.safetensors")
    assert "check the address" in str(caught.value.hint)


def test_secrets_in_an_address_are_not_shown() -> None:
    url = "https://me:word@host/a/b.safetensors?signature=x#part"
    assert remote.shown(url) == "https://host/a/b.safetensors"


# the hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A hub cache of our own, and no token but ours."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "secret")
    yield monkeypatch


def point_to(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What HF_ENDPOINT does when it is set before huggingface_hub is imported."""
    from huggingface_hub import constants

    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_a_hub_id_is_read_by_ranges_with_a_token_that_its_storage_never_sees(
    model: Path, hub: pytest.MonkeyPatch
) -> None:
    size = (model / "model.safetensors").stat().st_size
    with serving(model) as storage, serving(model, token="secret", redirect=storage.url) as server:
        point_to(hub, server.url)
        with open_checkpoint("org/name@some/branch") as checkpoint:
            assert checkpoint.config == LLAMA
            expected = load_file(model / "model.safetensors")
            assert_same(checkpoint.read(LAYER), {name: expected[name] for name in LAYER})
        paths = [path for path, _, _ in server.requests]
        assert paths[0] == "/api/models/org/name/revision/some/branch"
        assert "/org/name/resolve/0123abc/model.safetensors" in paths  # one commit throughout
        assert all(authorization == "Bearer secret" for *_, authorization in server.requests)
        assert storage.requests
        assert all(authorization is None for *_, authorization in storage.requests)
        assert 0 < storage.sent < size / 50


def test_hub_repositories_that_are_not_there_or_not_allowed_say_so(
    model: Path, hub: pytest.MonkeyPatch
) -> None:
    with serving(model) as server:
        point_to(hub, server.url)
        with pytest.raises(LocaterError, match="org/other at main is neither a path here nor on"):
            open_checkpoint("org/other")
        page = "https://huggingface.co/org/name/blob/main/model.safetensors"
        with open_checkpoint(page) as one:
            assert one.config == LLAMA
        with pytest.raises(LocaterError, match=r"org/name/model\.safetensors does not exist"):
            open_checkpoint("org/name/model.safetensors")  # two slashes: a path
        (model / "model.safetensors").rename(model / "notes.txt")
        with pytest.raises(LocaterError, match="org/name holds no checkpoint"):
            open_checkpoint("org/name")
        server.token = "another"
        with pytest.raises(LocaterError, match="HTTP 401"):
            open_checkpoint("org/name")


@pytest.mark.parametrize(
    ("page", "revision"),
    [
        ("", "main"),
        ("/tree/v1.0", "v1.0"),
        ("/blob/refs%2Fpr%2F3/model.safetensors", "refs/pr/3"),
        ("/resolve/main/model.safetensors?download=true", "main"),
    ],
)
def test_pages_of_the_hub_are_read_as_hub_ids(
    model: Path, hub: pytest.MonkeyPatch, page: str, revision: str
) -> None:
    with serving(model, token="secret") as server:
        point_to(hub, server.url)
        with open_checkpoint(f"https://huggingface.co/org/name{page}") as checkpoint:
            assert checkpoint.config == LLAMA
        assert server.requests[0][0] == f"/api/models/org/name/revision/{revision}"


def fill_cache(cache: Path, model: Path, commit: str) -> None:
    """What a download leaves behind."""
    folder = cache / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(file)


def test_what_was_downloaded_is_read_from_the_cache(
    model: Path, tmp_path: Path, hub: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    fill_cache(tmp_path / "cache", model, "0123abc")
    with serving(model) as server:
        point_to(hub, server.url)
        with open_checkpoint("org/name") as checkpoint:
            assert checkpoint.caveats == ()
            checkpoint.read(LAYER)
        assert [path for path, *_ in server.requests] == ["/api/models/org/name/revision/main"]
        server.commit = "4567def"  # the author has pushed since
        with open_checkpoint("org/name") as newer:
            newer.read(LAYER)
        assert len(server.requests) > 4
    with open_checkpoint("org/name") as cached:  # the server is gone
        assert "the hub could not be reached" in cached.caveats[0]
        assert cached.read(LAYER).keys() == set(LAYER)
    hub.setattr(constants, "HF_HUB_OFFLINE", True)
    with open_checkpoint("org/name") as offline:
        assert "HF_HUB_OFFLINE is set" in offline.caveats[0]
    with pytest.raises(
        LocaterError, match="org/other is neither a path here nor in the hub"
    ) as caught:
        open_checkpoint("org/other")
    assert str(caught.value.hint).endswith("run: hf download org/other")


def test_hf_endpoint_in_the_environment_is_honored(model: Path, tmp_path: Path) -> None:
    code = (
        "from locater.checkpoints.open import open_checkpoint\n"
        "with open_checkpoint('org/name') as found:\n"
        "    print(found.config['rope_theta'], len(found.shapes))\n"
    )
    with serving(model, token="mine") as server:
        environment = os.environ | {
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": "mine",
            "HF_HOME": str(tmp_path / "home"),
            "no_proxy": "127.0.0.1",
        }
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
        )
    assert (done.stdout, done.returncode) == ("500000.0 14\n", 0), done.stderr


def test_the_hub_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'locater\[hub\]'"):
        open_checkpoint("org/name")


def test_a_server_that_trickles_is_left(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte every 20 ms would take hours; patience grows with the bytes and has an end."""
    monkeypatch.setattr(remote, "PATIENCE", 0.5)
    monkeypatch.setattr(remote, "SLOWEST", 1 << 20)
    with serving(model, trickle=0.02) as server:
        began = time.monotonic()
        with pytest.raises(LocaterError, match=r"the server is too slow; [\d,]+ bytes are missing"):
            open_checkpoint(f"{server.url}/model.safetensors")
        assert time.monotonic() - began < 10


def test_a_dead_server_is_left_in_time_and_somebody_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes connections and never answers: 6 attempts of 30 s were 196 s."""
    monkeypatch.setattr(remote, "TIMEOUT", 0.2)
    monkeypatch.setattr(remote, "PATIENCE", 1.0)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(LocaterError, match="could not be read in"):
            open_checkpoint(
                f"http://127.0.0.1:{silent.getsockname()[1]}/model.safetensors", say=said.append
            )
        assert time.monotonic() - began < 20
    assert said
    assert said[0].startswith("waiting for http://127.0.0.1")


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}), ({"ETag": '"a"'}, {"ETag": '"b"'})],
)
def test_a_file_that_changes_on_the_server_is_noticed_by_what_it_has(
    model: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    first = {"Last-Modified": "Wed, 31 Dec 2025 00:00:00 GMT"} | before
    with serving(model, etag=None, headers=first) as server:
        checkpoint = open_checkpoint(f"{server.url}/model.safetensors")
        assert not any("could change" in caveat for caveat in checkpoint.caveats)
        server.headers = first | after
        with checkpoint, pytest.raises(LocaterError, match="was replaced on the server"):
            checkpoint.read(LAYER)


def test_a_file_that_cannot_be_pinned_says_so(model: Path) -> None:
    with (
        serving(model, etag=None) as server,
        open_checkpoint(f"{server.url}/model.safetensors") as checkpoint,
    ):
        assert any("no ETag, no Last-Modified" in caveat for caveat in checkpoint.caveats)


def test_a_password_in_the_address_travels_as_a_header_and_is_never_shown(model: Path) -> None:
    with serving(model, password="me:secret") as server:
        host = server.url.removeprefix("http://")
        with open_checkpoint(f"http://me:secret@{host}/model.safetensors") as checkpoint:
            assert checkpoint.read(LAYER).keys() == set(LAYER)
        with pytest.raises(LocaterError, match="may not be read") as caught:
            open_checkpoint(f"http://me:wrong@{host}/model.safetensors")
        assert "wrong" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://[::1/model.safetensors", "http://host:port/model.safetensors",
            "http://[fe80::1%25eth0]:99999/model.safetensors"],
)  # fmt: skip
def test_an_address_that_is_none_says_so(url: str) -> None:
    with pytest.raises(LocaterError, match="is no address"):
        open_checkpoint(url)


def test_a_range_of_five_thousand_digits_is_a_lie(model: Path) -> None:
    lie = {"Content-Range": f"bytes 0-63/{'9' * 5000}"}
    with (
        serving(model, headers=lie) as server,
        pytest.raises(LocaterError, match="contradict each other"),
    ):
        open_checkpoint(f"{server.url}/model.safetensors")


@pytest.mark.parametrize("path", ["./modle/x.safetensors", "modle/sub/x.safetensors", "~/nothing/x",
                                  "/nothing/x", "here/step-500", "../x/y"])  # fmt: skip
def test_what_looks_like_a_path_is_never_asked_for(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote, "_answer", None)  # any request would be a TypeError
    with pytest.raises(LocaterError, match=r"does not exist|neither a path here"):
        open_checkpoint(path)


def test_a_name_of_the_hub_is_said_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def ask(self: object, endpoint: str) -> None:
        assert said == ["org/name is not found here; asking the hub"]
        raise remote.UnreachableError("no network")

    monkeypatch.setattr(remote.HubRepository, "_ask", ask)
    with pytest.raises(LocaterError, match="neither a path here nor"):
        open_checkpoint("org/name", say=said.append)
    with pytest.raises(LocaterError, match="neither a path here nor a name that the hub can have"):
        said.clear()
        said.append("org/name is not found here; asking the hub")
        open_checkpoint("a--b../c..d", say=lambda _: None)
