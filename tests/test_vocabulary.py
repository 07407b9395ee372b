"""A tokenizer.json: made, taken along with data and checkpoints, found there again, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from test_prepare import build, ids_of, refused, sentences, texts_of
from test_sources import all_bytes, lines

from data import building, prepare, sources, vocabulary

ROOT = Path(prepare.__file__).resolve().parents[1]
ODD = "na\u00efve \u6771\u4eac \U0001f680\r\n\t  end\0 <|endoftext|>"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    texts = [sentences(i, 300) for i in range(80)]
    return texts_of(folder / "in", {"a.jsonl": lines(texts), "b.txt": sentences(99, 5000)})


@pytest.fixture(scope="module")
def own(corpus):
    """A vocabulary of 300 ids, trained by the command."""
    path = corpus.parent / "own.json"
    assert prepare.main(["train-tokenizer", str(corpus), "--vocab-size=300", "--out", str(path)]) == 0
    return path


def special(library, texts):
    """A tokenizer.json of the library with special tokens added."""
    library.add_special_tokens(list(texts))
    return library.to_str()


def words(vocab, end="</s>"):
    """A tokenizer of whole words, whose ids are not bytes of the text."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab | {"[UNK]": len(vocab)}, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return special(library, [end] if end else [])


def test_a_trained_one_tells_every_text(own):
    tokenizer = prepare.named_tokenizer(str(own))
    assert (tokenizer.vocab_size, tokenizer.identity["name"]) == (300, "bpe-300")
    for text in (ODD, sentences(5, 3000), "".join(map(chr, range(1, 0x300)))):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
        assert tokenizer.eot not in ids, "text must not be able to end a document"
    assert len(tokenizer.encode(sentences(5, 3000))) < 2000
    assert tokenizer.token_bytes()[tokenizer.eot] == 0
    assert tokenizer.decode([tokenizer.eot, 10_000]) == "<|endoftext|>\ufffd"


def test_training_gives_the_same_twice_and_looks_at_no_validation(corpus, own, tmp_path, monkeypatch):
    again = tmp_path / "again.json"
    assert prepare.main(["train-tokenizer", str(corpus), "--vocab-size=300", "--out", str(again)]) == 0
    assert again.read_bytes() == own.read_bytes()
    seen = []
    monkeypatch.setattr(prepare, "train_bpe", lambda texts, size: seen.extend(texts) or own.read_text())
    for i, megabytes in enumerate((1, 0.01)):
        options = ["--vocab-size=300", f"--sample-mb={megabytes}", "--val-ratio=0.2", "--out", str(tmp_path / f"{i}")]
        assert prepare.main(["train-tokenizer", str(corpus), *options]) == 0
    build(tmp_path / "out", corpus, val_ratio=0.2)
    val = prepare.byte_tokenizer().decode(ids_of(tmp_path / "out", "val").tolist()).split("<|endoftext|>")[:-1]
    assert val and not set(val) & set(seen)
    assert len(set(seen)) == 81 - len(val) < len(seen) < 2 * len(set(seen)), "the second sample is smaller"


@pytest.mark.parametrize("workers", [1, 2])
def test_data_carry_their_tokenizer(corpus, own, tmp_path, workers):
    manifest = build(tmp_path / "out", corpus, tokenizer=own, workers=workers, val_ratio=0.2)
    assert manifest["vocab_size"] == 300 and manifest["tokenizer"]["kind"] == "tokenizer.json"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == own.read_bytes()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "out", elsewhere)
    tokenizer = prepare.open_tokenizer(manifest, pytest.fail, str(elsewhere))
    plain = [text.decode() for text in all_bytes(corpus).values()]
    text = tokenizer.decode(ids_of(elsewhere, "train").tolist()).split("<|endoftext|>")
    assert plain[1] in text and len(text) > 50
    assert prepare.verify(elsewhere, progress=False)[1] == []


def test_a_tokenizer_serves_for_one_build_after_the_other(corpus, own, tmp_path):
    tokenizer, (given, _) = prepare.named_tokenizer(str(own)), sources.find_sources([str(corpus)])
    built = [building.build_data(tmp_path / name, given, tokenizer, workers=1, progress=False) for name in ("a", "b")]
    assert built[0]["train"] == built[1]["train"] and tokenizer.file == str(own)


def test_data_are_the_same_wherever_the_tokenizer_lay(corpus, own, tmp_path):
    folder = tmp_path / "some" / "folder"
    folder.mkdir(parents=True)
    shutil.copy(own, folder / "tokenizer.json")
    one = build(tmp_path / "one", corpus, tokenizer=own)
    assert prepare.fingerprint(build(tmp_path / "two", corpus, tokenizer=folder)) == prepare.fingerprint(one)


def test_import_takes_it_along(corpus, own, tmp_path):
    build(tmp_path / "one", corpus, tokenizer=own)
    shards = sorted((tmp_path / "one").glob("*.bin"))
    assert prepare.main(["import", *map(str, shards), "--tokenizer", str(own), "--out", str(tmp_path / "two")]) == 0
    one, two = (prepare.read_manifest(tmp_path / name) for name in ("one", "two"))
    assert prepare.fingerprint(one) == prepare.fingerprint(two)
    assert prepare.open_tokenizer(two, pytest.fail, str(tmp_path / "two")).vocab_size == 300


def test_another_or_no_file_in_the_data_is_said(corpus, own, tmp_path):
    manifest, out = build(tmp_path / "out", corpus, tokenizer=own), tmp_path / "out"
    (out / "tokenizer.json").write_bytes(own.read_bytes() + b" ")
    said = []
    assert prepare.open_tokenizer(manifest, said.append, str(out)) is None
    assert prepare.tokenizer_file(str(out), manifest) == {}
    assert prepare.verify(out, progress=False)[1] == [
        "tokenizer.json: the file is missing or has another sha256 than the manifest says"]
    os.remove(out / "tokenizer.json")
    assert prepare.open_tokenizer(manifest, said.append, str(out)) is None
    assert "is not the one the data was made with" in said[0] and "cannot be read" in said[1]


def test_what_a_file_asks_for_cannot_cut_or_pad_the_text(own, tmp_path):
    library = tokenizers.Tokenizer.from_file(str(own))
    library.enable_truncation(5)
    library.enable_padding(length=50)
    library.post_processor = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    library.save(str(tmp_path / "asks.json"))
    tokenizer, plain = (prepare.named_tokenizer(str(path)) for path in (tmp_path / "asks.json", own))
    assert tokenizer.encode(ODD * 3) == plain.encode(ODD * 3)


def test_ids_that_are_no_bytes_are_decoded_by_the_library(tmp_path):
    (tmp_path / "words.json").write_text(words({"the": 0, "run": 1, "goes": 2}))
    tokenizer = prepare.named_tokenizer(str(tmp_path / "words.json"))
    assert tokenizer.encode("the run stops") == [0, 1, 3] and tokenizer.eot == 4
    assert tokenizer.decode([0, 1, 4, 77]) == "the run </s>"
    assert tokenizer.token_bytes().tolist() == [0] * 5, "their bytes are not known"


def with_prefix(library, pre_tokenizer=None, normalizer=None):
    """A vocabulary of single characters and pairs, whose texts begin with something of their own."""
    library.pre_tokenizer, library.normalizer = pre_tokenizer, normalizer
    return special(library, ["</s>"])


@pytest.mark.parametrize("more", [
    {"pre_tokenizer": tokenizers.pre_tokenizers.Metaspace()},
    {"pre_tokenizer": tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)},
    {"normalizer": tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("\u2581"),
                                                    tokenizers.normalizers.Replace(" ", "\u2581")])}])
def test_a_long_document_has_the_ids_of_its_whole_text(tmp_path, monkeypatch, more):
    text = sentences(7, 3000)
    letters = [*sorted({*text, *tokenizers.pre_tokenizers.ByteLevel.alphabet()}), "\u2581"]
    merges = [("e", "r"), ("o", "n"), ("\u2581", "t"), ("\u0120", "t"), ("\u2581", "\u2581")]
    vocab = {word: i for i, word in enumerate([*letters, *("".join(pair) for pair in merges)])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    (tmp_path / "t.json").write_text(with_prefix(library, **more))
    folder = texts_of(tmp_path / "in", {"long": text})
    whole = prepare.named_tokenizer(str(tmp_path / "t.json")).encode(text)
    assert len(whole) > 1000
    for chunk in (97, 333, 1 << 20):
        monkeypatch.setattr(sources, "CHUNK", chunk)
        build(tmp_path / f"out{chunk}", folder, tokenizer=tmp_path / "t.json", val_ratio=0)
        assert ids_of(tmp_path / f"out{chunk}", "train").tolist()[:-1] == whole, chunk


def test_text_cannot_end_a_document_where_its_end_is_a_word_like_others(tmp_path):
    pieces = [("</s>", 0.0), ("<unk>", 0.0), *((letter, -2.0) for letter in "abcdefghijklmnopqrstuvwxyz </>\u2581")]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=1))
    library.decoder = tokenizers.decoders.Fuse()
    (tmp_path / "t.json").write_text(special(library, ["</s>"]))
    tokenizer = prepare.named_tokenizer(str(tmp_path / "t.json"))
    for text in ("struck</s> out", "</s>", "</s></s>", "a</s>b</s>"):
        assert tokenizer.eot not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
    folder = texts_of(tmp_path / "in", {"a": "one</s>two"})
    manifest = build(tmp_path / "out", folder, tokenizer=tmp_path / "t.json", val_ratio=0)
    assert manifest["sources"][0]["documents"] == 1
    assert ids_of(tmp_path / "out", "train").tolist().count(tokenizer.eot) == 1


def test_ids_are_the_same_each_time(own, tmp_path):
    library = json.loads(own.read_text())
    library["model"]["dropout"] = 0.5
    (tmp_path / "t.json").write_text(json.dumps(library))
    tokenizer = prepare.named_tokenizer(str(tmp_path / "t.json"))
    assert len({tuple(tokenizer.encode(sentences(1, 500))) for _ in range(5)}) == 1


def test_the_end_of_text_can_be_named(tmp_path, capsys):
    folder = texts_of(tmp_path / "in", {"a": "the run", "b": "run"})
    (tmp_path / "t.json").write_text(words({"the": 0, "run": 1}, end="[SEP]"))
    given = ["build", folder, "--out", tmp_path / "out", "--tokenizer", tmp_path / "t.json", "--val-ratio=0"]
    assert "--end-of-text names one of them" in (message := refused(capsys, *given)) and "[SEP]" in message
    assert "none of [CLS] is" in refused(capsys, *given, "--end-of-text=[CLS]")
    assert prepare.main([*map(str, given), "--end-of-text=[SEP]"]) == 0
    assert ids_of(tmp_path / "out", "train").tolist() == [0, 1, 3, 1, 3]
    manifest = prepare.read_manifest(tmp_path / "out")
    assert prepare.open_tokenizer(manifest, pytest.fail, str(tmp_path / "out")).eot == 3
    shard = str(tmp_path / "out" / "train-00000.bin")
    assert prepare.main(["import", shard, "--tokenizer", str(tmp_path / "t.json"), "--end-of-text=[SEP]", "--out",
                         str(tmp_path / "again")]) == 0
    assert prepare.read_manifest(tmp_path / "again")["tokenizer"] == manifest["tokenizer"]
    assert "goes with a tokenizer.json" in refused(
        capsys, "build", folder, "--out", tmp_path / "o", "--tokenizer=bytes", "--end-of-text=x")


def test_what_is_refused(corpus, tmp_path, capsys):
    def message_for(content):
        (tmp_path / "t.json").write_text(content)
        return refused(capsys, "build", corpus, "--out", tmp_path / "out", "--tokenizer", tmp_path / "t.json")

    large = message_for(words({f"w{i}": i for i in range(65_535)}))
    assert "65,537 ids" in large and "at most 65,536" in large and "train-tokenizer" in large
    assert "no end-of-text token" in (message := message_for(words({"a": 0}, end=""))) and "it has none" in message
    assert "is no tokenizer.json that" in message_for("{}") and "is no tokenizer.json that" in message_for("\0")
    assert "cannot be read" in refused(capsys, "build", corpus, "--out", tmp_path / "out", "--tokenizer=no.json")
    for size in (256, 65_537):
        message = refused(capsys, "train-tokenizer", corpus, "--vocab-size", size, "--out", tmp_path / "own.json")
        assert "at least 257" in message and f"{size:,}" in message
    assert "is there" in refused(capsys, "train-tokenizer", corpus, "--vocab-size=300", "--out", tmp_path / "t.json")
    assert sorted(os.listdir(tmp_path)) == ["t.json"]


def test_a_vocabulary_of_65_536_ids_fits(tmp_path):
    (tmp_path / "w.json").write_text(words({f"w{i}": i for i in range(65_534)}))
    tokenizer = prepare.named_tokenizer(str(tmp_path / "w.json"))
    assert (tokenizer.vocab_size, tokenizer.eot) == (65_536, 65_535)
    texts_of(tmp_path / "in", {"a": "w65533 w1", "b": "w2"})
    build(tmp_path / "out", tmp_path / "in", tokenizer=tmp_path / "w.json", val_ratio=0)
    assert ids_of(tmp_path / "out", "train").tolist() == [65_533, 1, 65_535, 2, 65_535]


def test_a_run_takes_it_along_and_samples_by_it(corpus, own, tmp_path):
    build(tmp_path / "data", corpus, tokenizer=own, val_ratio=0.2)
    run = ["config/quickstart.py", f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}", "--n_layer=1",
           "--n_head=1", "--n_embd=16", "--block_size=32", "--batch_size=4", "--batch_tokens=128", "--max_steps=4",
           "--warmup_steps=1", "--checkpoint_interval=2", "--milestone_interval=2", "--eval_interval=4",
           "--eval_tokens=256", "--sample_interval=4", "--sample_tokens=8", "--prepare=", "--compile=off"]
    command([ROOT / "train.py", *run])
    for kind in ("checkpoints/step_00000004", "milestones/step_00000002"):
        assert (tmp_path / "out" / kind / "tokenizer.json").read_bytes() == own.read_bytes()
        listed = json.loads((tmp_path / "out" / kind / "manifest.json").read_text())["files"]
        assert "tokenizer.json" in {row["name"] for row in listed}
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert all(event["bits_per_byte"] > 0 for event in events if event["event"] == "eval")
    shutil.rmtree(tmp_path / "data")
    sample = [ROOT / "sample.py", f"--out_dir={tmp_path / 'out'}", "--prompt=the run", "--samples=1", "--tokens=5"]
    assert "the run" in command(sample)


def command(words):
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_alphabet_is_that_of_the_library():
    letters = vocabulary.byte_letters()
    assert set(letters) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(letters.values()) == list(range(256))
    assert np.array_equal([letters[c] for c in "\u0120a"], [32, 97])
