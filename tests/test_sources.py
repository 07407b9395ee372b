"""Documents out of JSON lines, parquet, packed files and standard input; and a build that is killed and goes on."""

import gzip
import hashlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from driver import wait_for
from test_prepare import build, documents_of, ids_of, refused, sentences, texts_of

from data import building, prepare, shards, sources

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def lines(texts, column="text"):
    return "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)).encode()


def zst(data):
    return pyarrow.compress(data, "zstd", asbytes=True)


def parquet(path, texts, column="text", **options):
    table = pyarrow.table({"id": list(range(len(texts))), column: texts})
    pyarrow.parquet.write_table(table, path, **options)
    return path


def all_bytes(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def train_texts(folder):
    return [document.decode() for document in documents_of(folder, "train")]


# -- what a file holds


TEXTS = [f"document {i}\n" + "more " * (i % 40) for i in range(60)]


@pytest.mark.parametrize("name, packed", [
    ("a.jsonl", bytes), ("a.ndjson", bytes), ("a.jsonl.gz", gzip.compress), ("a.JSONL.zst", zst),
    ("a.jsonl.zst", lambda data: zst(data[:500]) + zst(data[500:])),
    ("a.jsonl.gz", lambda data: gzip.compress(data[:500]) + gzip.compress(data[500:]))])
@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_json_lines(tmp_path, monkeypatch, name, packed, chunk):
    monkeypatch.setattr(sources, "CHUNK", chunk)
    texts_of(tmp_path / "in", {name: packed(lines(TEXTS))})
    manifest = build(tmp_path / "out", tmp_path / "in", val_ratio=0)
    assert train_texts(tmp_path / "out") == TEXTS
    assert manifest["sources"][0] == {"name": str(tmp_path / "in"), "revision": "", "documents": 60,
                                      "tokens": 60 + sum(map(len, TEXTS))}


@pytest.mark.parametrize("name, kind", [
    ("c4-train.00000-of-01024.json.gz", "jsonl"), ("a.json", "text"), ("a.JSONL.zst", "jsonl"),
    ("a.parquet", "parquet"), ("json", "text"), ("a.txt.gz", "text")])
def test_a_name_tells_what_a_file_holds(name, kind):
    assert sources.kind_of(name) == kind


def test_linked_folders_are_read_and_a_link_to_a_folder_above_ends(tmp_path):
    texts_of(tmp_path / "in", {"a.txt": b"a"})
    texts_of(tmp_path / "elsewhere", {"b.txt": b"b"})
    os.symlink(tmp_path / "elsewhere", tmp_path / "in" / "linked")
    os.symlink(tmp_path / "in", tmp_path / "elsewhere" / "back")
    found = list(sources.walk(tmp_path / "in"))
    assert [os.path.relpath(path, tmp_path / "in") for path in found] == ["a.txt", "linked/b.txt"]


@pytest.mark.parametrize("options", [{"row_group_size": 7}, {"compression": "zstd"}, {"use_dictionary": False}])
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(),
                                  pyarrow.dictionary(pyarrow.int32(), pyarrow.string())])
def test_parquet(tmp_path, options, kind):
    (tmp_path / "in").mkdir()
    parquet(tmp_path / "in" / "a.parquet", pyarrow.array(TEXTS).cast(kind), "content", **options)
    build(tmp_path / "out", tmp_path / "in", text_column="content", val_ratio=0)
    assert train_texts(tmp_path / "out") == TEXTS


def test_of_parquet_no_other_column_is_read(tmp_path, monkeypatch):
    parquet(tmp_path / "a.parquet", TEXTS, row_group_size=20)
    asked, iter_batches = [], pyarrow.parquet.ParquetFile.iter_batches

    def noting(table, size, groups, columns):
        asked.append((groups, columns))
        return iter_batches(table, size, groups, columns)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", noting)
    build(tmp_path / "out", tmp_path / "a.parquet", val_ratio=0)
    assert asked == [([0], ["text"]), ([1], ["text"]), ([2], ["text"])]


def test_a_folder_of_everything(tmp_path):
    folder = texts_of(tmp_path / "in", {
        "1.txt": "plain", "2.jsonl": lines(["line a", "line b"]), "4.txt.gz": gzip.compress(b"packed text"),
        "5.tar.gz": gzip.compress(b"ustar\0\0"), "6.json": '{"a": 1}'})
    parquet(folder / "3.parquet", ["row a", "row b"])
    build(tmp_path / "out", folder, val_ratio=0)
    assert train_texts(tmp_path / "out") == ["plain", "line a", "line b", "row a", "row b", "packed text", '{"a": 1}']


def test_a_text_is_on_the_same_side_whatever_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 64)  # some come in several chunks
    texts_of(tmp_path / "text", {f"{i:02d}": text for i, text in enumerate(TEXTS)})
    texts_of(tmp_path / "json", {"a.jsonl": lines(TEXTS)})
    parquet(tmp_path / "a.parquet", TEXTS)
    for i, given in enumerate(("text", "json", "a.parquet")):
        build(tmp_path / f"out{i}", tmp_path / given, val_ratio=0.2)
        for split in ("train", "val"):
            assert ids_of(tmp_path / f"out{i}", split).tolist() == ids_of(tmp_path / "out0", split).tolist()
    assert len(documents_of(tmp_path / "out0", "val")) > 3


@pytest.mark.parametrize("words, text, wanted", [
    (["--document-separator=||", "--val-ratio=0"], b"one||two||three", ["one", "two", "three"]),
    (["--stdin-format=jsonl", "--val-ratio=0"], lines(["one", "two"]), ["one", "two"])])
def test_standard_input(tmp_path, words, text, wanted):
    script = os.path.join(ROOT, "data", "prepare.py")
    done = subprocess.run([sys.executable, script, "build", "-", "--out", "out", *words], cwd=tmp_path, input=text,
                          capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert train_texts(tmp_path / "out") == wanted
    assert prepare.read_manifest(tmp_path / "out")["sources"][0]["name"] == "-"


def test_standard_input_is_read_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines(["one", "two"]))))
    message = refused(capsys, "build", "-", "--stdin-format=jsonl", "--out", tmp_path / "out")
    assert "cannot be read twice" in message and not os.listdir(tmp_path)


# -- what cannot be a document


BROKEN = [b'{"text": broken', b'["text"]', b'{"id": 1}', b'{"text": null}', b'{"text": 3}', b'{"text": "\\ud800"}',
          b'{"text": "caf\xe9"}', b"[" * 100_000]
WHY = ["Expecting value", "a list, not an object", "no 'text' in it", "'text' is null, not a text",
       "'text' is a number, not a text", "half of a surrogate pair", "can't decode byte 0xe9", "nested too deep"]


def test_malformed_lines_are_counted_and_named(tmp_path, capsys):
    good = lines(TEXTS[:3]).splitlines()
    content = b"\n".join([good[0], *BROKEN, b"", good[1], b'{"text": " "}', good[2]])
    texts_of(tmp_path / "in", {"3.jsonl": content})
    manifest = build(tmp_path / "out", tmp_path / "in", val_ratio=0)
    message = capsys.readouterr().err
    for number, why in enumerate(WHY, 2):
        assert f"left out: {tmp_path}/in/3.jsonl line {number}: " in message and why in message, why
    assert "left out: 8 malformed record(s), the first 8 named" in message
    assert "left out: 1 records without text" in message
    assert train_texts(tmp_path / "out") == TEXTS[:3]
    assert (manifest["sources"][0]["malformed"], manifest["sources"][0]["blank"]) == (8, 1)


def test_so_many_are_named_and_all_are_counted(tmp_path, capsys):
    texts_of(tmp_path / "in", {"a.jsonl": lines(TEXTS) + b"{\n" * 1000})
    build(tmp_path / "out", tmp_path / "in")
    message = capsys.readouterr().err
    assert message.count("a.jsonl line") == building.NAMED and "1,000 malformed record(s), the first 10 " in message


def test_a_row_that_is_null_and_one_that_is_no_utf8(tmp_path, capsys):
    texts = pyarrow.array([b"one", None, b"caf\xe9", b"two"]).view(pyarrow.string())
    parquet(tmp_path / "a.parquet", texts)
    build(tmp_path / "out", tmp_path / "a.parquet", val_ratio=0)
    assert documents_of(tmp_path / "out", "train") == [b"one", b"caf\xe9", b"two"]
    assert "a.parquet row 2: 'text' is null" in capsys.readouterr().err


def test_a_line_too_long_to_hold_is_named_and_the_next_one_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "LONGEST_LINE", 40)
    long = json.dumps({"text": "x" * 200}).encode()
    texts_of(tmp_path / "in", {"a.jsonl": lines(["one"]) + long + b"\n" + lines(["two"]) + long})
    build(tmp_path / "out", tmp_path / "in", val_ratio=0)
    assert train_texts(tmp_path / "out") == ["one", "two"]
    message = capsys.readouterr().err
    assert "line 2: longer than" in message and "line 4: longer than" in message


def test_a_column_that_is_not_there_is_refused_with_those_that_are(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    parquet(tmp_path / "in" / "a.parquet", TEXTS, "content")
    message = refused(capsys, "build", tmp_path / "in", "--out", tmp_path / "out")
    assert "a.parquet has no column 'text'; there are: id, content. --text-column" in message
    message = refused(capsys, "build", tmp_path / "in", "--out", tmp_path / "out", "--text-column=id")
    assert "'id' holds int64, not text" in message
    texts_of(tmp_path / "lines", {"a.jsonl": lines(TEXTS, "body")})
    message = refused(capsys, "build", tmp_path / "lines", "--out", tmp_path / "out")
    assert "a.jsonl has no column 'text'; there are: id, body. --text-column" in message
    assert sorted(os.listdir(tmp_path)) == ["in", "lines"]


@pytest.mark.parametrize("name, packed", [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zst),
                                          ("a.txt.gz", gzip.compress)])
@pytest.mark.parametrize("harm", [lambda data: data[:-20], lambda data: data[:len(data) // 2],
                                  lambda data: data + b"no such thing", lambda data: b"no such thing"])
def test_a_damaged_file_is_refused_by_name(tmp_path, capsys, name, packed, harm):
    texts_of(tmp_path / "in", {name: harm(packed(lines([sentences(i, 900) for i in range(30)]))), "b.txt": "whole"})
    message = refused(capsys, "build", tmp_path / "in", "--out", tmp_path / "out")
    assert f"{name} is damaged or cut off" in message
    assert os.listdir(tmp_path) == ["in"]


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path, capsys):
    path = parquet(tmp_path / "a.parquet", TEXTS, write_page_checksum=True, use_dictionary=False)
    content = path.read_bytes()
    for harm in (content[:-30], content[:700] + bytes(10) + content[710:], b"no such thing"):
        path.write_bytes(harm)
        assert "a.parquet is damaged" in refused(capsys, "build", path, "--out", tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.parquet"]


def test_without_pyarrow_the_message_says_what_to_install(tmp_path, monkeypatch, capsys):
    texts_of(tmp_path / "in", {"a.jsonl.zst": zst(lines(TEXTS))})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    message = refused(capsys, "build", tmp_path / "in", "--out", tmp_path / "out")
    assert "a.jsonl.zst needs the package pyarrow: pip install pyarrow" in message


# -- duplicates


@pytest.mark.parametrize("held", [50, 1 << 20])
@pytest.mark.parametrize("chunk", [40, 1 << 20])
def test_duplicates_are_dropped_and_counted(tmp_path, monkeypatch, capsys, held, chunk):
    monkeypatch.setattr(sources, "CHUNK", chunk)
    monkeypatch.setattr(sources, "HELD_IN_MEMORY", held)
    alike = ["the same beginning of forty bytes and more " + end for end in ("a", "b", "b ", "a")]
    texts_of(tmp_path / "in", {"a.jsonl": lines(TEXTS + TEXTS[:7] + alike), "b.txt": TEXTS[3], "c.jsonl": b"{\n"})
    manifest = build_deduplicated(tmp_path / "out", tmp_path / "in")
    assert train_texts(tmp_path / "out") == TEXTS + alike[:3]
    assert manifest["sources"][0]["duplicates"] == 9 and manifest["split"]["dedup"]
    assert "left out: 9 duplicates" in capsys.readouterr().err


def build_deduplicated(out, folder):
    assert prepare.main(["build", str(folder), "--out", str(out), "--dedup", "--val-ratio=0"]) == 0
    return prepare.read_manifest(out)


def test_the_set_of_hashes(monkeypatch):
    draw = np.random.default_rng(1)
    keys = draw.integers(0, 2**64, 150_000, np.uint64).tolist() + [0, 2**64 - 1, 2**63]
    seen = sources.Seen(np.array(keys[:1000], np.uint64))
    assert all(seen.add(key) for key in keys[1000:])
    assert sum(map(len, seen.sorted)) > 100_000, "the small sets were merged"
    assert not any(seen.add(key) for key in keys)


def test_the_set_of_hashes_is_small(monkeypatch):
    count, draw = 1_000_000, np.random.default_rng(1)
    seen, keys = sources.Seen(), draw.integers(0, 2**64, count, np.uint64)
    tracemalloc.start()
    for key in keys:
        seen.add(int(key))
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 8 * count < used <= peak < 16 * count


# -- killed, and gone on


def files_for_a_kill(folder):
    """A mixture, with a long document, blank, malformed and duplicate ones."""
    texts = [sentences(i, 40 * (i % 7) + 10) for i in range(30)]
    texts_of(folder, {"a.jsonl.gz": gzip.compress(lines(texts) + b"{\n" + lines(texts[:5] + [" "])),
                      "b.txt": sentences(99, 2500), "c.jsonl": lines(texts[20:] + TEXTS[:9])})
    parquet(folder / "d.parquet", TEXTS[5:20], row_group_size=4)
    return folder


BUILDS = ((building, "take"), (os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink"))


def killed_after(events, words, places=BUILDS):
    """Runs a command in a child that kills itself at the events-th thing it does to the disk; whether it did."""
    pid = os.fork()
    if pid == 0:
        left = itertools.count(events, -1)

        def dies_in_time(function):
            def wrapper(*args, **options):
                if next(left) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **options)
            return wrapper

        for owner, name in places:
            setattr(owner, name, dies_in_time(getattr(owner, name)))
        os._exit(prepare.main(list(map(str, words))))
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def words_for(folder, out, *more):
    return ["build", str(folder), "--out", str(out), "--shard-tokens=900", "--val-ratio=0.2", "--workers=1", *more]


@pytest.mark.parametrize("more", [[], ["--dedup"]])
def test_killed_at_any_instant_it_ends_with_the_same_bytes(tmp_path, monkeypatch, capsys, more):
    folder = files_for_a_kill(tmp_path / "in")
    monkeypatch.setattr(sources, "CHUNK", 600)
    monkeypatch.setattr(building, "SAVE_S", 0)
    assert prepare.main(words_for(folder, tmp_path / "whole", *more)) == 0
    wanted, said = all_bytes(tmp_path / "whole"), capsys.readouterr()
    left_out = [line for line in said.err.splitlines() if line.startswith("left out")]
    assert len(wanted) > 10 and len(left_out) == 3 + len(more)
    for events in itertools.count(0, 13):
        out = tmp_path / f"out{events}"
        was_killed = killed_after(events, words_for(folder, out, *more))
        if was_killed and not out.exists():
            assert prepare.main(words_for(folder, out, *more)) == 0
            assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out")] == left_out
        assert all_bytes(out) == wanted, events
        if not was_killed:
            break
    assert events > 100
    assert not list(tmp_path.glob(".*.building/data"))


def test_killed_again_and_again_it_comes_to_its_end(tmp_path, monkeypatch, capsys):
    folder, out = files_for_a_kill(tmp_path / "in"), tmp_path / "out"
    monkeypatch.setattr(sources, "CHUNK", 600)
    monkeypatch.setattr(building, "SAVE_S", 0)
    assert prepare.main(words_for(folder, tmp_path / "whole")) == 0
    kills = 0
    while not out.exists() and killed_after(23, words_for(folder, out)):
        kills += 1
        assert kills < 100
    assert kills > 5 and all_bytes(out) == all_bytes(tmp_path / "whole")
    assert prepare.main(words_for(folder, out)) == 0  # which also clears away what a kill after the end has left
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "whole"]


def test_a_finished_build_answers_its_own_command_and_no_other(tmp_path, monkeypatch, capsys):
    folder, out = texts_of(tmp_path / "in", {f"{i}": sentences(i, 500) for i in range(9)}), tmp_path / "out"
    assert prepare.main(words_for(folder, out)) == 0
    before, said = all_bytes(out), capsys.readouterr().out
    monkeypatch.setattr(building, "encode_into", None)  # nothing is done again
    assert prepare.main(words_for(folder, out)) == 0
    again = capsys.readouterr()
    assert "has been built already by this command from files of the same" in again.err and again.out == said
    assert "is not an empty folder" in refused(capsys, *words_for(folder, out), "--val-ratio=0.3")
    (folder / "4").write_text("another size")
    assert "is not an empty folder" in refused(capsys, *words_for(folder, out))
    assert all_bytes(out) == before


def test_what_is_done_is_not_encoded_again(tmp_path, monkeypatch):
    folder, out = texts_of(tmp_path / "in", {f"{i}": sentences(i, 500) for i in range(20)}), tmp_path / "out"
    monkeypatch.setattr(sources, "CHUNK", 600)
    monkeypatch.setattr(building, "SAVE_S", 0)
    assert killed_after(70, words_for(folder, out))
    journal = json.loads((tmp_path / ".out.building" / "journal.json").read_text())
    assert journal["place"][0] >= 4
    encoded = []
    take = building.take
    monkeypatch.setattr(building, "take", lambda batch, *more: encoded.append(batch.last.place) or take(batch, *more))
    assert prepare.main(words_for(folder, out)) == 0
    assert tuple(encoded[0]) > tuple(journal["place"])


def test_a_half_done_build_goes_on_only_with_the_same_command_and_files(tmp_path, monkeypatch, capsys):
    folder, out = files_for_a_kill(tmp_path / "in"), tmp_path / "out"
    monkeypatch.setattr(sources, "CHUNK", 600)
    monkeypatch.setattr(building, "SAVE_S", 0)
    assert killed_after(60, words_for(folder, out))
    half_done = all_bytes(tmp_path / ".out.building" / "data")
    assert "other val_ratio is half done" in refused(capsys, *words_for(folder, out), "--val-ratio=0.3")
    assert "other inputs is half done" in refused(
        capsys, "build", str(folder / "b.txt"), *words_for(folder, out)[1:])
    assert all_bytes(tmp_path / ".out.building" / "data") == half_done
    with building.locked(tmp_path / ".out.building"):
        assert "another process is at work" in refused(capsys, *words_for(folder, out))
    assert prepare.main(words_for(folder, out)) == 0


def test_a_build_goes_on_with_the_files_that_it_began_with(tmp_path, monkeypatch, capsys):
    files = {name: sentences(i, 1500) for i, name in enumerate("adefz")}
    folder, out = texts_of(tmp_path / "in", files), tmp_path / "out"
    monkeypatch.setattr(sources, "CHUNK", 600)
    monkeypatch.setattr(building, "SAVE_S", 0)
    assert killed_after(60, words_for(folder, out))
    place, _ = json.loads((tmp_path / ".out.building" / "journal.json").read_text())["place"]
    assert 1 <= place <= 2, "some are behind and some to come"
    texts_of(folder, {"b": "a file that came later, and sorts before what is to come", "z": "not as it was"})
    stood, aside = (folder / "a").stat(), tmp_path / "aside"
    for change in (lambda: (folder / "a").write_text("changed"), (folder / "a").unlink):
        os.replace(folder / "a", aside)
        (folder / "a").write_text("")
        change()
        assert f"{folder / 'a'} is in the half-done shards" in refused(capsys, *words_for(folder, out))
        os.replace(aside, folder / "a")
    assert (folder / "a").stat().st_mtime_ns == stood.st_mtime_ns
    assert prepare.main(words_for(folder, out)) == 0
    assert f"had begun when they came (1): {folder / 'b'}" in capsys.readouterr().err
    built = [document.decode() for split in ("train", "val") for document in documents_of(out, split)]
    assert sorted(built) == sorted([*(files[name] for name in "adef"), "not as it was"])


def test_a_file_that_changed_before_it_was_read_is_known_as_it_was_read(tmp_path, monkeypatch, capsys):
    files = {name: sentences(i, 1500) for i, name in enumerate("abcdef")}
    folder, out = texts_of(tmp_path / "in", files), tmp_path / "out"
    monkeypatch.setattr(sources, "CHUNK", 600)
    monkeypatch.setattr(building, "SAVE_S", 0)
    assert killed_after(30, words_for(folder, out))
    before = (folder / "f").stat()
    (folder / "f").write_text("another f " * 200)
    journal = tmp_path / ".out.building" / "journal.json"
    while json.loads(journal.read_text())["place"][0] < 5:  # until it is being read, or has been
        assert killed_after(25, words_for(folder, out))
    (folder / "f").write_text(files["f"])
    os.utime(folder / "f", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert f"{folder / 'f'} is in the half-done shards" in refused(capsys, *words_for(folder, out))
    os.remove(folder / "f")
    assert f"{folder / 'f'} is in the half-done shards" in refused(capsys, *words_for(folder, out))


def test_a_file_that_is_gone_before_it_was_read_is_named(tmp_path, monkeypatch, capsys):
    folder, out = texts_of(tmp_path / "in", {name: sentences(5, 1500) for name in "abcdef"}), tmp_path / "out"
    monkeypatch.setattr(sources, "CHUNK", 600)
    monkeypatch.setattr(building, "SAVE_S", 0)
    assert killed_after(40, words_for(folder, out))
    for change in (lambda: (folder / "f").write_bytes(b"\0"), (folder / "f").unlink):
        change()
        assert f"{folder / 'f'} was there when the build began, and is gone or binary now" in refused(
            capsys, *words_for(folder, out))


def test_a_journal_whose_data_were_finished_and_moved_away_is_none(tmp_path):
    folder, out = texts_of(tmp_path / "in", {"a": sentences(5, 1500), "b": "more"}), tmp_path / "out"
    (tmp_path / ".out.building").mkdir()
    (tmp_path / ".out.building" / "journal.json").write_text("{}")
    assert prepare.main(words_for(folder, out)) == 0
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_standard_input_goes_on_only_with_the_same_beginning(tmp_path, monkeypatch, capsys):
    texts, words = lines(TEXTS), ["build", "-", "--stdin-format=jsonl", "--out", str(tmp_path / "out"), "--val-ratio=0"]
    monkeypatch.setattr(sources, "CHUNK", 600)
    monkeypatch.setattr(building, "SAVE_S", 0)

    def pipe(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    pipe(texts)
    assert killed_after(20, words)
    for other in (texts.replace(b"document 0", b"document x"), texts[:100]):
        pipe(other)
        assert "does not begin as it did" in refused(capsys, *words)
    pipe(texts)
    assert prepare.main(words) == 0
    assert train_texts(tmp_path / "out") == TEXTS


def test_a_full_disk_keeps_what_was_saved(tmp_path, monkeypatch, capsys):
    folder, out = files_for_a_kill(tmp_path / "in"), tmp_path / "out"
    monkeypatch.setattr(sources, "CHUNK", 600)
    monkeypatch.setattr(building, "SAVE_S", 0)
    with monkeypatch.context() as patch:
        def fail(*_):
            raise OSError(28, "No space left on device")

        patch.setattr(shards, "fsync_folder", fail)  # the first save is whole when it fails
        assert "No space left" in refused(capsys, *words_for(folder, out))
    assert prepare.main(words_for(folder, out)) == 0
    build(tmp_path / "whole", folder, shard_tokens=900, val_ratio=0.2)
    assert all_bytes(out) == all_bytes(tmp_path / "whole")


# -- workers and memory


def test_any_number_of_workers_writes_the_same_bytes_of_records(tmp_path, monkeypatch, gpt2_vocabulary):
    folder, found = files_for_a_kill(tmp_path / "in"), []
    monkeypatch.setattr(sources, "CHUNK", 4000)
    for workers in (1, 2, 3):
        out = tmp_path / f"out{workers}"
        assert prepare.main(["build", str(folder), "--out", str(out), "--tokenizer=gpt2", "--dedup", "--val-ratio=0.2",
                             f"--workers={workers}", "--shard-tokens=700"]) == 0
        found.append(all_bytes(out))
    assert found[0] == found[1] == found[2] and len(found[0]) > 4


def test_killed_with_workers_it_goes_on_with_another_number_of_them(tmp_path, gpt2_vocabulary):
    folder, out = texts_of(tmp_path / "in", {f"{i:02d}": sentences(i, 20_000) for i in range(24)}), tmp_path / "out"
    script = ("import sys; from data import building, prepare, sources\n"
              "sources.CHUNK, building.SAVE_S = 20_000, 0\n"
              "if __name__ == '__main__':\n"
              "    sys.exit(prepare.main(sys.argv[1:]))")
    (tmp_path / "run.py").write_text(script)

    def start(out, workers):
        words = ["build", folder, "--out", out, "--tokenizer=gpt2", f"--workers={workers}", "--shard-tokens=30000"]
        return subprocess.Popen([sys.executable, tmp_path / "run.py", *words], stdout=subprocess.DEVNULL,
                                env={**os.environ, "PYTHONPATH": ROOT})

    process = start(out, 2)
    wait_for(lambda: (tmp_path / ".out.building" / "journal.json").exists(), process)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert start(out, 1).wait(60) == start(tmp_path / "whole", 2).wait(60) == 0
    assert all_bytes(out) == all_bytes(tmp_path / "whole") and len(all_bytes(out)) > 5


def test_memory_does_not_grow_with_json_lines(tmp_path):
    line = json.dumps({"text": "words and words " * 60}).encode() + b"\n"
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", 1) as file:
        for _ in range(64):
            file.write(line * 1000)
    script = ("import sys; from resource import RUSAGE_SELF, getrusage; from data import prepare\n"
              "before = getrusage(RUSAGE_SELF).ru_maxrss\n"
              "assert prepare.main(sys.argv[1:]) == 0\n"
              "print(getrusage(RUSAGE_SELF).ru_maxrss - before)")
    words = ["build", tmp_path / "a.jsonl.gz", "--out", tmp_path / "out", "--val-ratio=0"]
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, text=True, capture_output=True, check=True)
    grown = int(done.stdout.split()[-1]) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 48 << 20, f"{grown:,} bytes for an input of 60 MiB"
    assert hashlib.sha256(ids_of(tmp_path / "out", "train").tobytes()).hexdigest()
