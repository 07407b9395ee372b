"""Mixtures of data folders: which source each window is of, what each source has given, and runs on them."""

import collections
import functools
import itertools
import json
import os
import random
import shutil
import time

import numpy as np
import pytest

import train
from conftest import write_data
from driver import assert_same, before_step, by_step, events, pointed, rows, run_ranks, session, words_of
from test_prepare import refused
from test_sources import killed_after

from data import prepare
from data.shards import Mixture, Part

BLOCK = train.MIX_BLOCK


def mixture_of(*sources, seed=0):
    """An order over sources of (share, tokens)."""
    first, parts = 0, []
    for number, (share, tokens) in enumerate(sources):
        parts.append(Part(f"s{number}", share, first, tokens))
        first += tokens
    return ((0, first, Mixture(seed, tuple(parts))),)


def mixtures(count):
    """Random (order, data_seed, block_size); some sources are gone through many times, some never whole."""
    draw = random.Random(50)
    for _ in range(count):
        block_size = draw.randint(1, 40)
        windows = [draw.choice([30, 90, 900, 20_000]) for _ in range(draw.randint(1, 5))]
        sources = [(draw.randint(1, 60), block_size * number + draw.randint(1, block_size)) for number in windows]
        yield mixture_of(*sources, seed=draw.randrange(100)), draw.randrange(1 << 32), block_size


# -- the order

@pytest.mark.parametrize("first, sources, numbers", [
    (0, [0, 0, 1, 0, 0, 0, 1, 1], [0, 1, 0, 2, 3, 4, 1, 2]),
    (10**10 - 4, [0, 0, 1, 0, 0, 0, 0, 0], [6999999997, 6999999998, 2999999999, 6999999999, 7000000000]),
])
def test_golden_values_of_a_mixture(first, sources, numbers):
    """Frozen for ever: with other values no run on a mixture could be resumed."""
    [(_, _, mixture)] = mixture_of((7, 10**9), (3, 10**8))
    block = train.mixed_block(first // BLOCK, mixture, 1337)
    found = np.concatenate([block, train.mixed_block(first // BLOCK + 1, mixture, 1337)], axis=1)[:, first % BLOCK:]
    assert found[0, :len(sources)].tolist() == sources and found[1, :len(numbers)].tolist() == numbers


def test_golden_values_of_the_windows_of_a_mixture():
    """(pass, window, first token, source); frozen for ever."""
    drawn = train.draw_windows(9_998, 5, mixture_of((2, 10**6), (1, 5000)), 1337, 100)
    assert np.stack(drawn, axis=1).tolist() == [
        [0, 4890, 489058, 0], [68, 19, 1001983, 1], [68, 16, 1001683, 1], [0, 5341, 534158, 0], [0, 3298, 329858, 0]]


def test_shares_are_exact_at_every_block():
    for order, seed, _ in mixtures(8):
        mixture, taken = order[0][2], np.zeros(len(order[0][2].sources))
        shares = np.array([source.share for source in mixture.sources])
        for number in range(3):
            taken += np.bincount(train.mixed_block(number, mixture, seed)[0], minlength=len(shares))
            assert taken.sum() == BLOCK * (number + 1)
            assert (np.abs(taken - BLOCK * (number + 1) * shares / shares.sum()) < 1).all()


def test_a_source_gives_its_windows_in_their_order():
    for order, seed, _ in mixtures(4):
        blocks = [train.mixed_block(number, order[0][2], seed) for number in range(3)]
        sources, numbers = np.concatenate(blocks, axis=1)
        for source in range(len(order[0][2].sources)):
            mine = numbers[sources == source]
            assert mine.tolist() == list(range(len(mine)))


def test_every_window_of_a_source_is_drawn_once_in_each_of_its_passes():
    for order, seed, block_size in mixtures(4):
        number, window, start, source = train.draw_windows(0, 2 * BLOCK, order, seed, block_size)
        for place, part in enumerate(order[0][2].sources):
            every, mine = (part.tokens - 1) // block_size, source == place
            assert (number[mine] == np.arange(mine.sum()) // every).all(), "its passes follow one another"
            for turn in range(min(int(mine.sum()) // every, 30)):
                assert (np.sort(window[mine & (number == turn)]) == np.arange(every)).all()
            assert (start[mine] >= part.first_token).all()
            assert (start[mine] + block_size < part.first_token + part.tokens).all(), "no window lies in two sources"


def test_a_step_is_a_piece_of_the_whole_whatever_came_before():
    for order, seed, block_size in mixtures(4):
        whole = np.stack(train.draw_windows(0, 2 * BLOCK + 100, order, seed, block_size))
        for first, count in ((0, 1), (17, 96), (BLOCK - 5, 11), (BLOCK, 3), (BLOCK - 1, BLOCK + 2)):
            train.mixed_block.cache_clear()
            assert (np.stack(train.draw_windows(first, count, order, seed, block_size))
                    == whole[:, first:first + count]).all()


def test_sources_are_well_mixed_within_a_block():
    """Within four standard errors of what chance gives: in each tenth of a block, and from one window to the next."""
    for number in (0, 7):
        [(_, _, mixture)] = mixture_of((3, 10**6), (1, 10**6))
        is_second = train.mixed_block(number, mixture, 5)[0].astype(float)
        tenths = is_second.reshape(10, -1).sum(axis=1)
        assert np.abs(tenths - BLOCK / 40).max() < 4 * (BLOCK / 10 * 0.25 * 0.75) ** 0.5
        assert abs(np.corrcoef(is_second[1:], is_second[:-1])[0, 1]) < 4 / BLOCK ** 0.5


def test_seeds_change_the_order_and_not_the_shares():
    orders = [mixture_of((2, 10**5), (1, 10**5), seed=seed) for seed in (0, 1)]
    drawn = [np.stack(train.draw_windows(0, BLOCK, order, seed, 10)) for order in orders for seed in (1, 2)]
    assert len({one.tobytes() for one in drawn}) == 4
    assert len({tuple(np.bincount(one[3])) for one in drawn}) == 1


def test_a_window_far_out_costs_what_the_first_does():
    order = mixture_of((2, 10**13), (1, 10**12), (1, 10**6))
    seconds = {}
    for first in (0, 10**10):
        times = []
        for attempt in range(3):
            train.mixed_block.cache_clear()
            began = time.perf_counter()
            number, window, start, source = train.draw_windows(first, 512, order, 3, 1024)
            times.append(time.perf_counter() - began)
        seconds[first] = min(times)
        assert set(source.tolist()) == {0, 1, 2} and start.max() < 2 * 10**13
    assert seconds[10**10] < 5 * seconds[0] + 0.05


def test_what_is_drawn_of_each_source_is_counted_at_any_window():
    for order, seed, block_size in mixtures(5):
        sources = train.draw_windows(0, 2 * BLOCK, order, seed, block_size)[3]
        for windows in (0, 1, 500, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
            counts = np.bincount(sources[:windows], minlength=len(order[0][2].sources)) * block_size
            assert train.tokens_by_source(windows, order, seed, block_size) == {
                "source_tokens": {f"s{number}": count for number, count in enumerate(counts.tolist())}}
    assert train.tokens_by_source(5, ((0, 100),), 1, 2) == {}


# -- the command

def command(*words):
    assert prepare.main([str(word) for word in words]) == 0


@pytest.fixture
def mixed(tmp_path):
    """web (two shards) and code in shares of 3 to 1."""
    write_data(tmp_path / "web", 700, 300, val_tokens=400)
    write_data(tmp_path / "code", 250, val_tokens=150)
    command("mix", f"{tmp_path / 'web'}=0.75", f"{tmp_path / 'code'}=0.25", "--out", tmp_path / "mix")
    return tmp_path / "mix"


def test_a_mixture_is_links_and_shares(mixed, tmp_path):
    manifest = prepare.read_manifest(mixed)
    web, code = (prepare.read_manifest(tmp_path / name) for name in ("web", "code"))
    assert [row["sha256"] for row in manifest["train"]] == [row["sha256"] for row in web["train"] + code["train"]]
    assert [row["sha256"] for row in manifest["val"]] == [row["sha256"] for row in web["val"] + code["val"]]
    assert [source["share"] for source in manifest["mixture"]["sources"]] == [3, 1]
    assert [source["fingerprint"] for source in manifest["mixture"]["sources"]] == [
        prepare.fingerprint(data) for data in (web, code)]
    assert manifest["mixture"]["tokens"] == 1000, "a third more would draw code twice"
    for path in mixed.glob("*.bin"):
        source, _, name = path.name.partition("-")
        assert os.path.samefile(path, tmp_path / source / name)
    assert prepare.verify(mixed, progress=False)[1] == []


def test_a_mixture_appears_whole_or_not_at_all(mixed, tmp_path):
    words = ["mix", f"{tmp_path / 'web'}=3", f"{tmp_path / 'code'}=1", "--out", tmp_path / "out"]
    for events in itertools.count():
        was_killed = killed_after(events, words, ((os, "link"), (os, "replace"), (os, "fsync"), (os, "rename")))
        if (tmp_path / "out").exists():
            break
        assert was_killed
    assert events > 8
    found = prepare.read_manifest(tmp_path / "out")
    assert found["train"] == prepare.read_manifest(mixed)["train"]
    assert prepare.verify(tmp_path / "out", progress=False)[1] == []


def test_a_mixture_refuses_what_does_not_go_together(mixed, tmp_path, capsys):
    web, code, out = tmp_path / "web", tmp_path / "code", tmp_path / "out"
    write_data(tmp_path / "ids", 100)
    shards = prepare.read_manifest(tmp_path / "ids")["train"]
    prepare.write_manifest(tmp_path / "ids", prepare.GPT2, 50257, shards, [], [])
    shutil.copytree(web, tmp_path / "other" / "web")
    shutil.copytree(code, tmp_path / "copy")
    for given, text in (
            ([f"{code}=1", f"{tmp_path / 'copy'}=1"], f"{tmp_path / 'copy'}: its train-00000.bin is in {code} too"),
            ([f"{web}=1", f"{tmp_path / 'ids'}=1"], f"{tmp_path / 'ids'}: its vocab_size is 50257, in {web} it is 257"),
            ([f"{web}=1", f"{tmp_path / 'ids'}=1"], "its tokenizer is"),
            ([f"{web}=1", f"{web}=1"], f"{web}: named 2 times"),
            ([f"{web}=1", f"{tmp_path / 'other' / 'web'}=1"], "2 folders have the name web"),
            ([f"{web}=1", f"{code}=0.0001"], f"{code}: its share is 0.0001 of 1.0001; at least 0.001"),
            ([f"{web}=1", f"{code}=-1"], "its share is -1"),
            ([f"{web}=1", f"{mixed}=1"], f"{mixed}: it is a mixture"),
            ([f"{web}=1", f"{code}=1", "--tokens=-5"], "--tokens is -5")):
        message = refused(capsys, "mix", *given, "--out", out)
        assert "nothing was mixed" in message and text in message, message
        assert not out.exists()
    for words in (["append", mixed, code], ["append", web, mixed], ["merge", web, mixed, "--out", out]):
        assert "it is a mixture; its sources cannot change or grow" in refused(capsys, *words)


def test_a_manifest_whose_mixture_does_not_fit_is_refused(mixed):
    manifest = json.loads((mixed / "manifest.json").read_text())
    for source, change, text in ((0, {"tokens": 5}, "mixture: source web has 5 tokens in 2 train shards"),
                                 (1, {"val_shards": 0}, "mixture: 1 val shards belong to none of its sources"),
                                 (1, {"share": 0}, "the share of code is below"), (0, {"name": 3}, "not an object")):
        other = json.loads(json.dumps(manifest))
        other["mixture"]["sources"][source] |= change
        (mixed / "manifest.json").write_text(json.dumps(other))
        with pytest.raises(ValueError, match=text):
            prepare.read_manifest(mixed)


def test_status_of_a_mixture(mixed, tmp_path, capsys):
    capsys.readouterr()
    command("status", mixed, "--block-size=10")
    said = capsys.readouterr().out
    assert "1,000 tokens count as a pass" in said
    assert "web: share 0.7500, 1,000 train and 400 val tokens, 750 tokens to draw = 0.75 passes of it" in said
    assert session(words_of(tmp_path / "out", mixed, max_steps=6))[0] == 0
    command("status", mixed, tmp_path / "out")
    drawn, said = pointed(tmp_path / "out")[1]["source_tokens"], capsys.readouterr().out
    assert f"web: share 0.7500, 1,000 train and 400 val tokens, {drawn['web']:,} tokens drawn = " in said
    assert f"{(1000 - 1) // 16 - 48:,} windows not drawn yet" in said


# -- runs

def test_a_run_on_a_mixture_counts_by_source_and_goes_on_exactly(mixed, tmp_path):
    words = functools.partial(words_of, data_dir=mixed, eval_interval=4, eval_tokens=0)
    assert session(words(tmp_path / "straight"))[0] == 0
    for steps in (3, 6, 0):
        code, text = session(words(tmp_path / "stopped", stop_after_steps=steps))
        assert code == 0, text
    [ranks] = run_ranks(2, tmp_path, (words(tmp_path / "two"), {}))
    assert [code for code, _ in ranks] == [0, 0], ranks
    assert_same(tmp_path / "stopped", tmp_path / "straight")
    windows, counts = by_step(tmp_path / "straight" / "windows.jsonl", "windows"), collections.Counter()
    assert by_step(tmp_path / "two" / "windows.jsonl", "windows") == windows
    metrics = by_step(tmp_path / "straight" / "metrics.jsonl", "source_tokens", "epoch")
    for step, [drawn] in sorted(windows.items()):
        counts.update(source for _, _, source in drawn)
        tokens = {"web": 16 * counts[0], "code": 16 * counts[1]}
        assert metrics[step] == [tokens, pytest.approx(8 * step / ((1000 - 1) // 16), abs=1e-5)]
    assert pointed(tmp_path / "straight")[1]["source_tokens"] == tokens and counts[0] > counts[1] > 5


def test_the_validation_loss_is_also_that_of_each_source(mixed, tmp_path):
    write_data(tmp_path / "noval", 300, val_tokens=0)
    command("mix", f"{tmp_path / 'web'}=2", f"{tmp_path / 'noval'}=1", f"{tmp_path / 'code'}=1", "--out",
            tmp_path / "three")
    code, text = session(words_of(tmp_path / "out", tmp_path / "three", eval_interval=6, eval_tokens=200))
    assert code == 0, text
    found = events(tmp_path / "out", "eval")
    assert [row["step"] for row in found] == [0, 6, 12]
    for row in found:
        web, code = row["sources"]["web"], row["sources"]["code"]
        assert row["sources"].keys() == {"web", "code"} and web != code
        assert row["val_loss"] == pytest.approx((2 * web + code) / 3, abs=1e-6), "by the shares of those that have any"
    assert [row["windows"] for row in found] == [9 + 5, 14, 24 + 9]
    assert f"web {web:.4f}, code {code:.4f}" in text
    for name in ("web", "code"):  # each is what a run on that source alone would see
        words = words_of(tmp_path / "none", tmp_path / name, eval_only=True, init_from=pointed(tmp_path / "out")[0])
        code, text = session(words)
        assert code == 0 and f"val loss {found[-1]['sources'][name]:.4f}" in text, text


def test_a_mixture_that_is_not_the_recorded_one_is_refused(mixed, tmp_path):
    assert session(words_of(tmp_path / "out", mixed, stop_after_steps=4))[0] == 0
    shares = [f"{tmp_path / 'web'}=0.7", f"{tmp_path / 'code'}=0.3"]
    command("mix", *shares, "--out", tmp_path / "other")
    command("mix", f"{tmp_path / 'web'}=3", f"{tmp_path / 'code'}=1", "--out", tmp_path / "same")
    code, text = session(words_of(tmp_path / "out", tmp_path / "other"))
    assert code == 2 and "are not those of this run" in text
    assert session(words_of(tmp_path / "out", tmp_path / "same"))[0] == 0
    (mixed / "code-train-00000.bin").unlink()
    code, text = session(words_of(tmp_path / "out", mixed))
    assert code == 2 and "code-train-00000.bin: the file is missing" in text


def test_what_is_appended_to_a_source_does_not_reach_a_mixture(mixed, tmp_path):
    """Its sources are pinned: the run is the same."""
    write_data(tmp_path / "more", 500)
    grow = functools.partial(prepare.append, tmp_path / "web", [tmp_path / "more"], progress=False)
    assert session(words_of(tmp_path / "straight", mixed))[0] == 0
    assert session(words_of(tmp_path / "grown", mixed), train_step=before_step(3, grow))[0] == 0
    assert len(prepare.read_manifest(tmp_path / "web")["train"]) == 3
    assert_same(tmp_path / "grown", tmp_path / "straight")
    assert not [row for row in rows(tmp_path / "grown" / "events.jsonl") if row["event"] == "append"]


def test_a_source_shorter_than_a_window_is_named(tmp_path):
    for name, size in (("web", 700), ("code", 16)):
        write_data(tmp_path / name, size)
    command("mix", f"{tmp_path / 'web'}=1", f"{tmp_path / 'code'}=1", "--out", tmp_path / "mix")
    code, text = session(words_of(tmp_path / "out", tmp_path / "mix"))
    assert code == 2 and f"code in {tmp_path / 'mix'} has 16 train tokens" in text
