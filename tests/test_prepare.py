"""Data preparation: what is in the shards, what is refused, and that a folder appears whole or not at all."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import write_data

from data import building, prepare, sources, vocabulary

ROOT = Path(__file__).resolve().parent.parent
EOT = 256


def texts_of(folder, texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def build(out, *inputs, **options):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert prepare.main(["build", *map(str, inputs), "--out", str(out), *words]) == 0
    return prepare.read_manifest(out)


def refused(capsys, *words):
    """The message of a command that exits 2."""
    assert prepare.main([str(word) for word in words]) == 2
    return capsys.readouterr().err


def ids_of(folder, split):
    shards = json.loads((folder / "manifest.json").read_text())[split]
    return np.concatenate([np.fromfile(folder / shard["file"], "<u2", offset=shard["header_bytes"])
                           for shard in shards] or [np.empty(0, "<u2")])


def documents_of(folder, split):
    """The documents of a byte-level split, as a list of bytes."""
    ids = ids_of(folder, split)
    parts = np.split(ids, np.flatnonzero(ids == EOT) + 1)
    assert len(parts.pop()) == 0, "the stream must end with eot"
    return [part[:-1].astype(np.uint8).tobytes() for part in parts]


def sentences(seed, size):
    draw = random.Random(seed)
    words = ["the", "Hafen", "na\u00efve", "\u6771\u4eac", "it's", "1984", "--", "\n", "\n\n", "  ", "\n  if"]
    text = []
    while size > 0:
        text.append(draw.choice(words) + draw.choice([" ", " ", "\n", "", "\t"]))
        size -= len(text[-1])
    return "".join(text)


# -- tokenizers


def test_bytes_round_trip():
    tokenizer = prepare.load_tokenizer(prepare.BYTES)
    text = "na\u00efve \u6771\u4eac \U0001f680\n\0"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("A\n") == [65, 10]
    assert (tokenizer.eot, tokenizer.vocab_size) == (256, 257)
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [0]
    assert tokenizer.decode([255, 65, 256]) == "\ufffdA<|endoftext|>"


def test_gpt2(gpt2_vocabulary):
    tokenizer = prepare.load_tokenizer(prepare.GPT2)
    assert tokenizer.identity == prepare.GPT2, "import without the vocabulary relies on this constant"
    assert tokenizer.encode("Hello world") == [15496, 995]
    text = "na\u00efve \u6771\u4eac \U0001f680"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.token_bytes()[50256] == 0
    assert tokenizer.vocab_size == len(tokenizer.token_bytes()) == 50257
    assert 50256 not in tokenizer.encode("<|endoftext|>"), "text must not be able to end a document"
    for i in range(50257):
        tokenizer.decode([i])


def test_another_vocabulary_than_the_recorded_one_is_refused():
    with pytest.raises(ValueError, match="not the one the data was made with"):
        prepare.load_tokenizer({**prepare.BYTES, "sha256": "0" * 64})
    with pytest.raises(ValueError, match="'wordpiece' is not known"):
        prepare.load_tokenizer({"kind": "wordpiece", "name": "", "sha256": ""})


def test_without_a_tokenizer_text_is_ids():
    tokenizer = prepare.load_tokenizer(prepare.NO_TOKENIZER, vocab_size=65)
    assert tokenizer.encode("12 7\n64") == [12, 7, 64]
    assert tokenizer.decode([12, 7]) == "12 7 "
    assert tokenizer.token_bytes().tolist() == [0] * 65
    with pytest.raises(ValueError, match="'To be'"):
        tokenizer.encode("To be")


def test_vocabulary_out_of_reach(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    texts_of(tmp_path / "in", {"a": "a", "b": "b"})
    message = refused(capsys, "build", tmp_path / "in", "--out", tmp_path / "out", "--tokenizer", "r50k_base")
    assert "could not fetch" in message and "TIKTOKEN_CACHE_DIR" in message and "'bytes'" in message
    assert os.listdir(tmp_path) == ["in"]


def test_vocabularies_that_uint16_cannot_hold(tmp_path, monkeypatch, capsys):
    import tiktoken

    large = tiktoken.Encoding("large", pat_str=".", mergeable_ranks={bytes([i]): i for i in range(256)},
                              special_tokens={"<|endoftext|>": 65536})
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["large"])
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: large)
    message = refused(capsys, "build", ROOT, "--out", tmp_path / "out", "--tokenizer", "large")
    assert "65,537 ids" in message and "65,536" in message and "gpt2" in message
    message = refused(capsys, "build", ROOT, "--out", tmp_path / "out", "--tokenizer", "nope")
    assert "'nope' is not known" in message


def test_an_id_beyond_uint16_is_refused_with_file_and_id(tmp_path):
    path = texts_of(tmp_path / "in", {"odd.txt": "odd"}) / "odd.txt"
    source = sources.Source("in", "", [sources.file_at(path)])
    ids = np.array([3, 65_536, 65_600])
    tokenizer = vocabulary.Tokenizer(prepare.GPT2, [b""] * 70_000, set(), lambda data: ids)
    with pytest.raises(ValueError, match="odd.txt: .* id 65,600.* below 65,536"):
        building.build_data(tmp_path / "out", [source], tokenizer, options=building.Options(val_ratio=0),
                            progress=False)
    assert os.listdir(tmp_path) == ["in"]


# -- what is in the shards


def test_documents_in_order_each_with_its_end(tmp_path):
    texts = {"b.txt": "second\n", "a.md": "first", "c": b"\xff not UTF-8", "blank": " \n"}
    folder = texts_of(tmp_path / "in", texts)
    (folder / "a").mkdir()
    (folder / "a" / "z.py").write_text("deep")
    texts_of(folder, {".hidden": "no", "image.png": b"\x89PNG\0\0"})
    manifest = build(tmp_path / "out", folder, val_ratio=0)
    assert documents_of(tmp_path / "out", "train") == [b"deep", b"first", b"second\n", b"\xff not UTF-8"]
    assert manifest["val"] == []
    assert manifest["sources"] == [{"name": str(folder), "revision": "", "documents": 4, "tokens": 31}]


def test_the_manifest_is_the_documented_one(tmp_path):
    manifest = build(tmp_path / "out", texts_of(tmp_path / "in", {"a": "abc", "b": "defgh"}), val_ratio=0)
    content = (tmp_path / "out" / "train-00000.bin").read_bytes()
    assert content == np.array([97, 98, 99, EOT, 100, 101, 102, 103, 104, EOT], "<u2").tobytes()
    assert list(manifest) == ["format", "dtype", "vocab_size", "tokenizer", "train", "val", "sources", "split", "build"]
    assert manifest["split"] == {"val_below": 0, "dedup": False}
    assert (manifest["format"], manifest["dtype"], manifest["vocab_size"]) == (1, "uint16", 257)
    assert manifest["tokenizer"] == prepare.BYTES
    assert manifest["train"] == [{"file": "train-00000.bin", "tokens": 10, "bytes": 20, "header_bytes": 0,
                                  "sha256": hashlib.sha256(content).hexdigest()}]
    assert sorted(os.listdir(tmp_path / "out")) == ["manifest.json", "train-00000.bin"]
    assert os.stat(tmp_path / "out").st_mode & 0o777 == os.stat(tmp_path / "in").st_mode & 0o777


def test_shards_are_cut_at_shard_tokens(tmp_path):
    text = "0123456789" * 7
    manifest = build(tmp_path / "out", texts_of(tmp_path / "in", {"a": text}), val_ratio=0, shard_tokens=25)
    assert [shard["tokens"] for shard in manifest["train"]] == [25, 25, 21]
    assert [shard["file"] for shard in manifest["train"]] == [f"train-0000{i}.bin" for i in range(3)]
    assert documents_of(tmp_path / "out", "train") == [text.encode()]
    assert prepare.verify(tmp_path / "out", progress=False)[1] == []


def test_an_overlapping_input_is_taken_once(tmp_path):
    folder = texts_of(tmp_path / "in", {"a": "first", "b": "second"})
    manifest = build(tmp_path / "out", folder / "b", folder, val_ratio=0)
    assert documents_of(tmp_path / "out", "train") == [b"second", b"first"]
    assert [row["documents"] for row in manifest["sources"]] == [1, 1]


@pytest.mark.parametrize("chunk", [16, 40, 1 << 20])
def test_a_separator_parts_a_file_into_documents(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(sources, "CHUNK", chunk)
    wanted = [f"document {i} " + "word " * (i % 9) for i in range(60)]
    text = "<|end|>".join(["", *wanted[:30], "", " \n", *wanted[30:], "\n"])
    build(tmp_path / "out", texts_of(tmp_path / "in", {"all.txt": text}), document_separator="<|end|>",
          val_ratio=0.2)
    val = documents_of(tmp_path / "out", "val")
    assert 0 < len(val) < 30
    train = [text.encode() for text in wanted if text.encode() not in val]
    assert documents_of(tmp_path / "out", "train") == train


def chunks_of(path):
    with open(path, "rb") as file:
        return list(sources.read_chunks(file, b""))


def test_chunks_do_not_change_the_ids(tmp_path, monkeypatch, gpt2_vocabulary):
    tokenizer = prepare.load_tokenizer(prepare.GPT2)
    for seed in range(5):
        path = texts_of(tmp_path / "in", {"a": sentences(seed, 4000)}) / "a"
        whole = tokenizer.encode(path.read_text())
        for chunk in (50, 64, 333):
            monkeypatch.setattr(sources, "CHUNK", chunk)
            chunks = chunks_of(path)
            assert chunks == list(sources.document_chunks(path.read_bytes())), "as the text of a record"
            assert b"".join(part.data for part in chunks) == path.read_bytes()
            assert max(len(part.data) for part in chunks) <= chunk
            assert sum((tokenizer.encode_bytes(part.data).tolist() for part in chunks), []) == whole
            assert [part.starts for part in chunks] == [True] + [False] * (len(chunks) - 1)
            assert [part.ends for part in chunks] == [False] * (len(chunks) - 1) + [True]


def test_text_without_blanks_is_cut_between_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 10)
    path = texts_of(tmp_path / "in", {"a": "\u6771" * 20 + "\U0001f680" * 20}) / "a"
    assert "".join(part.data.decode() for part in chunks_of(path)) == path.read_text()
    path.write_bytes(b"\x80" * 100)  # no UTF-8 at all
    assert b"".join(part.data for part in chunks_of(path)) == b"\x80" * 100


def test_any_number_of_workers_writes_the_same_bytes(tmp_path, monkeypatch, capsys, gpt2_vocabulary):
    monkeypatch.setattr(sources, "CHUNK", 4000)
    texts = {f"{i:02d}": sentences(i, 500 * i) for i in range(1, 21)} | {"latin": b"caf\xe9" * 50}
    folder, hashes = texts_of(tmp_path / "in", texts), set()
    for workers in (1, 2, 3):
        out = tmp_path / f"out{workers}"
        manifest = build(out, folder, tokenizer="gpt2", workers=workers, val_ratio=0.2, shard_tokens=7000)
        assert "not UTF-8" in (message := capsys.readouterr().err) and f"{folder}/latin" in message
        hashes.add((prepare.fingerprint(manifest), *(hashlib.sha256(path.read_bytes()).hexdigest()
                                                     for path in sorted(out.iterdir()))))
    assert len(hashes) == 1
    assert len(manifest["train"]) > 2 and len(manifest["val"]) > 0
    assert manifest["sources"][0]["documents"] == 21
    tokenizer = prepare.load_tokenizer(manifest["tokenizer"])
    for text in tokenizer.decode(ids_of(out, "train").tolist()).split("<|endoftext|>")[:-1]:
        assert text in texts.values() or text == "caf\ufffd" * 50


# -- validation


def test_validation_does_not_depend_on_order_or_names(tmp_path):
    texts = [f"document {i}" for i in range(300)]
    build(tmp_path / "out1", texts_of(tmp_path / "in1", {f"{i:03d}": text for i, text in enumerate(texts)}),
          val_ratio=0.1)
    random.Random(1).shuffle(texts)
    build(tmp_path / "out2", texts_of(tmp_path / "in2", {"one.txt": "\n--\n".join(texts)}),
          document_separator="\n--\n", val_ratio=0.1)
    val = documents_of(tmp_path / "out1", "val")
    assert sorted(documents_of(tmp_path / "out2", "val")) == sorted(val)
    assert 15 < len(val) < 45
    more = {f"{i:03d}": f"document {i}" for i in range(600)}
    build(tmp_path / "out3", texts_of(tmp_path / "in3", more), val_ratio=0.1)
    assert set(val) < set(documents_of(tmp_path / "out3", "val")), "more documents move none"
    build(tmp_path / "out4", tmp_path / "in1", val_ratio=0.2)
    assert set(val) < set(documents_of(tmp_path / "out4", "val")), "a larger share moves none back"


@pytest.mark.parametrize("ratio", [1e-9, 0.999999])
def test_neither_side_is_empty(tmp_path, ratio):
    build(tmp_path / "out", texts_of(tmp_path / "in", {"a": "first", "b": "second"}), val_ratio=ratio)
    both = documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "val")
    assert sorted(both) == [b"first", b"second"] and len(documents_of(tmp_path / "out", "val")) == 1


def test_one_document_cannot_be_split(tmp_path, capsys):
    texts_of(tmp_path / "in", {"a": "one"})
    message = refused(capsys, "build", tmp_path / "in", "--out", tmp_path / "out")
    assert "one document" in message and "--document-separator" in message and "--val-ratio 0" in message
    texts_of(tmp_path / "in", {"b": "one"})
    assert "2 documents that begin" in refused(capsys, "build", tmp_path / "in", "--out", tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


# -- whole or not at all


def test_a_folder_with_data_is_refused_and_kept(tmp_path, capsys):
    folder, out = texts_of(tmp_path / "in", {"a": "one", "b": "two"}), tmp_path / "out"
    texts_of(out, {"precious": "data"})
    assert "not an empty folder" in refused(capsys, "build", folder, "--out", out)
    assert "not an empty folder" in refused(capsys, "stdlib", "--out", out / "precious")
    assert (out / "precious").read_text() == "data" and os.listdir(out) == ["precious"]
    (tmp_path / "empty").mkdir()
    build(tmp_path / "empty", folder)


def test_a_folder_filled_meanwhile_is_kept(tmp_path):
    with pytest.raises(OSError):
        with prepare.new_folder(tmp_path / "out") as folder:
            texts_of(folder, {"manifest.json": "mine"})
            texts_of(tmp_path / "out", {"manifest.json": "theirs"})
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out" / "manifest.json").read_text() == "theirs"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch, capsys, error):
    folder = texts_of(tmp_path / "in", {"a": "one", "b": "two"})

    def fail(writer):
        raise error

    monkeypatch.setattr(building.ShardWriter, "finish", fail)
    message = refused(capsys, "build", folder, "--out", tmp_path / "out")
    assert "interrupted" in message or "No space left" in message
    assert os.listdir(tmp_path) == ["in"]


def test_a_killed_import_leaves_no_folder_and_the_next_one_cleans_up(tmp_path, capsys):
    train, out = ids_file(tmp_path / "train.bin", [1, 2, 3]), tmp_path / "out"
    script = ("import os, sys; from data import prepare\n"
              "prepare.write_manifest = lambda *_: os.kill(os.getpid(), 9)\n"
              "prepare.main(sys.argv[1:])")
    killed = subprocess.run([sys.executable, "-c", script, *import_words(out, train)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    left = sorted(name for name in os.listdir(tmp_path) if name != "train.bin")
    assert len(left) == 1 and left[0].startswith(".out.tmp-")
    running = f".out.tmp-{os.getppid()}-{os.uname().nodename}"
    (tmp_path / running).mkdir()
    assert prepare.main(import_words(out, train)) == 0
    assert left[0] in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == [running, "out", "train.bin"]


def test_workers_end_with_a_killed_parent(tmp_path, gpt2_vocabulary):
    texts_of(tmp_path / "in", {"a": sentences(1, 30_000)})
    script = ("import os, sys, multiprocessing; from data import building, prepare, sources\n"
              "sources.CHUNK = 10_000\n"
              "def kill(*_):\n"
              "    print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n"
              "    os.kill(os.getpid(), 9)\n"
              "building.ShardWriter.write = kill\n"
              "if __name__ == '__main__':\n"
              "    prepare.main(sys.argv[1:])")
    (tmp_path / "kill.py").write_text(script)
    words = ["build", tmp_path / "in", "--out", tmp_path / "out", "--tokenizer=gpt2", "--val-ratio=0",
             "--workers=2"]
    # the workers hold the pipe too, so run returns when the last of them has ended
    killed = subprocess.run([sys.executable, tmp_path / "kill.py", *words], cwd=tmp_path, capture_output=True,
                            env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(killed.stdout.split()) == 2


# -- memory and time


def test_memory_does_not_grow_with_the_input(tmp_path):
    path = tmp_path / "large.txt"
    with open(path, "wb") as file:
        file.write(b"begins as text\n" * 1000)
        file.truncate(128 << 20)  # a hole: 128 MiB without a blank
    script = ("import sys; from resource import RUSAGE_SELF, getrusage; from data import prepare\n"
              "before = getrusage(RUSAGE_SELF).ru_maxrss\n"
              "assert prepare.main(sys.argv[1:]) == 0\n"
              "print(getrusage(RUSAGE_SELF).ru_maxrss - before)")
    words = ["build", path, "--out", tmp_path / "out", "--val-ratio=0", "--document-separator=###"]
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, text=True, capture_output=True,
                          check=True)
    grown = int(done.stdout.split()[-1]) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 32 << 20, f"{grown:,} bytes for an input of 128 MiB"
    assert sum(row["tokens"] for row in prepare.read_manifest(tmp_path / "out")["train"]) == (128 << 20) + 1
    shutil.rmtree(tmp_path / "out")


def test_text_is_not_read_far_ahead_of_the_workers(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 100)
    read = 0

    def pieces():
        nonlocal read
        for read in range(1, 201):
            yield sources.Piece(0, "train", "file", bytes([read]) * 100, True)

    batches = building.encode_all(pieces(), prepare.load_tokenizer(prepare.BYTES), workers=2)
    assert next(batches).encoded[0].ids.tolist() == [1] * 100 + [EOT]
    assert read < 10
    assert [batch.encoded[0].ids[0] for batch in batches] == list(range(2, 201))


def test_ten_thousand_shards_are_checked_fast(tmp_path):
    (tmp_path / "train-0.bin").write_bytes(b"\0\0")
    for i in range(1, 10_000):
        os.symlink("train-0.bin", tmp_path / f"train-{i}.bin")
    rows = [prepare.shard_row(f"train-{i}.bin", 1, 0, "0" * 64) for i in range(10_000)]
    prepare.write_manifest(tmp_path, prepare.BYTES, 257, rows, [], [])
    started = time.process_time()
    assert len(prepare.read_manifest(tmp_path)["train"]) == 10_000
    assert time.process_time() - started < 2


def test_counts_beyond_31_bits(tmp_path):
    with open(tmp_path / "train-00000.bin", "wb") as file:
        file.truncate(2 * 3_000_000_000)
    row = prepare.shard_row("train-00000.bin", 3_000_000_000, 0, "0" * 64)
    prepare.write_manifest(tmp_path, prepare.BYTES, 257, [row], [], [])
    assert prepare.read_manifest(tmp_path)["train"] == [row]


# -- the manifest


@pytest.fixture
def small(tmp_path):
    """A whole data folder of two train shards and one of validation."""
    texts = texts_of(tmp_path / "in", {f"{i}": f"document {i}" for i in range(9)})
    build(tmp_path / "data", texts, shard_tokens=60)
    return tmp_path / "data"


def edit(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_every_problem_is_in_one_message(small):
    manifest = prepare.read_manifest(small)
    train, val = manifest["train"], manifest["val"]
    os.remove(small / train[0]["file"])
    with open(small / train[1]["file"], "ab") as file:
        file.write(b"\0")
    edit(small, format=2, dtype="uint32", vocab_size=70_000, tokenizer="gpt2", sources=None,
         train=[*train, {"file": "x"}, prepare.shard_row("../secret", 1, 0, "")],
         val=[*val, *val, {**val[0], "file": "val-00007.bin", "tokens": 3, "header_bytes": 12}])
    with pytest.raises(ValueError) as caught:
        prepare.read_manifest(small)
    message = str(caught.value)
    for text in (str(small), "format is 2", "dtype is 'uint32'", "vocab_size is 70000", "tokenizer is 'gpt2'",
                 "sources is None", "train-00000.bin: the file is missing", "train-00001.bin: ",
                 "{'file': 'x'} lacks", "'../secret' is not the name", "val-00000.bin is listed 2 times",
                 "val-00007.bin: header_bytes is 12", "val-00007.bin: 3 tokens",
                 "val-00007.bin: the file is missing"):
        assert text in message, text
    edit(small, train=[])
    with pytest.raises(ValueError, match="train lists no shard"):
        prepare.read_manifest(small)


@pytest.mark.parametrize("content, text", [
    (None, "no data folder"), ("{", "is damaged"), ("[]", "no JSON object"), ("{}", "train is None")])
def test_a_manifest_that_is_none(tmp_path, content, text):
    if content is not None:
        texts_of(tmp_path, {"manifest.json": content})
    with pytest.raises(ValueError, match=text):
        prepare.read_manifest(tmp_path)


def test_the_fingerprint_is_of_the_data_alone(small):
    manifest = prepare.read_manifest(small)
    text = json.dumps({key: manifest[key] for key in ("dtype", "vocab_size", "tokenizer", "train", "val")},
                      sort_keys=True, separators=(",", ":"))
    assert prepare.fingerprint(manifest) == hashlib.sha256(text.encode()).hexdigest()
    assert prepare.fingerprint({**manifest, "sources": []}) == prepare.fingerprint(manifest)
    assert prepare.fingerprint({**manifest, "vocab_size": 258}) != prepare.fingerprint(manifest)


# -- verify


def test_verify_of_whole_data(small, capsys):
    assert prepare.main(["verify", str(small)]) == 0
    assert "every shard is what the manifest says" in capsys.readouterr().out


def test_verify_finds_every_damage(small, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "CHUNK", 1)  # shards are read in blocks of two ids
    flipped, truncated = small / "train-00000.bin", small / "train-00001.bin"
    beyond = small / "val-00000.bin"
    content = bytearray(flipped.read_bytes())
    content[50] ^= 1
    flipped.write_bytes(content)
    os.truncate(truncated, 10)
    content = bytearray(beyond.read_bytes())
    content[6:8] = (300).to_bytes(2, "little")
    beyond.write_bytes(content)
    manifest = prepare.load_manifest(small)
    edit(small, val=[{**manifest["val"][0], "sha256": hashlib.sha256(content).hexdigest()}])
    assert prepare.main(["verify", str(small)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("train-00000.bin: sha256 is ")
    assert lines[1].startswith("train-00001.bin: 10 bytes on disk")
    assert lines[2] == "val-00000.bin: token 3 is id 300, the vocabulary has 257"
    assert "no data folder" in refused(capsys, "verify", small / "nothing")
    edit(small, vocab_size=0)
    assert "vocab_size is 0" in refused(capsys, "verify", small)


def test_verify_reads_side_by_side_and_tells_how_far_it_is(tmp_path, monkeypatch, capsys):
    """All cores at once: each of two shards is read while the other one is."""
    write_data(tmp_path / "data", 100, val_tokens=100)
    both, real = threading.Barrier(2, timeout=20), prepare.scan
    monkeypatch.setattr(prepare.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(prepare, "scan", lambda *arguments: (both.wait(), real(*arguments))[1])
    lines = []
    monkeypatch.setattr(prepare.Progress, "end", lambda bar: lines.append(bar.line(1)))
    assert prepare.verify(tmp_path / "data")[1] == []
    assert len(lines) == 1 and "100%" in lines[0] and "200 tokens" in lines[0]


# -- import


def ids_file(path, ids, magic=None, version=1, tokens=None):
    header = b""
    if magic:
        header = np.array([magic, version, tokens or len(ids)] + [0] * 253, "<i4").tobytes()
    path.write_bytes(header + np.array(ids, "<u2").tobytes())
    return path


def import_words(out, *words):
    return ["import", "--out", str(out), *map(str, words)]


def test_import_links_and_copies_nothing(tmp_path, monkeypatch):
    train = ids_file(tmp_path / "train.bin", [1, 2, 50256, 3])
    fineweb = ids_file(tmp_path / "fineweb_train_000001.bin", [50256, 7], 20240520)
    val = ids_file(tmp_path / "fineweb_val_000000.bin", [50256, 9, 9], 20240520)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "none"))  # needs no vocabulary
    assert prepare.main(import_words(tmp_path / "out", train, val, fineweb)) == 0
    manifest = prepare.read_manifest(tmp_path / "out")
    assert (manifest["tokenizer"], manifest["vocab_size"]) == (prepare.GPT2, 50257)
    assert [(row["file"], row["tokens"], row["bytes"], row["header_bytes"]) for row in manifest["train"]] == [
        ("train-00000.bin", 4, 8, 0), ("train-00001.bin", 2, 1028, 1024)]
    assert [row["tokens"] for row in manifest["val"]] == [3]
    assert [row["name"] for row in manifest["sources"]] == [path.name for path in (train, val, fineweb)]
    assert [row["documents"] for row in manifest["sources"]] == [1, 1, 1]
    assert ids_of(tmp_path / "out", "train").tolist() == [1, 2, 50256, 3, 50256, 7]
    assert os.path.samefile(tmp_path / "out" / "train-00001.bin", fineweb)
    assert prepare.verify(tmp_path / "out", progress=False)[1] == []


def test_import_links_across_file_systems_and_through_links(tmp_path, monkeypatch):
    ids_file(tmp_path / "blob", [1, 2, 3])
    os.symlink("blob", tmp_path / "interval.bin")  # no 'val' as a word
    held_out = ids_file(tmp_path / "held-out.bin", [4, 5])

    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    words = [tmp_path / "interval.bin", "--val", held_out, "--tokenizer", "bytes"]
    assert prepare.main(import_words(tmp_path / "out", *words)) == 0
    assert os.readlink(tmp_path / "out" / "train-00000.bin") == str((tmp_path / "blob").resolve())
    manifest = prepare.read_manifest(tmp_path / "out")
    assert [row["tokens"] for row in manifest["val"]] == [2] and manifest["vocab_size"] == 257


def test_import_without_a_tokenizer(tmp_path, capsys):
    train = ids_file(tmp_path / "train.bin", [1, 64, 3])
    out = tmp_path / "out"
    assert "--vocab-size" in refused(capsys, *import_words(out, train, "--tokenizer", "none"))
    assert "goes with --tokenizer none" in refused(capsys, *import_words(out, train, "--vocab-size", 65))
    words = import_words(out, train, "--tokenizer", "none", "--vocab-size")
    assert "token 1 is id 64" in refused(capsys, *words, 64)
    assert not out.exists()
    assert prepare.main([*words, "65"]) == 0
    manifest = prepare.read_manifest(out)
    assert (manifest["vocab_size"], manifest["tokenizer"]) == (65, prepare.NO_TOKENIZER)


def test_import_refuses_what_is_no_token_file(tmp_path, capsys):
    np.save(tmp_path / "edu.npy", np.arange(4, dtype=np.uint16))
    texts_of(tmp_path, {"odd.bin": "abc", "empty.bin": ""})
    files = [tmp_path / "edu.npy", tmp_path / "odd.bin", tmp_path / "empty.bin", tmp_path / "absent.bin",
             ids_file(tmp_path / "llama.bin", [1, 2], 20240801, 7),
             ids_file(tmp_path / "hellaswag.bin", [1, 2], 20240522),
             ids_file(tmp_path / "new.bin", [1, 2], 20240520, version=2),
             ids_file(tmp_path / "short.bin", [1, 2], 20240520, tokens=1000),
             ids_file(tmp_path / "val.bin", [1]), tmp_path / "val.bin"]
    message = refused(capsys, *import_words(tmp_path / "out", *files))
    for text in ("edu.npy: a NumPy file", "odd.bin: 3 bytes", "empty.bin: 0 bytes", "absent.bin",
                 "llama.bin: uint32 ids for Llama 3", "hellaswag.bin: an evaluation set",
                 "new.bin: the llm.c header says version 2", "val.bin: named twice",
                 "short.bin: the llm.c header says version 1 and 1,000 tokens", "3,024 bytes, the file has"):
        assert text in message, text
    assert not (tmp_path / "out").exists()
    assert "none for training" in refused(capsys, *import_words(tmp_path / "out", tmp_path / "val.bin"))


# -- the embedded corpus and the command line


def test_the_standard_library(tmp_path):
    manifest = prepare.build_stdlib(tmp_path / "data" / "stdlib", progress=False)
    assert manifest == prepare.read_manifest(tmp_path / "data" / "stdlib")
    train, val = (sum(row["tokens"] for row in manifest[split]) for split in ("train", "val"))
    assert train > 4_000_000 and 0.01 < val / train < 0.2
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    source, = manifest["sources"]
    assert source["name"] == "python-stdlib" and source["revision"] == version
    out = tmp_path / "data" / "stdlib"
    documents = documents_of(out, "train") + documents_of(out, "val")
    assert len(documents) == source["documents"]
    assert Path(json.__file__).read_bytes() in documents
    assert not any(b"import unittest\n" in document and b"class Test" in document for document in documents)
    assert not any(b"build_time_vars = {" in document for document in documents), "differs per machine"


@pytest.mark.parametrize("options, text", [
    (["--val-ratio", "1"], "0 <= --val-ratio < 1"), (["--shard-tokens", "0"], "--shard-tokens >= 1"),
    (["--workers", "0"], "--workers >= 1")])
def test_options_out_of_range(tmp_path, capsys, options, text):
    texts_of(tmp_path / "in", {"a": "one", "b": "two"})
    assert text in refused(capsys, "build", tmp_path / "in", "--out", tmp_path / "out", *options)
    assert os.listdir(tmp_path) == ["in"]


def test_inputs_without_text(tmp_path, capsys):
    message = refused(capsys, "build", tmp_path / "x", tmp_path / "y", "--out", tmp_path / "out")
    assert f"{tmp_path / 'x'}, {tmp_path / 'y'}" in message
    texts_of(tmp_path / "in", {"a": "\n", "b": b"\0"})
    message = refused(capsys, "build", tmp_path / "in", "--out", tmp_path / "out")
    assert f"left out as binary (1): {tmp_path / 'in' / 'b'}" in message and "there is no text in" in message


def test_as_a_script(tmp_path):
    texts_of(tmp_path / "in", {f"{i}": f"document {i}" for i in range(5)})

    def run(*words):
        return subprocess.run([sys.executable, ROOT / "data" / "prepare.py", *words], cwd=tmp_path, text=True,
                              capture_output=True)

    done = run("build", "in", "--out", "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "documents              5" in done.stdout and "bytes, 257 ids" in done.stdout
    again = run("build", "in", "--out", "out", "--val-ratio=0.5")
    assert again.returncode == 2 and "Traceback" not in again.stderr and "prepare.py: " in again.stderr
    assert run("import").returncode == 2
