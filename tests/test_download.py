"""Data from a dataset repository, by the real client from a stand-in of the Hub on this machine."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from driver import wait_for
from hub_server import TOKENS, Hub
from test_prepare import build, sentences, texts_of
from test_sources import ROOT, all_bytes, lines, parquet

from data import download, prepare

REPO = "datasets/owner/web"


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "hub", large=1000) as hub:
        hub.create(REPO)
        folder = texts_of(tmp_path / "local", {f"{i}.jsonl": lines([sentences(10 * i + j, 200) for j in range(40)])
                                               for i in range(3)})
        parquet(folder / "3.parquet", [sentences(100 + j, 200) for j in range(40)])
        hub.commit(REPO, {f"data/{name}": content for name, content in all_bytes(folder).items()}
                   | {"README.md": b"what this is", "other/0.jsonl": lines(["other"])})
        yield hub
    assert not hub.errors


SCRIPT = """
import sys
from data import building, prepare, sources
sources.CHUNK, building.SAVE_S = 2000, 0
sys.exit(prepare.main(sys.argv[1:]))
"""


def command(hub, tmp_path, *words, given=("hf:owner/web",)):
    return started(hub, tmp_path, "build", *given, "--out", tmp_path / "out", "--glob=data/*", *words)


def started(hub, tmp_path, *words):
    words = list(map(str, words))
    environment = hub.environment(tmp_path / "home", "read") | {"PYTHONPATH": ROOT}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *words], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=environment)


def done(hub, tmp_path, *words, **more):
    """(exit status, stderr) of a build."""
    process = command(hub, tmp_path, *words, **more)
    return process.wait(60), process.communicate()[1]


def downloads(hub, name):
    """The requests for the bytes of a file."""
    return [record for record in hub.requests(rf"GET .*{name}") if record["status"] in (200, 206)]


def test_the_same_bytes_as_from_files_here(hub, tmp_path):
    raw = []

    def look(hub, record):
        folder = tmp_path / ".out.building" / "raw" / "data"
        if record["line"].startswith("GET") and folder.exists():
            raw.append(len([path for path in folder.iterdir() if path.suffix != ".incomplete"]))

    hub.after_request = look
    assert done(hub, tmp_path) == (0, "")
    build(tmp_path / "wanted", tmp_path / "local")
    for name in ("train-00000.bin", "val-00000.bin"):
        assert all_bytes(tmp_path / "out")[name] == all_bytes(tmp_path / "wanted")[name]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [(row["name"], row["revision"], row["documents"]) for row in manifest["sources"]] == [
        ("hf:owner/web", hub.head(REPO), 160)]
    assert len(raw) > 3 and max(raw) <= 2, "one that is read, and one that comes"
    assert sorted(os.listdir(tmp_path)) == ["hub", "local", "out", "wanted"]


def test_a_revision_is_what_is_built(hub, tmp_path):
    old = hub.head(REPO)
    hub.commit(REPO, {"data/0.jsonl": lines(["changed"] * 3)})
    assert done(hub, tmp_path) == (0, "")
    new = all_bytes(tmp_path / "out")
    assert done(hub, tmp_path, f"--out={tmp_path / 'old'}", given=[f"hf:owner/web@{old}"])[0] == 0
    assert new["train-00000.bin"] != all_bytes(tmp_path / "old")["train-00000.bin"]
    for name, commit in (("out", hub.head(REPO)), ("old", old)):
        assert json.loads((tmp_path / name / "manifest.json").read_text())["sources"][0]["revision"] == commit


def test_what_is_kept_stays_in_the_cache_of_the_client(hub, tmp_path):
    assert done(hub, tmp_path, "--keep-raw") == (0, "")
    kept = {path.name for path in (tmp_path / "home").rglob("snapshots/*/data/*")}
    assert kept == {"0.jsonl", "1.jsonl", "2.jsonl", "3.parquet"}
    before = len(downloads(hub, "1.jsonl"))
    assert done(hub, tmp_path, "--keep-raw", f"--out={tmp_path / 'again'}") == (0, "")
    assert len(downloads(hub, "1.jsonl")) == before
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "again")


def test_killed_while_it_downloads_it_goes_on(hub, tmp_path):
    fault = hub.add_fault("hang", "GET .*2.jsonl")
    process = command(hub, tmp_path)
    assert hub.wait_for("GET .*2.jsonl")
    journal = tmp_path / ".out.building" / "journal.json"
    wait_for(lambda: journal.exists() and json.loads(journal.read_text())["place"][0] == 1, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.faults.remove(fault)
    files = {name: len(downloads(hub, name)) for name in ("0.jsonl", "2.jsonl")}
    assert done(hub, tmp_path) == (0, "")
    assert len(downloads(hub, "0.jsonl")) == files["0.jsonl"], "a file that is in the shards is not downloaded again"
    assert len(downloads(hub, "2.jsonl")) > files["2.jsonl"]
    build(tmp_path / "wanted", tmp_path / "local")
    assert all_bytes(tmp_path / "out")["train-00000.bin"] == all_bytes(tmp_path / "wanted")["train-00000.bin"]


def test_the_next_file_comes_while_one_is_read(tmp_path, monkeypatch):
    began, names = [], [f"hf:me/web@c/{i}" for i in range(4)]
    there = {name: threading.Event() for name in names}

    def fetched(name, folder):
        began.append(name[-1])
        path = tmp_path / name[-1]
        if name.endswith("1") and began.count("1") == 1:
            raise OSError("an outage that is over when the file is wanted")
        path.write_text(name)
        there[name].set()
        return path

    monkeypatch.setattr(download, "fetched", fetched)
    fetch = download.Ahead(names, tmp_path)
    for _ in range(2):  # a build may go over its files again
        began.clear()
        for event in there.values():
            event.clear()
        for number, name in enumerate(names):
            with fetch(name) as path:
                assert path.read_text() == name
                if number in (1, 2):
                    assert there[names[number + 1]].wait(20)
                    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == 2
            assert not path.exists()
        assert began == ["0", "1", "1", "2", "3"] and not list(tmp_path.iterdir())


def test_an_outage_is_said_and_what_is_there_is_kept(hub, tmp_path):
    hub.add_fault("status", "2.jsonl", code=404, times=0)
    status, message = done(hub, tmp_path)
    assert status == 2 and "the Hub did not give hf:owner/web@" in message and "/data/2.jsonl" in message
    assert "Traceback" not in message and TOKENS["read"] not in message
    assert f"what is done is kept in {tmp_path / '.out.building'}; the same command goes on" in message
    hub.faults.clear()
    assert done(hub, tmp_path) == (0, "")


@pytest.mark.parametrize("given, glob, text", [
    ("hf:owner/web", "nothing/*", "no file of owner/web at"), ("hf:owner/web", "nothing/*", "data/0.jsonl, data/1"),
    ("hf:owner/none", "", "the dataset owner/none at main"), ("hf:web", "", "write hf:owner/name"),
    ("hf:owner/web@nobranch", "", "the dataset owner/web at nobranch")])
def test_what_is_not_there_is_said(hub, tmp_path, given, glob, text):
    status, message = done(hub, tmp_path, f"--glob={glob}", given=[given])
    assert status == 2 and text in message and "Traceback" not in message and TOKENS["read"] not in message
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.building").exists()


def test_without_a_glob_parquet_and_json_lines_are_taken(hub, tmp_path):
    assert done(hub, tmp_path, "--glob=") == (0, "")
    row, = json.loads((tmp_path / "out" / "manifest.json").read_text())["sources"]
    assert row["documents"] == 161


# -- what was damaged, fetched again


@pytest.fixture
def shards(hub, tmp_path):
    """A data folder, and its shards on the Hub: one under another name, so large that the Hub knows its hash."""
    command = ["build", tmp_path / "local", "--out", tmp_path / "data", "--shard-tokens=20000", "--val-ratio=0.1"]
    assert prepare.main([str(word) for word in command]) == 0
    files = all_bytes(tmp_path / "data")
    hub.create("datasets/owner/shards")
    names = {"train-00000.bin": "old/web_000007.bin"}
    hub.commit("datasets/owner/shards", {names.get(name, name): content for name, content in files.items()})
    return tmp_path / "data"


def verified(hub, tmp_path, *words):
    process = started(hub, tmp_path, "verify", tmp_path / "data", *words)
    return process.wait(60), *process.communicate()


def damage(folder):
    flipped = bytearray((folder / "train-00000.bin").read_bytes())
    flipped[50] ^= 1
    (folder / "train-00000.bin").write_bytes(flipped)
    os.truncate(folder / "train-00001.bin", 10)
    os.remove(folder / "val-00000.bin")


def test_repair_fetches_what_is_damaged_and_nothing_else(hub, shards, tmp_path):
    whole = all_bytes(shards)
    (tmp_path / "linked.bin").hardlink_to(shards / "train-00000.bin")
    damage(shards)
    linked = (tmp_path / "linked.bin").read_bytes()
    assert verified(hub, tmp_path)[0] == 1
    status, said, message = verified(hub, tmp_path, "--repair=owner/shards")
    assert status == 0 and "every shard is what the manifest says" in said, message
    assert "train-00000.bin: sha256 is" in message and "3 of 3 file(s) fetched again from owner/shards" in message
    assert all_bytes(shards).keys() - {"verified.json"} == whole.keys(), "and nothing is left beside them"
    assert all_bytes(shards).items() > whole.items()
    assert (tmp_path / "linked.bin").read_bytes() == linked
    assert not downloads(hub, "train-00002.bin")


def test_repair_takes_no_file_with_another_hash(hub, shards, tmp_path):
    damage(shards)
    hub.commit("datasets/owner/shards", {"train-00001.bin": b"\1\0" * 20000})
    damaged = (shards / "train-00001.bin").read_bytes()
    status, _, message = verified(hub, tmp_path, "--repair=owner/shards@main")
    assert status == 1 and "train-00001.bin: hf:owner/shards@" in message and "2 of 3 file(s)" in message, message
    assert (shards / "train-00001.bin").read_bytes() == damaged
    status, _, message = verified(hub, tmp_path, "--repair=owner/web")
    assert status == 1 and "train-00001.bin: owner/web has no file with its sha256 or its name" in message
    status, _, message = verified(hub, tmp_path, "--repair=web")
    assert status == 2 and "--repair is 'web'; write owner/name" in message
    assert verified(hub, tmp_path, "--repair=owner/none")[0] == 2


def test_repair_fetches_a_lost_tokenizer_too(hub, tmp_path):
    train = ["train-tokenizer", tmp_path / "local", "--vocab-size=300", "--out", tmp_path / "own.json"]
    assert prepare.main([str(word) for word in train]) == 0
    build(tmp_path / "data", tmp_path / "local", tokenizer=str(tmp_path / "own.json"))
    hub.create("datasets/owner/shards")
    hub.commit("datasets/owner/shards", all_bytes(tmp_path / "data"))
    (tmp_path / "data" / "tokenizer.json").unlink()
    status, _, message = verified(hub, tmp_path, "--repair=owner/shards")
    assert status == 0 and "1 of 1 file(s) fetched again" in message, message
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == (tmp_path / "own.json").read_bytes()


# -- a tokenizer by its name


def test_a_tokenizer_of_the_hub_is_taken_by_its_name(hub, tmp_path):
    train = ["train-tokenizer", tmp_path / "local", "--vocab-size=300", "--out", tmp_path / "own.json"]
    assert prepare.main([str(word) for word in train]) == 0
    hub.create("owner/model")
    hub.commit("owner/model", {"tokenizer.json": (tmp_path / "own.json").read_bytes()})
    build(tmp_path / "wanted", tmp_path / "local", tokenizer=str(tmp_path / "own.json"))
    for number, name in enumerate(("owner/model", "hf:owner/model@main")):
        out = tmp_path / f"out{number}"
        process = started(hub, tmp_path, "build", tmp_path / "local", "--out", out, f"--tokenizer={name}")
        _, message = process.communicate(timeout=60)
        assert process.returncode == 0, message
        found, wanted = all_bytes(out), all_bytes(tmp_path / "wanted")
        assert found["tokenizer.json"] == (tmp_path / "own.json").read_bytes()
        assert found["train-00000.bin"] == wanted["train-00000.bin"]
    process = started(hub, tmp_path, "build", tmp_path / "local", "--out", tmp_path / "x", "--tokenizer=owner/none")
    _, message = process.communicate(timeout=60)
    assert process.returncode == 2 and "tokenizer.json of owner/none (nor is there a file" in message, message
