"""Probes: whether a model holds the right continuation likelier than a wrong one, and what asking it leaves alone."""

import json
import math
import os
import signal
from pathlib import Path

import driver
import pytest
import sample
import torch
from data import prepare
from data.vocabulary import load_tokenizer, named_tokenizer, train_bpe
from driver import assert_same, events, run_ranks, session, words_of
from model import GPT, GPTConfig
from train import Interrupt

ROOT = Path(sample.__file__).resolve().parent
SHIPPED = sorted(ROOT.glob("data/probes*.jsonl"))
BYTES = prepare.byte_tokenizer()
PROBES = [{"prompt": "the run ", "right": "goes", "wrong": "ends"}, {"prompt": "and", "right": " on", "wrong": "on ",
                                                                  "kind": "order"}]


@pytest.fixture
def file(tmp_path):
    """Writes lines, of objects or text, into a file of probes; its path."""
    def write(*lines):
        path = tmp_path / "probes.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return str(path)
    return write


def read(path, tokenizer=BYTES, block_size=64, said=None):
    return sample.read_probes(path, tokenizer, block_size, (said if said is not None else []).append)


def tiny(**changes):
    model = GPT(GPTConfig(**{"vocab_size": 257, "block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 32} | changes),
                seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return model


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A vocabulary with tokens of several letters and spaces, as a tokenizer.json."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe(["the capital of France is Paris and that of Japan is Tokyo "] * 50, 320))
    return named_tokenizer(str(path))


# -- the files

@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_the_shipped_probes_are_fair(path):
    """Many, no two alike, right and wrong of one length class, so that a length decides nothing."""
    lines, found = [json.loads(line) for line in path.read_text().splitlines()], read(str(path), block_size=16)
    assert len(found) == len(lines) == len({line["prompt"] for line in lines}) >= 20
    for line in lines:
        assert abs(len(line["right"]) - len(line["wrong"])) <= 2, line
        assert line["right"].startswith(" ") == line["wrong"].startswith(" "), line


def test_the_shipped_probes_are_of_four_kinds():
    lines = [json.loads(line) for line in (ROOT / "data/probes.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert {kind: kinds.count(kind) >= 6 for kind in kinds} == dict.fromkeys(
        ("arithmetic", "geography", "science", "language"), True)


@pytest.mark.parametrize("name", ["gpt2", "bpe", "bytes"])
def test_the_shipped_probes_can_be_read_by_every_kind_of_tokenizer(name, bpe, gpt2_vocabulary):
    tokenizer = {"bytes": BYTES, "bpe": bpe}.get(name) or load_tokenizer(prepare.GPT2)
    for path in SHIPPED:
        for probe in read(str(path), tokenizer, 128):
            found = json.loads(path.read_text().splitlines()[[p.prompt for p in read(str(path))].index(probe.prompt)])
            for ids, word in ((probe.right, found["right"]), (probe.wrong, found["wrong"])):
                assert tokenizer.decode(ids) == probe.prompt + word
                assert tokenizer.decode(ids[probe.start:]).endswith(word)
            assert probe.right[:probe.start] == probe.wrong[:probe.start]


@pytest.mark.parametrize("line,said", [
    ("{", "it is no JSON"), ("[" * 100_000, "it is no JSON"), ("[]", "wanted a JSON object with texts"),
    ({"prompt": "a", "right": "b"}, "texts 'prompt', 'right' and 'wrong', got {"),
    ({"prompt": "a", "right": "b", "wrong": 7}, "texts 'prompt', 'right' and 'wrong'"),
    ({"prompt": "a", "right": "", "wrong": "b"}, "texts 'prompt', 'right' and 'wrong'"),
    ({"prompt": "", "right": "a", "wrong": "b"}, "texts 'prompt', 'right' and 'wrong'"),
    ({"prompt": "a", "right": "same", "wrong": "same"}, "right and wrong are both 'same'"),
    ({"prompt": "a", "right": "b" * 65, "wrong": "b"}, "take up to 65 tokens; block_size is 64")])
def test_a_line_that_cannot_be_used_is_named(file, line, said):
    path = file(PROBES[0], "", line)
    with pytest.raises(ValueError) as found:
        read(path)
    assert str(found.value).startswith(f"probes_file {path!r}, line 3: ") and said in str(found.value)
    assert str(found.value).endswith("; probes_file='' turns probes off")


def test_files_that_cannot_be_used_are_named_and_none_is_none(file, tmp_path):
    for lines, said in (([], "has 0 probes; wanted are 1 to 1,000"), (PROBES * 501, "has 1,002 probes")):
        with pytest.raises(ValueError, match=f"probes_file .*{said}.*probes_file='' turns probes off"):
            read(file(*lines))
    with pytest.raises(ValueError, match="none.jsonl' cannot be read .*No such file.*; probes_file='' turns"):
        read(str(tmp_path / "none.jsonl"))
    assert read("") == read(file(*PROBES), tokenizer=None) == []


def test_a_bad_file_ends_a_run_before_its_first_step(file, data, tmp_path):
    words = words_of(tmp_path / "run", data, sample_interval=4, probes_file=file(PROBES[0], "no"))
    code, text = session(words)
    assert code == 2 and "line 2: it is no JSON" in text and not (tmp_path / "run").exists()
    words = words_of(tmp_path / "run", data, probes_file=file("no"), max_steps=1)
    assert session(words)[0] == 0, "without samples no probes are read"


# -- where a continuation starts

def test_a_continuation_starts_after_the_prompt(file):
    [probe, _] = read(file(*PROBES))
    assert (bytes(probe.right), bytes(probe.wrong), probe.start) == (b"the run goes", b"the run ends", 8)


def test_a_token_that_spans_the_border_belongs_to_the_continuation(file, bpe):
    """The text is encoded as in training: a space before a word is part of its token, wherever the prompt ends."""
    ends_before = read(file({"prompt": "capital of France is", "right": " Paris", "wrong": " Tokyo"}), bpe)
    ends_after = read(file({"prompt": "capital of France is ", "right": "Paris", "wrong": "Tokyo"}), bpe)
    assert len(bpe.encode("capital of France is ")) > len(bpe.encode("capital of France is"))
    assert ends_before[0][2:] == ends_after[0][2:]
    assert ends_before[0].start == len(bpe.encode("capital of France is"))


def test_a_prompt_that_melts_into_both_words_leaves_the_start_of_a_document(file, bpe):
    [probe] = read(file({"prompt": "P", "right": "aris", "wrong": "qris"}), bpe)
    assert bpe.encode("Paris")[0] != bpe.encode("P")[0]
    assert (probe.right[0], probe.wrong[0], probe.start) == (bpe.eot, bpe.eot, 1)


@pytest.mark.parametrize("block_size,kept", [(12, "the run "), (11, "the run "), (10, "he run "), (4, " ")])
def test_a_long_prompt_loses_its_head_and_that_is_said_once(file, block_size, kept):
    said = []
    probe, other = read(file(PROBES[0], {"prompt": "a", "right": "b", "wrong": "c"}), block_size=block_size, said=said)
    assert bytes(probe.right) == kept.encode() + b"goes" and probe.start == len(kept) and len(other.right) == 2
    assert len(probe.right) - 1 <= block_size and len(said) == (kept != "the run ")
    assert all(f"1 of 2 probes are too long for block_size {block_size}" in line for line in said)


def test_what_a_vocabulary_cannot_tell_apart_is_left_out_and_said(file):
    class Coarse:
        eot = 256
        def encode(self, text):
            return list(text.lower().encode())

    said = []
    assert len(read(file(PROBES[0], {"prompt": "a", "right": "b", "wrong": "B"}), Coarse(), said=said)) == 1
    assert "1 of 2 probes are left out" in said[0]


# -- the number

def slowly(model, ids, start):
    """log P of ids[start:], one token at a time."""
    total = 0.0
    for end in range(start, len(ids)):
        logits_V = model.logits(model.hidden(torch.tensor([ids[:end]]))[0, -1])[:model.config.vocab_size]
        total += logits_V.double().softmax(-1)[ids[end]].log().item()
    return total


@pytest.mark.parametrize("changes", [{}, {"position": "rope", "vocab_size": 300, "logit_cap": 30.0}])
def test_the_value_is_p_right_over_p_right_plus_p_wrong(file, changes):
    lines = [*PROBES, {"prompt": "a", "right": "bc", "wrong": "b"}]  # of the last one, one ends in the other
    model, probes = tiny(**changes).eval(), read(file(*lines))
    found = sample.probe(model, probes, Interrupt())
    with torch.no_grad():
        for probe, each, line in zip(probes, found["probes"], lines):
            right, wrong = (math.exp(slowly(model, ids, probe.start)) for ids in (probe.right, probe.wrong))
            assert each == {"prompt": line["prompt"], "kind": line.get("kind", ""),
                            "value": pytest.approx(right / (right + wrong), rel=1e-5)}
    assert found["mean"] == pytest.approx(sum(each["value"] for each in found["probes"]) / 3, rel=1e-6)
    assert max(each["value"] for each in found["probes"]) - min(each["value"] for each in found["probes"]) > 0.1


def test_words_so_unlikely_that_their_product_is_no_number_are_compared(file):
    texts = ("".join(chr(97 + k * i * i % 26) for i in range(300)) for k in (3, 7))
    [probe] = read(file({"prompt": "a"} | dict(zip(("right", "wrong"), texts))), block_size=512)
    model = tiny(block_size=512)
    right, wrong = (number.item() for number in sample.log_probabilities(model, probe))
    assert math.exp(right) == math.exp(wrong) == 0 and right != wrong
    found = sample.probe(model, [probe], Interrupt())
    assert found["mean"] == pytest.approx(1 / (1 + math.exp(min(700, wrong - right))), rel=1e-6)


def test_no_number_is_none_and_the_line_says_so(file):
    model = tiny()
    with torch.no_grad():
        model.wte.weight.fill_(math.nan)
    found = sample.probe(model, read(file(*PROBES)), Interrupt())
    assert found["mean"] is None and "not finite" in sample.probe_line(4, found)
    line = sample.probe_line(4000, {"mean": 0.625, "probes": [{"value": 0.5}, {"value": 0.75}]})
    assert line.startswith("probe  step 4,000: ") and "0.625" in line and line.endswith("in 1 of 2")


@pytest.mark.parametrize("training", [True, False])
def test_asking_leaves_generators_mode_weights_and_gradients_alone(file, training):
    model = tiny(dropout=0.5).train(training)
    weights, before = {name: parameter.clone() for name, parameter in model.named_parameters()}, torch.get_rng_state()
    first = sample.probe(model, read(file(*PROBES)), Interrupt())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training is training for module in model.modules())
    assert all(torch.equal(weights[name], parameter) and parameter.grad is None
               for name, parameter in model.named_parameters())
    torch.manual_seed(99)
    assert sample.probe(model, read(file(*PROBES)), Interrupt()) == first, "dropout is off"


def test_a_signal_cuts_them_short_within_a_probe(file):
    model, interrupt, probes, asked = tiny(), Interrupt(), read(file(*PROBES * 10)), []
    before = signal.signal(signal.SIGUSR1, interrupt.arrived)
    try:
        hook = model.wte.register_forward_hook(
            lambda *_: asked.append(len(asked) == 2 and os.kill(os.getpid(), signal.SIGUSR1)))
        assert sample.probe(model, probes, interrupt) == {}
        hook.remove()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(asked) == 3 and model.training


# -- in a run

@pytest.fixture
def words(file, data):
    path = file(*PROBES)
    return lambda out_dir, data=data, **more: words_of(
        out_dir, data, **{"sample_interval": 6, "probes_file": path} | more)


def test_probes_come_with_the_samples_and_change_no_bit(words, tmp_path):
    """Dropout is on: a generator that had been moved, or a model left in another mode, would show."""
    for name, path in (("with", {}), ("without", {"probes_file": ""})):
        code, text = session(words(tmp_path / name, dropout=0.1, **path))
        assert code == 0, text
        assert text.count("\nprobe  step ") == (3 if name == "with" else 0)
    rows = events(tmp_path / "with", "probe")
    assert [row["step"] for row in rows] == [0, 6, 12] == [row["step"] for row in events(tmp_path / "with", "sample")]
    assert all([each["prompt"] for each in row["probes"]] == ["the run ", "and"] for row in rows)
    assert all(0 < row["mean"] < 1 for row in rows) and len({row["mean"] for row in rows}) == 3
    assert not events(tmp_path / "without", "probe")
    assert_same(tmp_path / "with", tmp_path / "without")


def test_two_ranks_tell_them_once_and_the_same(words, tmp_path):
    for world_size in (1, 2):
        for code, text in run_ranks(world_size, tmp_path, (words(tmp_path / str(world_size)), {}))[0]:
            assert code == 0, text
    one, two = (events(tmp_path / str(world_size), "probe") for world_size in (1, 2))
    assert [row["step"] for row in two] == [0, 6, 12] and two[0]["probes"] == one[0]["probes"]
    assert two[-1]["mean"] == pytest.approx(one[-1]["mean"], rel=1e-3)


def test_a_signal_in_a_probe_ends_the_run_in_a_checkpoint_without_that_event(words, tmp_path):
    ask, calls = sample.probe, []

    def signalled(*arguments):
        calls.append(1)
        if len(calls) == 2:
            driver.signal_self("SIGTERM")
        return ask(*arguments)

    code, text = session(words(tmp_path / "run"), **{"sample.probe": signalled})
    assert code == 0 and driver.status(tmp_path / "run") == ("stopped", "signal", 7), text
    assert [row["step"] for row in events(tmp_path / "run", "probe")] == [0]
    assert session(words(tmp_path / "run"))[0] == 0
    assert [row["step"] for row in events(tmp_path / "run", "probe")] == [0, 12]


def test_data_without_a_tokenizer_have_no_probes(words, tmp_path, data):
    folder = tmp_path / "ids"
    folder.mkdir()
    manifest = json.loads((data / "manifest.json").read_text())
    for shard in (*manifest["train"], *manifest["val"]):
        (folder / shard["file"]).write_bytes((data / shard["file"]).read_bytes())
    prepare.write_manifest(folder, prepare.NO_TOKENIZER, 257, manifest["train"], manifest["val"], [])
    code, text = session(words(tmp_path / "run", data=folder, max_steps=1))
    assert code == 0 and not events(tmp_path / "run", "probe"), text
