"""Data made in parts and merged, appended to while a run goes on, and looked at."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import write_data
from driver import wait_for
from test_prepare import build, documents_of, ids_of, refused, sentences, texts_of
from test_sources import ROOT, all_bytes, killed_after, lines

import train
from data import building, prepare, sources


def corpus(folder, count=9, seed=0):
    texts = [[sentences(seed + 50 * i + j, 60 * (i % 3 + 1)) for j in range(20)] for i in range(count)]
    return texts_of(folder, {f"{i}.jsonl": lines(part) for i, part in enumerate(texts)})


def command(*words):
    assert prepare.main([str(word) for word in words]) == 0


def make_parts(folder, count, out, *words):
    """The folders of all parts of a build."""
    parts = [out / f"part{i}" for i in range(1, count + 1)]
    for i, part in enumerate(parts, 1):
        command("build", folder, "--out", part, f"--part={i}/{count}", *words)
    return parts


# -- parts


@pytest.mark.parametrize("count", [1, 3, 9, 12])
def test_parts_merged_are_the_whole(tmp_path, count):
    folder = corpus(tmp_path / "in")
    whole = build(tmp_path / "whole", folder, val_ratio=0.1)
    parts = make_parts(folder, count, tmp_path, "--val-ratio=0.1")
    command("merge", *reversed(parts), "--out", tmp_path / "merged")
    merged = prepare.read_manifest(tmp_path / "merged")
    for split in ("train", "val"):
        assert ids_of(tmp_path / "merged", split).tolist() == ids_of(tmp_path / "whole", split).tolist()
    assert merged["sources"] == whole["sources"] and merged["split"] == whole["split"] and "part" not in merged
    assert prepare.verify(tmp_path / "merged", progress=False)[1] == []
    shutil.rmtree(parts[0])
    assert prepare.verify(tmp_path / "merged", progress=False)[1] == [], "hard links on one file system"


@pytest.mark.parametrize("change", ["a file comes", "a file grows", "another column"])
def test_parts_of_other_files_are_not_merged(tmp_path, capsys, change):
    folder, words = corpus(tmp_path / "in", 4), []
    command("build", folder, "--out", tmp_path / "one", "--part=1/2")
    if change == "a file comes":
        (folder / "0a.jsonl").write_bytes((folder / "1.jsonl").read_bytes())
    elif change == "a file grows":
        with open(folder / "3.jsonl", "ab") as file:
            file.write(lines(["one more"]))
    else:
        for path in folder.iterdir():
            path.write_bytes(path.read_bytes().replace(b'"text"', b'"body"'))
        words = ["--text-column=body"]
    command("build", folder, "--out", tmp_path / "two", "--part=2/2", *words)
    message = refused(capsys, "merge", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "out")
    assert "it is a part of other files than" in message and not (tmp_path / "out").exists()


@pytest.mark.parametrize("sizes", [[1] * 20, [100, 1, 1, 1], [1, 1, 100], [0, 0], [5], [5, 0]])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_file_is_in_one_part_and_their_order_stays(sizes, count):
    files = [sources.File(f"{i}", size, 0) for i, size in enumerate(sizes)]
    given = [sources.Source("a", "", files[:1]), sources.Source("b", "", files[1:])]
    parts = [sources.part_of(given, i, count) for i in range(1, count + 1)]
    assert [file for part in parts for source in part for file in source.files] == files
    if len(sizes) == 20:
        shares = [sum(len(source.files) for source in part) for part in parts]
        assert max(shares) - min(shares) <= 1


def test_merge_refuses_what_does_not_go_together(tmp_path, capsys):
    folder, out = corpus(tmp_path / "in", 4), tmp_path / "out"
    parts = make_parts(folder, 3, tmp_path)
    other = tmp_path / "other"
    command("build", folder, "--out", other, "--part=2/4", "--val-ratio=0.3")
    message = refused(capsys, "merge", parts[0], parts[0], other, "--out", out)
    for text in ("part1: named 2 times", "part 1/3 is given 2 times", "part 2/3 is given 0 times",
                 "part 1/4 is given 0 times", f"{other}: its split is"):
        assert text in message, text
    build(tmp_path / "whole", folder)
    assert "some are parts and some are not" in refused(capsys, "merge", *parts, tmp_path / "whole", "--out", out)
    assert "'3/2'" in usage(capsys, "build", folder, "--out", out, "--part=3/2")
    assert "cannot be divided" in refused(capsys, "build", "-", "--out", out, "--part=1/2")
    os.remove(parts[1] / "train-00000.bin")
    assert "the file is missing" in refused(capsys, "merge", *parts, "--out", out)
    assert not out.exists()


def test_merge_refuses_a_shard_that_two_folders_hold(tmp_path, capsys):
    folder = corpus(tmp_path / "in", 2)
    for i in (0, 1):
        command("build", folder / f"{i}.jsonl", "--out", tmp_path / f"out{i}", "--val-ratio=0")
    command("append", tmp_path / "out0", tmp_path / "out1")
    message = refused(capsys, "merge", tmp_path / "out0", tmp_path / "out1", "--out", tmp_path / "out")
    assert "its train-00000.bin is in" in message


def usage(capsys, *words):
    with pytest.raises(SystemExit):
        prepare.main([str(word) for word in words])
    return capsys.readouterr().err


def test_whole_folders_are_merged_in_the_order_given(tmp_path):
    for i in (1, 2):
        texts_of(tmp_path / f"in{i}", {"a": f"text {i}", "b": f"more {i}"})
        build(tmp_path / f"out{i}", tmp_path / f"in{i}", val_ratio=0)
    command("merge", tmp_path / "out2", tmp_path / "out1", "--out", tmp_path / "out")
    assert documents_of(tmp_path / "out", "train") == [b"text 2", b"more 2", b"text 1", b"more 1"]
    assert [row["name"] for row in prepare.read_manifest(tmp_path / "out")["sources"]] == [
        str(tmp_path / "in2"), str(tmp_path / "in1")]


# -- append

LINKS = ((os, "link"), (os, "replace"), (os, "fsync"))  # what an append does to the disk


@pytest.fixture
def growing(tmp_path):
    """A data folder, and one made to append to it, with much of the same text."""
    build(tmp_path / "data", corpus(tmp_path / "in", 4), val_ratio=0.1)
    texts = corpus(tmp_path / "more", 6)
    command("build", texts, "--out", tmp_path / "new", "--like", tmp_path / "data", "--shard-tokens=4000")
    return tmp_path


def test_append_adds_train_shards_alone(growing):
    data, new = growing / "data", growing / "new"
    before, added = prepare.read_manifest(data), prepare.read_manifest(new)
    command("append", data, new)
    after = prepare.read_manifest(data)
    assert prepare.growth(data, before["train"]) == after["train"]
    assert after["train"][len(before["train"]):] == [
        row | {"file": f"train-{i:05d}.bin"} for i, row in enumerate(added["train"], 1)]
    assert after["val"] == before["val"] and after["split"] == before["split"]
    val = set(documents_of(data, "val"))
    assert val and not val & set(documents_of(data, "train")), "what is for validation stays out of training"
    assert sum(row["tokens"] for row in after["sources"]) == sum(
        row["tokens"] for row in after["train"] + after["val"])
    assert prepare.verify(data, progress=False)[1] == []


def test_append_refuses_what_does_not_belong(growing, capsys):
    data, new = growing / "data", growing / "new"
    before = (data / "manifest.json").read_bytes()
    build(growing / "leaky", growing / "more", val_ratio=0.01)
    command("build", growing / "more", "--out", growing / "part", "--part=1/2")
    write_data(growing / "ids", 100)
    shards = prepare.read_manifest(growing / "ids")["train"]
    prepare.write_manifest(growing / "ids", prepare.GPT2, 50257, shards, [], [])
    command("import", new / "train-00000.bin", "--tokenizer=bytes", "--out", growing / "imported")
    for folder, text in (("leaky", "trains on documents that are for validation here"), ("part", "merge the parts"),
                         ("ids", "its vocab_size is 50257, here it is 257"), ("data", "is in the data already"),
                         ("imported", "nothing says whether its documents are for validation here")):
        message = refused(capsys, "append", data, growing / folder)
        assert "nothing was appended" in message and text in message, message
    assert "named 2 times" in refused(capsys, "append", data, new, new)
    shutil.copytree(new, growing / "copy")
    message = refused(capsys, "append", data, new, growing / "copy")
    assert f"{growing / 'copy'}: its train-00000.bin is in {new} too" in message, message
    with open(new / "train-00001.bin", "r+b") as file:
        file.write(b"\1\1")
    assert "train-00001.bin: sha256 is" in refused(capsys, "append", data, new)
    with building.locked(data):
        assert "another process is at work" in refused(capsys, "append", data, growing / "leaky")
    assert (data / "manifest.json").read_bytes() == before
    words = ["build", growing / "more", "--out", growing / "x", "--like"]
    assert "leave --tokenizer and --end-of-text out" in refused(capsys, *words, data, "--tokenizer=bytes")
    assert "does not say which documents" in refused(capsys, *words, growing / "ids")


def test_append_killed_at_any_instant_is_whole_or_not_at_all(growing):
    command("append", shutil.copytree(growing / "data", growing / "wanted"), growing / "new")
    before, wanted = all_bytes(growing / "data"), all_bytes(growing / "wanted")
    for events in itertools.count():
        data = shutil.copytree(growing / "data", growing / f"data{events}")
        was_killed = killed_after(events, ["append", data, growing / "new"], LINKS)
        manifest = (data / "manifest.json").read_bytes()
        assert manifest in (before["manifest.json"], wanted["manifest.json"])
        prepare.read_manifest(data)
        if manifest == before["manifest.json"]:
            command("append", data, growing / "new")
        left = {".manifest.json.new"} if was_killed else set()
        assert {name: content for name, content in all_bytes(data).items() if name not in left} == wanted
        if not was_killed:
            break
    assert events > 8


# -- status


def test_status_of_data(growing, capsys):
    capsys.readouterr()
    command("status", growing / "data", "--block-size=100")
    said, manifest = capsys.readouterr().out, prepare.read_manifest(growing / "data")
    tokens = sum(row["tokens"] for row in manifest["train"])
    assert f"{(tokens - 1) // 100:,} training windows of 100 tokens" in said
    assert "no hash has been compared here yet; 'verify' does" in said
    row, = manifest["sources"]
    assert f"{row['tokens']:,} tokens in 80 documents of {growing / 'in'}\n" in said
    texts_of(growing / "in", {"9.jsonl": b"{\n"})
    build(growing / "again", growing / "in")
    command("status", growing / "again")
    assert "left out 1 malformed" in capsys.readouterr().out


def test_status_says_which_shards_had_their_hashes(growing, capsys):
    data = growing / "data"
    command("verify", data)
    capsys.readouterr()
    command("status", data)
    count = len(prepare.all_shards(prepare.read_manifest(data)))
    assert re.search(rf"{count} of {count} had their hashes on [-\d]+ [:\d]+ and have not been touched since\n",
                     capsys.readouterr().out)
    command("append", data, growing / "new")
    os.utime(data / "train-00000.bin")
    command("status", data)
    grown = len(prepare.all_shards(prepare.read_manifest(data)))
    said = capsys.readouterr().out
    assert grown > count and f"{count - 1} of {grown} had their hashes" in said and "'verify' compares all" in said
    real = prepare.scan

    def written_meanwhile(path, *more):
        found = real(path, *more)
        os.utime(path, ns=(1, 1))
        return found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "scan", written_meanwhile)
        command("verify", data)
    capsys.readouterr()
    command("status", data)
    assert f"0 of {grown} had their hashes" in capsys.readouterr().out
    (data / "verified.json").write_text("[]")
    command("status", data)
    assert "no hash has been compared here yet" in capsys.readouterr().out


def write_run(out_dir, shards, windows, segments=(), rates=(100.0, 100.0, 100.0)):
    folder = out_dir / "checkpoints" / "step_00000004"
    folder.mkdir(parents=True, exist_ok=True)
    segments = [*segments, [0 if not segments else windows, shards]]
    (folder / "trainer.json").write_text(json.dumps({"step": 4, "windows": windows, "segments": segments,
                                                     "settings": {"block_size": 10}}))
    (out_dir / "latest.json").write_text(json.dumps({"checkpoint": folder.name}))
    rows = [json.dumps({"tokens_per_s": rate}) + "\n" for rate in ["torn", *rates]]
    (out_dir / "metrics.jsonl").write_text("".join(rows) + '{"tok')
    return out_dir


def test_status_of_a_run(tmp_path, capsys):
    data = write_data(tmp_path / "data", 101, 51)
    shards = prepare.read_manifest(data)["train"]

    def said(*run, **more):
        command("status", data, write_run(tmp_path / "out", *run, **more))
        return capsys.readouterr().out

    assert "step 4, 3 windows drawn, 30 tokens" in said(shards, 3)
    assert "12 windows not drawn yet, 0 of them not taken up" in said(shards, 3)
    assert "at 100 tokens/s all data have been drawn in 1 s" in said(shards, 3)
    assert "12 windows not drawn yet, 5 of them not taken up" in said(shards[:1], 3)
    assert "all data have been drawn; the run goes over" in said(shards, 40)
    assert "5 windows not drawn yet, 0 of them" in said(shards, 10, segments=[[0, shards[:1]]])
    assert "at " not in said(shards, 3, rates=()).split("drawn yet")[1]
    other = [shards[0] | {"sha256": "0" * 64}]
    write_run(tmp_path / "out", other, 3)
    assert "the data has changed under this run" in refused(capsys, "status", data, tmp_path / "out")
    assert "no run with a checkpoint" in refused(capsys, "status", data, tmp_path)


@pytest.mark.parametrize("totals", [[101], [101, 151], [57, 60, 300], [500, 511], [99, 250, 251, 400]])
def test_what_is_undrawn_is_what_the_passes_have_left(totals):
    """The count of windows is that of the passes themselves, at every window of a run that takes up each growth."""
    order, block_size = [(0, totals[0])], 10
    manifest = {"train": [{"tokens": totals[-1]}]}
    for total in totals[1:]:  # each is taken up at the end of a pass
        first = train.pass_of(order[-1][0], order, block_size)
        order.append((first.first + first.windows, total))
    for window in range(order[-1][0], order[-1][0] + 80):
        segments = [[first, [{"tokens": total}]] for first, total in order]
        found = prepare.undrawn(manifest, {"segments": segments, "windows": window, "block_size": block_size})
        now = train.pass_of(window, order, block_size)
        is_first = now.number == train.pass_of(order[-1][0], order, block_size).number
        fresh = totals[-1] - (totals[-2] if len(totals) > 1 else 0)
        left = now.first + now.windows - window if is_first and (fresh - 1) // block_size > 0 else 0
        assert found == (left, 0)


def test_a_run_takes_up_what_is_appended_while_it_goes_on(growing):
    data, out = growing / "data", growing / "run"
    before = sum(row["tokens"] for row in prepare.read_manifest(data)["train"])
    words = ["config/quickstart.py", f"--data_dir={data}", f"--out_dir={out}", "--n_layer=1", "--n_head=1",
             "--n_embd=16", "--block_size=64", "--batch_size=4", "--batch_tokens=1024", "--warmup_steps=1",
             "--checkpoint_interval=3", "--eval_interval=0", "--sample_interval=0", "--prepare=", "--compile=off",
             "--log_interval=1", "--max_steps=100000", "--schedule=constant"]
    run = subprocess.Popen([sys.executable, os.path.join(ROOT, "train.py"), *words], cwd=ROOT,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (out / "latest.json").exists(), run)
        command("append", data, growing / "new")
        wait_for(lambda: '"append"' in (out / "events.jsonl").read_text(), run)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0
    finally:
        run.kill()
        run.wait()
    state = prepare.run_state(out)
    assert len(state["segments"]) == 2 and sum(row["tokens"] for row in state["segments"][0][1]) == before
    command("status", data, out)
