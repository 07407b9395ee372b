"""The order of the data: which windows a step takes, at any number of ranks and after any number of resumes
and growths; what a stream of shards gives; and the thread that finds damage in shards."""

import hashlib
import itertools
import math
import os
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import preflight
import train
from driver import run_ranks, words_of
from data import prepare, shards
from ranks import share_of

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def pass_key(seed, number):
    return train.hash64(seed, "pass", number)


def columns(drawn):
    """[(pass, window, first token), ...]"""
    return list(zip(*(column.tolist() for column in drawn)))


def permutation(n, key):
    """permute(0..n-1) in pieces, as float64."""
    out = np.empty(n)
    for first in range(0, n, 1 << 20):
        out[first:first + (1 << 20)] = train.permute(np.arange(first, min(n, first + (1 << 20))), n, key)
    return out


def correlation(x, y):
    """Pearson's; of two permutations it is Spearman's."""
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))


def jobs(count):
    """Random (tokens, block_size, windows of a step, first window, seed); steps may span passes."""
    draw = random.Random(20)
    for _ in range(count):
        block_size = draw.randint(1, 40)
        windows = draw.choice([1, 1, 2, 3, draw.randint(4, 60), draw.randint(60, 400)])
        tokens = windows * block_size + 1 + draw.randrange(block_size)
        yield tokens, block_size, draw.randint(1, 96), draw.randrange(5 * windows), draw.randrange(1 << 32)


# -- the permutation


def scalar_permute(index, n, key):
    """What `permute` does to one index, in whole numbers of any size."""
    a = next(a for a in itertools.count(math.isqrt(n)) if a * a >= n)
    b = next(b for b in itertools.count(n // a) if a * b >= n)

    def mix(value, key):
        x = (value + key) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    while True:
        left, right = divmod(index, b)
        for i in range(0, 8, 2):
            left = (left + mix(right, train.hash64(key, "round", i)) % a) % a
            right = (right + mix(left, train.hash64(key, "round", i + 1)) % b) % b
        index = left * b + right
        if index < n:
            return index


@pytest.mark.parametrize("n, key, first", [
    (1, 0, [0]),
    (2, 1, [0, 1]),
    (10, 1337, [0, 8, 6, 9, 4, 7, 2, 1]),
    (97, 5, [62, 7, 87, 74, 25, 55, 80, 41]),
    (1000, 1337, [979, 671, 725, 317, 849, 752, 996, 8]),
    (100003, 2**64 - 1, [67886, 35526, 77484, 22426, 62186, 49709, 62336, 53728]),
    (10**7, 42, [3902644, 3746052, 8998912, 1447444, 2313472, 2001015, 8611979, 37060]),
    (10**11, 1337, [3371063953, 54056490660, 24231995330, 93783544103, 35554706822, 54688619936]),
])
def test_golden_values_of_the_permutation(n, key, first):
    """Frozen for ever: with other values no run could be resumed."""
    assert train.permute(np.arange(len(first)), n, key).tolist() == first


def test_golden_values_of_the_hash():
    """Frozen for ever: keys of passes, offsets and dropout come from it."""
    assert train.hash64(1337, "pass", 0) == 14374701607734749661
    assert train.hash64("a") == 8630616491470402830
    assert train.hash64(7, "dropout", 3, 0) == 18105919284922005948


@pytest.mark.parametrize("first, order, seed, block_size, expected", [
    (0, [(0, 23)], 1337, 4, [(0, 1, 6), (0, 3, 14), (0, 0, 2), (0, 4, 18), (0, 2, 10), (1, 0, 2)]),
    (20, [(0, 10**6)], 1337, 1024, [(0, 361, 369942), (0, 477, 488726), (0, 259, 265494), (0, 79, 81174)]),
    (10**6 - 2, [(0, 2 * 10**9)], 7, 1024, [(0, 845558, 865851568), (0, 532222, 544995504),
                                           (0, 589737, 603890864), (0, 797700, 816844976)]),
    (4, [(0, 23), (5, 40)], 1337, 4, [(0, 2, 10), (1, 0, 23), (1, 3, 35), (1, 1, 27), (1, 2, 31), (2, 7, 29),
                                      (2, 8, 33), (2, 6, 25), (2, 5, 21), (2, 2, 9), (2, 4, 17), (2, 1, 5)]),
], ids=["one shard", "a million", "two billion", "grown"])
def test_golden_values_of_the_windows(first, order, seed, block_size, expected):
    """(pass, window, first token); frozen for ever."""
    assert columns(train.draw_windows(first, len(expected), order, seed, block_size)) == expected


def test_permutation_is_a_bijection_for_every_small_n():
    for n in range(1, 301):
        for key in (0, 1337, 2**64 - 1):
            assert sorted(train.permute(np.arange(n), n, key).tolist()) == list(range(n)), (n, key)


@pytest.mark.parametrize("n", [1023, 1024, 1025, 4095, 65536, 65537, 99991, 2**17, 10**6])
def test_permutation_is_a_bijection_for_larger_n(n):
    for key in (7, 2**63):
        assert (np.bincount(permutation(n, key).astype(np.int64), minlength=n) == 1).all(), key


def test_permutation_is_the_same_one_index_at_a_time():
    """Neither the other indices of a call nor the width of integers changes a value."""
    draw = random.Random(21)
    for _ in range(200):
        n = draw.choice([draw.randint(1, 60), draw.randint(60, 10**6), draw.randint(10**6, 10**11)])
        key = draw.getrandbits(64)
        indices = [draw.randrange(n) for _ in range(5)]
        expected = [scalar_permute(index, n, key) for index in indices]
        assert train.permute(indices, n, key).tolist() == expected, (n, key)
        assert [int(train.permute([index], n, key)[0]) for index in indices] == expected, (n, key)


def test_permutation_far_out_is_valid_instant_and_in_constant_memory():
    n = 10**11
    indices = np.linspace(0, n - 1, 1000).astype(np.uint64)
    tracemalloc.start()
    began = time.perf_counter()
    values = train.permute(indices, n, 3)
    seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(values.tolist())) == 1000 and 0 <= values.min() and values.max() < n
    assert seconds < 0.5 and peak < 1e6


def test_a_million_indices_in_under_two_seconds():
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        train.permute(np.arange(10**6), 10**9, 5)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 2


def shuffle_correlations(n, permutation_of):
    """Rank correlations that vanish for a good shuffle; permutation_of(seed, pass) gives one as float64."""
    one = permutation_of(0, 0)
    yield "place and value", correlation(np.arange(n, dtype=np.float64), one)
    yield "a value and the next", correlation(one[:-1], one[1:])
    yield "two passes", correlation(one, permutation_of(0, 1))
    yield "two seeds", correlation(one, permutation_of(1, 0))


@pytest.mark.parametrize("n", [10**4, 104729, 2**17, 10**7])
def test_the_shuffle_leaves_no_correlation(n):
    """Within four standard errors of nothing: ten thousand windows, a prime, a power of two, ten million."""
    shuffle = lambda seed, number: permutation(n, pass_key(seed, number))
    for name, found in shuffle_correlations(n, shuffle):
        assert abs(found) < 4 / math.sqrt(n), name


@pytest.mark.parametrize("n", [10**4, 104729, 2**17])
def test_the_check_of_the_shuffle_finds_an_affine_map(n):
    """A control: i -> (a * i + b) mod n is a bijection too, and no shuffle."""
    a = next(a for a in itertools.count(int(n * 0.618)) if math.gcd(a, n) == 1)
    index = np.arange(n, dtype=np.int64)
    assert len(set(((a * index) % n).tolist())) == n
    affine = lambda seed, number: ((a * index + pass_key(seed, number) % n) % n).astype(np.float64)
    found = dict(shuffle_correlations(n, affine))
    beyond = [name for name, value in found.items() if abs(value) >= 4 / math.sqrt(n)]
    assert "a value and the next" in beyond and "two passes" in beyond


def test_a_few_windows_come_in_every_order():
    for n in (2, 3, 4):
        seen = {tuple(train.permute(np.arange(n), n, pass_key(seed, 0)).tolist()) for seed in range(300)}
        assert len(seen) == math.factorial(n)


# -- windows of a pass, a step, a rank


def test_worked_example():
    """23 tokens, block_size 4, data_seed 1337, steps of 3 windows.

    A pass has (23 - 1) // 4 = 5 windows and leaves (23 - 1) mod 4 = 2 tokens, so its offset is 0, 1 or 2.
    Pass 0 has offset 2 and takes its windows in the order 1 3 0 4 2: window 1 starts at token 2 + 1 * 4 = 6.
    Step 0 takes windows 1 3 0 of pass 0. Step 1 takes 4 2 of pass 0 and then 0 of pass 1.
    """
    order = [(0, 23)]
    assert train.pass_of(0, order, 4) == train.Pass(number=0, first=0, windows=5, first_token=0, tokens=23)
    assert train.pass_of(5, order, 4) == train.Pass(number=1, first=5, windows=5, first_token=0, tokens=23)
    step_0, step_1 = (train.draw_windows(step * 3, 3, order, 1337, 4) for step in (0, 1))
    assert columns(step_0) == [(0, 1, 6), (0, 3, 14), (0, 0, 2)]
    assert columns(step_1) == [(0, 4, 18), (0, 2, 10), (1, 0, 2)]
    assert train.window_ids(step_1) == [[0, 4], [0, 2], [1, 0]]
    assert [train.pass_starting_in(step * 3, 3, order, 4) for step in range(5)] == [None, 5, None, 10, None]
    # two micro-batches of 3 windows over 2 ranks, or 6 of 1 over 4 ranks: who takes which
    shares = lambda count, size: [list(share_of(count, preflight.Ranks(rank, size, CPU)))
                                  for rank in range(size)]
    assert shares(2, 2) == [[0], [1]]
    assert shares(6, 4) == [[0, 1], [2, 3], [4], [5]]


def test_each_window_of_a_pass_is_drawn_exactly_once():
    for tokens, block_size, _, _, seed in jobs(200):
        windows = (tokens - 1) // block_size
        drawn = train.draw_windows(0, 4 * windows, [(0, tokens)], seed, block_size)
        for number in range(4):
            part = slice(number * windows, (number + 1) * windows)
            assert (drawn[0][part] == number).all()
            assert sorted(drawn[1][part].tolist()) == list(range(windows))
            starts = np.sort(drawn[2][part])
            assert (np.diff(starts) == block_size).all()  # side by side, none overlaps


def test_no_read_is_out_of_range_and_less_than_a_window_is_left_out():
    for tokens, block_size, _, _, seed in jobs(200):
        windows = (tokens - 1) // block_size
        drawn = train.draw_windows(0, 3 * windows, [(0, tokens)], seed, block_size)
        for number in range(3):
            starts = drawn[2][number * windows:(number + 1) * windows]
            assert starts.min() >= 0 and starts.max() + block_size + 1 <= tokens
            assert tokens - (starts.max() + block_size + 1 - starts.min()) < block_size


def test_offsets_are_in_range_and_each_occurs():
    block_size, tokens = 5, 5 * 7 + 1 + 3
    offsets = {int(min(train.draw_windows(7 * number, 7, [(0, tokens)], 1, block_size)[2]))
               for number in range(200)}
    assert offsets == {0, 1, 2, 3}  # 0 .. (tokens - 1) mod block_size
    for number in range(20):  # nothing to spare: no offset
        assert min(train.draw_windows(7 * number, 7, [(0, 36)], 1, block_size)[2]) == 0


def test_windows_are_a_pure_function_of_their_place():
    """Any cut into steps, begun anywhere, gives pieces of one list."""
    for tokens, block_size, per_step, first, seed in jobs(40):
        order = [(0, tokens)]
        whole = columns(train.draw_windows(0, first + 4 * per_step, order, seed, block_size))
        for at in range(first, first + 4 * per_step, per_step):
            step = train.draw_windows(at, per_step, order, seed, block_size)
            assert columns(step) == whole[at:at + per_step]
            assert [column.dtype for column in step] == [np.int64] * 3


def test_a_step_may_span_any_number_of_passes():
    for windows, per_step in ((1, 1), (1, 7), (2, 7), (3, 64), (5, 4)):
        tokens = windows * 8 + 3
        drawn = [row for step in range(30) for row in
                 columns(train.draw_windows(step * per_step, per_step, [(0, tokens)], 9, 8))]
        assert [row[0] for row in drawn] == [i // windows for i in range(30 * per_step)]
        for number in range(30 * per_step // windows):
            index = [row[1] for row in drawn[number * windows:(number + 1) * windows]]
            assert sorted(index) == list(range(windows))


def test_two_passes_and_two_seeds_differ():
    drawn = train.draw_windows(0, 400, [(0, 201)], 1, 1)[1]
    assert drawn[:200].tolist() != drawn[200:].tolist()
    assert drawn[:200].tolist() != train.draw_windows(0, 200, [(0, 201)], 2, 1)[1].tolist()


def test_shares_are_contiguous_and_differ_by_at_most_one():
    for count in range(0, 70):
        for world_size in range(1, 9):
            shares = [share_of(count, preflight.Ranks(rank, world_size, CPU)) for rank in range(world_size)]
            assert [i for share in shares for i in share] == list(range(count))
            lengths = [len(share) for share in shares]
            assert max(lengths) - min(lengths) <= 1
            assert count < world_size or min(lengths) >= 1


def test_the_list_of_a_step_is_the_same_for_any_world_size_and_batch_size():
    for tokens, block_size, per_step, first, seed in jobs(60):
        drawn = train.draw_windows(first, per_step, [(0, tokens)], seed, block_size)[2]
        for batch_size in (size for size in range(1, per_step + 1) if per_step % size == 0):
            count = per_step // batch_size
            for world_size in range(1, min(8, count) + 1):
                dealt = [drawn[index * batch_size:(index + 1) * batch_size].tolist()
                         for rank in range(world_size)
                         for index in share_of(count, preflight.Ranks(rank, world_size, CPU))]
                assert all(len(micro_batch) == batch_size for micro_batch in dealt)
                assert [start for micro_batch in dealt for start in micro_batch] == drawn.tolist()


def test_counts_beyond_31_bits():
    block_size, tokens = 1024, 10**14 + 5
    windows = (tokens - 1) // block_size
    part = train.pass_of(3 * windows + 17, [(0, tokens)], block_size)
    assert part == train.Pass(3, 3 * windows, windows, 0, tokens)
    _, index, starts = train.draw_windows(4 * windows - 500, 1000, [(0, tokens)], 1, block_size)
    assert index.max() < windows and starts.min() >= 0 and starts.max() + block_size + 1 <= tokens
    assert starts.max() > 2**45 and len(set(starts.tolist())) == 1000


def test_the_pass_far_out_is_found_at_once():
    began = time.perf_counter()
    for window in (0, 10**9, 10**15):
        part = train.pass_of(window, [(0, 33), (8, 99)], 4)
        assert part.first <= window < part.first + part.windows
    assert time.perf_counter() - began < 0.1


# -- growth


def brute_force_passes(order, block_size):
    """The passes one after another, told without division: what is fresh first, then all."""
    first = covered = 0
    for number in itertools.count():
        tokens = [total for start, total in order if start <= first][-1]
        fresh = tokens - covered
        begin = covered if covered and fresh > block_size else 0
        windows = (tokens - begin - 1) // block_size
        yield train.Pass(number, first, windows, begin, tokens - begin)
        first, covered = first + windows, tokens


def take_up(order, first, count, block_size, present):
    """What main does before a step: where a pass starts in it, what is on disk then counts from there on."""
    start = train.pass_starting_in(first, count, order, block_size)
    if start and start > order[-1][0] and present > order[-1][1]:
        return [*order, (start, present)]
    return order


def test_after_growth_the_next_pass_is_what_no_pass_has_covered_then_all():
    """23 tokens make 5 windows of 4; 17 more make (17 - 1) // 4 = 4; the 40 together (40 - 1) // 4 = 9."""
    order = [(0, 23), (10, 40)]
    assert [train.pass_of(window, order, 4) for window in (9, 10, 13, 14, 22, 23)] == [
        train.Pass(1, 5, 5, 0, 23), train.Pass(2, 10, 4, 23, 17), train.Pass(2, 10, 4, 23, 17),
        train.Pass(3, 14, 9, 0, 40), train.Pass(3, 14, 9, 0, 40), train.Pass(4, 23, 9, 0, 40)]
    _, index, starts = train.draw_windows(10, 4, order, 1337, 4)
    assert sorted(index.tolist()) == [0, 1, 2, 3]
    assert starts.min() >= 23 and starts.max() + 4 + 1 <= 40


@pytest.mark.parametrize("more", [1, 2, 3, 4])
def test_growth_smaller_than_a_window_waits_for_the_whole_list(more):
    """block_size + 1 tokens make a window; fewer are read with all the others in the next pass."""
    order = [(0, 23), (5, 23 + more)]
    assert train.pass_of(5, order, 4) == train.Pass(1, 5, (22 + more) // 4, 0, 23 + more)
    assert train.pass_of(4, order, 4) == train.Pass(0, 0, 5, 0, 23)
    assert train.pass_of(5, [(0, 23), (5, 28)], 4) == train.Pass(1, 5, 1, 23, 5)


def test_any_number_of_growths_is_what_brute_force_says():
    draw = random.Random(22)
    for _ in range(100):
        block_size, total = draw.randint(1, 9), draw.randint(10, 60)
        order, first = [(0, total)], 0
        for _ in range(draw.randint(1, 4)):
            for part in itertools.islice(brute_force_passes(order, block_size), 100):
                if part.first > first and draw.random() < 0.5:
                    break
            total += draw.choice([1, draw.randint(1, block_size + 1), draw.randint(1, 60)])
            first, order = part.first, [*order, (part.first, total)]
        seed, taken = draw.randrange(99), 0
        for part in itertools.islice(brute_force_passes(order, block_size), 12):
            assert {train.pass_of(window, order, block_size) for window in
                    range(part.first, part.first + part.windows)} == {part}
            number, index, starts = train.draw_windows(part.first, part.windows, order, seed, block_size)
            assert set(number.tolist()) == {part.number}
            assert sorted(index.tolist()) == list(range(part.windows))
            assert starts.min() >= part.first_token
            assert starts.max() + block_size + 1 <= part.first_token + part.tokens
            taken += part.windows
        assert len(train.draw_windows(0, taken, order, seed, block_size)[0]) == taken


def test_an_append_during_a_pass_waits_for_its_end():
    order = [(0, 41)]  # 10 windows of 4
    for first in range(0, 8):
        assert take_up(order, first, 3, 4, 90) == order  # windows up to `first + 2` are all of pass 0
    assert take_up(order, 8, 3, 4, 90) == [(0, 41), (10, 90)]  # a pass begins within the step
    assert take_up(order, 10, 3, 4, 90) == [(0, 41), (10, 90)]  # and here with it
    before, after = (train.draw_windows(8, 3, data, 1, 4) for data in (order, [(0, 41), (10, 90)]))
    assert columns(before)[:2] == columns(after)[:2]
    assert after[2][2] >= 41


def test_a_run_that_begins_takes_up_nothing():
    assert train.pass_starting_in(0, 5, [(0, 41)], 4) is None
    assert train.pass_starting_in(0, 11, [(0, 41)], 4) == 10


def test_one_growth_is_taken_up_once():
    """The pass that a growth began is not begun again by the step that begins with it, as after a resume."""
    order = take_up([(0, 41)], 9, 3, 4, 90)
    assert order == [(0, 41), (10, 90)] == take_up(order, 9, 3, 4, 200) == take_up(order, 10, 3, 4, 200)
    assert take_up(order, 21, 3, 4, 200) == [*order, (22, 200)]


def test_the_order_is_the_same_whether_an_append_came_while_the_run_was_up_or_down():
    draw = random.Random(23)

    def session(first_step, stop, order, present):
        """The windows of each step, where present(step) tokens are on disk, and the order at the end."""
        rows = {}
        for step in range(first_step, stop):
            order = take_up(order, step * per_step, per_step, block_size, present(step))
            rows[step] = columns(train.draw_windows(step * per_step, per_step, order, 4, block_size))
        return rows, order

    for _ in range(100):
        block_size, per_step = draw.randint(1, 6), draw.randint(1, 12)
        old = draw.randint(3, 30) * block_size + draw.randint(1, block_size)
        new = old + draw.randint(1, 20 * block_size)
        ends = [step for step in range(60)
                if train.pass_starting_in(step * per_step, per_step, [(0, old)], block_size)]
        place = draw.randrange(min(4, len(ends)))
        during = range(ends[place - 1] + 1 if place else 0, ends[place] + 1)  # up to the end of a pass
        stop = during[-1] + 40 // per_step + 2
        come, kill = draw.choice(during), draw.choice(during)
        saved = draw.randint(during[0], kill)
        up, order = session(0, stop, [(0, old)], lambda step: new if step >= come else old)
        assert len(order) == 2

        _, at_save = session(0, saved, [(0, old)], lambda step: old)
        lost, _ = session(saved, kill, at_save, lambda step: old)
        down, again = session(saved, stop, at_save, lambda step: new)
        assert again == order
        assert down == {step: up[step] for step in range(saved, stop)}
        assert lost == {step: up[step] for step in range(saved, kill)}


def row(number, tokens=10, sha256=""):
    sha256 = sha256 or hashlib.sha256(b"%d" % number).hexdigest()
    return prepare.shard_row(f"train-{number:05d}.bin", tokens, 0, sha256)


def test_a_grown_list_is_accepted_and_an_equal_one_is_no_growth():
    assert prepare.grown([row(0)], [row(0), row(1)]) == [row(0), row(1)]
    assert prepare.grown([row(0), row(1)], [row(0), row(1)]) is None


@pytest.mark.parametrize("present", [
    [row(0), row(2)], [row(0), row(2), row(1)], [row(0), row(1, tokens=11)],
    [row(0), row(1, sha256="b" * 64)],
], ids=["another", "inserted", "length", "content"])
def test_a_changed_list_is_refused_with_the_shard(present):
    with pytest.raises(ValueError, match="data has changed .* train shard train-00001.bin was recorded"):
        prepare.grown([row(0), row(1)], present)


@pytest.mark.parametrize("present, name", [([row(0)], "train-00001.bin"), ([], "train-00000.bin")])
def test_a_shrunk_list_is_refused_with_the_shard(present, name):
    with pytest.raises(ValueError, match=f"data has shrunk .* 2 train shards were recorded, the manifest has "
                                         f"{len(present)}; missing from {name} on"):
        prepare.grown([row(0), row(1)], present)


def test_other_data_are_refused_by_their_fingerprint():
    manifest = {"dtype": "uint16", "vocab_size": 257, "tokenizer": prepare.BYTES,
                "train": [row(0)], "val": []}
    recorded = prepare.fingerprint(manifest)
    prepare.check_fingerprint(manifest | {"sources": ["elsewhere"]}, recorded, "data/x")
    for other in ({"val": [row(1)]}, {"vocab_size": 258}, {"tokenizer": prepare.GPT2}, {"train": [row(2)]}):
        with pytest.raises(ValueError) as error:
            prepare.check_fingerprint(manifest | other, recorded, "data/x")
        found = prepare.fingerprint(manifest | other)
        for word in ("data/x", "not those of this run", recorded[:12], found[:12]):
            assert word in str(error.value)


# -- tokens


def write_shards(folder, lengths, headers=(), vocab_size=257):
    """Shards of random ids; returns their rows and all the ids as one array."""
    generator, rows, arrays = np.random.default_rng(24), [], []
    for number, length in enumerate(lengths):
        header = prepare.LLMC_HEADER if number in headers else 0
        ids = generator.integers(0, vocab_size, length).astype("<u2")
        content = b"\xff" * header + ids.tobytes()
        (folder / f"train-{number:05d}.bin").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        rows.append(prepare.shard_row(f"train-{number:05d}.bin", length, header, sha256))
        arrays.append(ids)
    return rows, np.concatenate(arrays).astype(np.int64)


@pytest.mark.parametrize("headers", [(), (0,), (1, 3)], ids=["bare", "first", "some"])
def test_windows_run_across_shards_and_skip_headers(tmp_path, headers):
    rows, ids = write_shards(tmp_path, [40, 7, 1, 100, 3], headers)
    stream = prepare.Tokens(tmp_path, rows, 257)
    assert len(stream) == len(ids) == 151
    for length in (1, 2, 11, 60, 151):
        starts = np.arange(len(ids) - length + 1)
        read = stream.windows(starts, length)
        assert read.dtype == np.int64
        assert (read == np.lib.stride_tricks.sliding_window_view(ids, length)).all()
    assert stream.windows([], 5).shape == (0, 5)


def test_targets_are_the_inputs_one_ahead_and_windows_join(tmp_path):
    """The last target of a window is the first token of the next, so each token is a target once."""
    rows, ids = write_shards(tmp_path, [50, 30, 20])
    stream, block_size = prepare.Tokens(tmp_path, rows, 257), 8
    _, index, starts = train.draw_windows(0, 12, [(0, 100)], 3, block_size)
    idx_BT, targets_BT = train.to_batch(stream.windows(starts[np.argsort(index)], block_size + 1), CPU)
    assert idx_BT.shape == targets_BT.shape == (12, block_size)
    assert idx_BT.dtype == targets_BT.dtype == torch.int64
    assert torch.equal(idx_BT[:, 1:], targets_BT[:, :-1])
    assert torch.equal(targets_BT[:-1, -1], idx_BT[1:, 0])
    offset = int(starts.min())
    assert idx_BT.flatten().tolist() == ids[offset:offset + 96].tolist()
    assert targets_BT.flatten().tolist() == ids[offset + 1:offset + 97].tolist()


def test_an_id_beyond_the_vocabulary_is_named_with_file_and_place(tmp_path):
    rows, _ = write_shards(tmp_path, [20, 20], headers=(1,))
    with open(tmp_path / "train-00001.bin", "r+b") as file:
        file.seek(prepare.LLMC_HEADER + 2 * 3)
        file.write((300).to_bytes(2, "little"))
    stream = prepare.Tokens(tmp_path, rows, 257)
    stream.windows([0, 11, 24], 12)  # all but that token
    with pytest.raises(ValueError) as error:
        stream.windows([0, 13], 12)
    assert str(error.value) == f"{tmp_path}/train-00001.bin: token 3 is 300, beyond the vocabulary of 257"
    prepare.Tokens(tmp_path, rows, 301).windows([0, 13], 12)


def test_more_shards_than_are_held_open(tmp_path):
    count = 2 * shards.OPEN_SHARDS + 5
    rows, ids = write_shards(tmp_path, [3] * count)
    stream = prepare.Tokens(tmp_path, rows, 257)
    starts = np.random.default_rng(25).permutation(len(ids) - 7)
    assert (stream.windows(starts, 8) == np.lib.stride_tricks.sliding_window_view(ids, 8)[starts]).all()
    assert len(stream.opened) <= shards.OPEN_SHARDS
    assert (stream.windows([0], len(ids))[0] == ids).all()


def test_a_stream_closes_what_it_opened(tmp_path):
    rows, _ = write_shards(tmp_path, [30, 30])
    stream = prepare.Tokens(tmp_path, rows, 257)
    stream.windows([0, 25], 10)
    descriptors = list(stream.opened.values())
    assert len(descriptors) == 2 and all(os.fstat(descriptor).st_size == 60 for descriptor in descriptors)
    del stream
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


def cut(path):
    os.truncate(path, 60)


def rewritten(path):
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))


def replaced(path):
    path.with_name("new").write_bytes(path.read_bytes())
    os.replace(path.with_name("new"), path)


@pytest.mark.parametrize("change, text", [
    (cut, "it had 200 bytes and has 60"), (rewritten, "it was written to"), (os.remove, "it is gone"),
    (replaced, "another file is in its place")])
@pytest.mark.parametrize("held", [1, 128])
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, monkeypatch, change, text, held):
    """Nothing that was read after the change is used, whether the file was open at the time or not."""
    monkeypatch.setattr(shards, "OPEN_SHARDS", held)
    rows, _ = write_shards(tmp_path, [100, 100])
    stream = prepare.Tokens(tmp_path, rows, 257)
    stream.windows([0, 150, 20], 10)
    change(tmp_path / "train-00000.bin")
    stream.windows([150], 10)
    with pytest.raises(ValueError) as error:
        stream.windows([150, 5], 10)
    assert str(error.value).startswith(f"{tmp_path}/train-00000.bin changed while this run reads it: ")
    text = text if held > 1 or change != cut else "it has 60 bytes, its data manifest says 200"
    assert text in str(error.value) and "The step was not done" in str(error.value)


def test_what_comes_next_is_asked_for_where_it_lies(tmp_path, monkeypatch):
    rows, ids = write_shards(tmp_path, [40, 7, 100], headers=(1,))
    asked = []
    monkeypatch.setattr(shards.os, "posix_fadvise", lambda descriptor, *place: asked.append(
        (os.readlink(f"/proc/self/fd/{descriptor}")[-9:], *place)))
    stream = prepare.Tokens(tmp_path, rows, 257)
    stream.ahead([0, 38], 12)
    advice = os.POSIX_FADV_WILLNEED
    assert asked == [("00000.bin", 0, 24, advice), ("00000.bin", 76, 4, advice),
                     ("00001.bin", prepare.LLMC_HEADER, 14, advice), ("00002.bin", 0, 6, advice)]
    assert (stream.windows([38], 12) == ids[38:50]).all()


def test_a_run_asks_for_the_windows_of_its_next_step(tmp_path, data, monkeypatch):
    asked, read, real, windows = [], [], prepare.Tokens.ahead, prepare.Tokens.windows
    monkeypatch.setattr(prepare.Tokens, "ahead", lambda stream, starts, length: (
        asked.append(starts), real(stream, starts, length)))
    monkeypatch.setattr(prepare.Tokens, "windows", lambda stream, starts, length: (
        read.append(starts), windows(stream, starts, length))[1])
    [one] = run_ranks(1, tmp_path, (words_of(tmp_path / "out", data, max_steps=9, eval_interval=0), {}))
    assert one[0][0] == 0
    spans = [(0, 1), (1, 4), (5, 4), (9, 1)]  # first step, steps
    starts = [train.draw_windows(8 * step, 8 * count, ((0, 700),), 1337, 16)[2].tolist() for step, count in spans]
    assert asked == starts[1:]
    assert [found.ravel().tolist() for found in read if getattr(found, "ndim", 1) == 2] == starts[:3]


class Windows:
    """In the place of Tokens: a window is its first token over and over; reads and questions are kept."""

    def __init__(self, gone=()):
        self.reads, self.asked, self.gone = [], [], gone

    def windows(self, starts, length):
        if set(self.gone) & set(starts.ravel().tolist()):
            raise ValueError("it is gone")
        self.reads.append(starts)
        return np.repeat(starts[..., None], length, axis=-1)

    def ahead(self, starts, length):
        self.asked.append(starts)
        if set(self.gone) & set(starts):
            raise ValueError("it is gone")


def drawn_of(step, steps):
    """Of each step 5 windows."""
    return (np.arange(5 * step, 5 * (step + steps)) + np.array([[0], [1000], [5000]])).reshape(3, steps, 5)


def queue_of(most, tokens=10**6):
    """That reads 3 of the 5."""
    return prepare.StepQueue(drawn_of, list, slice(1, 4), most, tokens)


@pytest.mark.parametrize("most, tokens, sizes", [
    (16, 10**6, [1, 4, 16, 16, 3]), (2, 10**6, [1] + [2] * 19 + [1]), (16, 0, [1] * 40),
    (16, 2 * 3 * 7 + 6, [1] + [2] * 19 + [1])], ids=["steps", "two", "none", "tokens"])
def test_steps_are_read_for_many_at_once_and_taken_one_by_one(most, tokens, sizes):
    queue, stream = queue_of(most, tokens), Windows()
    for step in range(40):
        drawn, batch = queue.take(step, 40, stream, 7)
        assert (drawn == drawn_of(step, 1)[:, 0]).all()
        assert batch.shape == (3, 8) and batch[:, 0].tolist() == drawn[2][1:4].tolist()
    assert [len(found) for found in stream.reads] == sizes and queue.seconds > 0
    asked = [found.ravel().tolist() for found in stream.reads[1:]]
    assert [more[:len(read)] for more, read in zip(stream.asked, asked)] == asked, "what is read next is asked for"


def test_after_a_growth_all_is_read_again():
    queue, stream = queue_of(16), Windows()
    for step in range(3):
        queue.take(step, 40, stream, 7)
    queue.clear()
    del stream.reads[:]
    assert queue.take(3, 40, stream, 7)[0][0, 0] == 15 and len(stream.reads[0]) == 1


def test_what_is_wrong_with_windows_of_later_steps_is_told_at_these():
    queue, stream = queue_of(16), Windows(gone=[5000 + 5 * 9 + 1])
    for step in range(9):
        assert (queue.take(step, 40, stream, 7)[0] == drawn_of(step, 1)[:, 0]).all()
    with pytest.raises(ValueError, match="it is gone"):
        queue.take(9, 40, stream, 7)


def test_where_reading_is_slow_fewer_are_read_at_once(monkeypatch):
    queue, stream, now = queue_of(256), Windows(), [0.0]
    monkeypatch.setattr(shards.time, "perf_counter", lambda: now[0])
    real = stream.windows

    def slow(starts, length):
        now[0] += 0.005 * starts.size
        return real(starts, length)
    stream.windows = slow
    for step in range(200):
        queue.take(step, 1000, stream, 7)
    assert [len(found) for found in stream.reads[:7]] == [1, 4, 16, 4, 16, 4, 16], "0.24 s at most"


def test_a_read_beyond_the_end_of_a_cut_file_is_named(tmp_path):
    """Where a map would end the process with a bus error."""
    rows, _ = write_shards(tmp_path, [100_000])
    stream = prepare.Tokens(tmp_path, rows, 257)
    stream.windows([0], 10)
    os.truncate(tmp_path / "train-00000.bin", 1000)
    with pytest.raises(ValueError, match="train-00000.bin changed while this run reads it: it ends before byte"):
        stream.windows([50_000], 10)
    with pytest.raises(ValueError, match="it has 1,000 bytes, its data manifest says 200,000"):
        prepare.Tokens(tmp_path, rows, 257).windows([0], 10)


def test_lengths_beyond_31_bits_are_counted_without_opening_a_file():
    rows = [row(number, tokens=3 * 10**9) for number in range(4)]
    stream = prepare.Tokens("nowhere", rows, 257)
    assert len(stream) == 12 * 10**9
    assert [stream.shard_at(token) for token in (0, 3 * 10**9 - 1, 3 * 10**9, 12 * 10**9 - 1)] == [0, 0, 1, 3]
    assert train.token_order([[0, rows[:2]], [77, rows]]) == ((0, 6 * 10**9), (77, 12 * 10**9))
    starts = train.validation_starts(stream, 1024, 0)
    assert starts[-1] + 1025 <= len(stream) < starts[-1] + 2 * 1024 + 1


def sparse_shard(folder, tokens):
    """The row of a file that is all holes; skips where the file system has none."""
    with open(folder / "train-00000.bin", "wb") as file:
        file.truncate(2 * tokens)
    if os.stat(file.name).st_blocks * 512 > 1e8:
        pytest.skip("the file system has no sparse files")
    return prepare.shard_row("train-00000.bin", tokens, 0, "0" * 64)


def test_windows_near_the_end_of_a_file_of_more_than_4_gib(tmp_path):
    tokens = 2**32 + 100  # token numbers pass 32 bits, bytes 33
    shard = sparse_shard(tmp_path, tokens)
    with open(tmp_path / "train-00000.bin", "r+b") as file:
        file.seek(2 * (tokens - 50))
        file.write(np.arange(50, dtype="<u2").tobytes())
    (tmp_path / "train-00001.bin").write_bytes(np.arange(50, 60, dtype="<u2").tobytes())
    stream = prepare.Tokens(tmp_path, [shard, prepare.shard_row("train-00001.bin", 10, 0, "1" * 64)], 257)
    assert stream.windows([tokens - 50, tokens - 1], 11).tolist() == [list(range(11)), list(range(49, 60))]
    assert stream.windows([tokens - 60], 12)[0].tolist() == [0] * 10 + [0, 1]


MEMORY_OF_READING = """
import sys
import numpy as np
from data import prepare

def peak_mb():  # of this program alone: ru_maxrss would begin with that of its parent
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

stream = prepare.Tokens(sys.argv[1], [prepare.shard_row("train-00000.bin", int(sys.argv[2]), 0, "")], 257)
generator = np.random.default_rng(0)
stream.windows(generator.integers(0, len(stream) - 65, 64), 65)
before = peak_mb()
for _ in range(100):
    stream.windows(generator.integers(0, len(stream) - 65, 64), 65)
print(peak_mb() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_resident_memory_does_not_grow_with_the_reads(tmp_path):
    """A page for each window would be 26 MB."""
    shard = sparse_shard(tmp_path, 2**32)
    command = [sys.executable, "-c", MEMORY_OF_READING, str(tmp_path), str(shard["tokens"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2


# -- finding damage


@pytest.fixture
def hashing(tmp_path, monkeypatch):
    """Makes a ShardHasher that notes the shards it has begun and done with; closes it after the test."""
    class Noting(prepare.ShardHasher):
        def check(self, shard):
            self.began.append(shard["file"])
            self.at_work.set()
            super().check(shard)
            self.done.append(shard["file"])

    made = []

    def make(**options):
        hasher = Noting(tmp_path, **options)
        hasher.began, hasher.done, hasher.at_work = [], [], threading.Event()
        made.append(hasher)
        return hasher

    yield make
    for hasher in made:
        hasher.close()


def wait_for(condition, hasher, seconds=20):
    """Polls, within a bound, while the thread works."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "the thread did not come to it"
        hasher.thread.join(0.005)


def flip(path, at=5):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_whole_shards_show_no_damage(tmp_path, hashing):
    rows, _ = write_shards(tmp_path, [100, 100], headers=(1,))
    hasher = hashing()
    for _ in range(3):
        hasher.reads(prepare.Tokens(tmp_path, rows, 257), [0, 95, 120], 8)
    wait_for(lambda: len(hasher.done) == 2, hasher)
    hasher.close()
    assert hasher.damage == "" and sorted(hasher.done) == ["train-00000.bin", "train-00001.bin"]  # once each


@pytest.mark.parametrize("at", [0, 1023, 1024, 1024 + 199])
def test_a_flipped_byte_in_a_shard_that_is_read_is_found_and_named(tmp_path, hashing, at):
    rows, _ = write_shards(tmp_path, [100, 100, 100], headers=(1,))
    flip(tmp_path / "train-00001.bin", at)
    hasher = hashing()
    hasher.reads(prepare.Tokens(tmp_path, rows, 257), [0, 120], 8)
    wait_for(lambda: hasher.damage, hasher)
    assert str(tmp_path / "train-00001.bin") in hasher.damage and rows[1]["sha256"][:12] in hasher.damage


def test_damage_in_a_shard_that_is_not_read_changes_nothing(tmp_path, hashing):
    rows, _ = write_shards(tmp_path, [100, 100, 100])
    flip(tmp_path / "train-00001.bin")
    hasher = hashing()
    hasher.reads(prepare.Tokens(tmp_path, rows, 257), [0, 91, 200], 8)  # up to token 99, and from 200 on
    wait_for(lambda: len(hasher.done) == 2, hasher)
    assert hasher.damage == "" and sorted(hasher.began) == ["train-00000.bin", "train-00002.bin"]


def test_a_window_that_ends_in_the_next_shard_reads_it(tmp_path, hashing):
    rows, _ = write_shards(tmp_path, [100, 100])
    flip(tmp_path / "train-00001.bin", 0)
    hasher = hashing()
    hasher.reads(prepare.Tokens(tmp_path, rows, 257), [92], 8)  # its last target is token 100
    wait_for(lambda: hasher.damage, hasher)
    assert "train-00001.bin" in hasher.damage


def test_a_window_over_three_shards_reads_the_one_between(tmp_path, hashing):
    rows, _ = write_shards(tmp_path, [100, 3, 100])
    hasher = hashing()
    hasher.reads(prepare.Tokens(tmp_path, rows, 257), [97], 8)
    assert hasher.known == {"train-00000.bin", "train-00001.bin", "train-00002.bin"}


def test_a_shard_that_cannot_be_read_is_damage(tmp_path, hashing):
    rows, _ = write_shards(tmp_path, [100])
    (tmp_path / "train-00000.bin").unlink()
    hasher = hashing()
    hasher.reads(prepare.Tokens(tmp_path, rows, 257), [0], 8)
    wait_for(lambda: hasher.damage, hasher)
    assert f"{tmp_path}/train-00000.bin cannot be read" in hasher.damage


def test_a_thread_that_is_off_does_nothing(tmp_path, hashing):
    rows, _ = write_shards(tmp_path, [100])
    hasher = hashing(enabled=False)
    hasher.reads(prepare.Tokens(tmp_path, rows, 257), [0], 8)
    assert hasher.thread.ident is None and not hasher.known
    hasher.close()


def test_closing_ends_the_thread_in_the_middle_of_a_shard(tmp_path, hashing):
    """And half a shard is no damage."""
    shard = sparse_shard(tmp_path, 2**33)
    hasher = hashing()
    hasher.reads(prepare.Tokens(tmp_path, [shard], 257), [0], 8)
    assert hasher.at_work.wait(20)
    began = time.monotonic()
    hasher.close()
    assert time.monotonic() - began < 5 and not hasher.thread.is_alive() and hasher.damage == ""


def test_closing_ends_a_thread_that_waits_and_one_that_never_began(tmp_path, hashing):
    rows, _ = write_shards(tmp_path, [100])
    never, waits = hashing(), hashing()
    never.close()
    waits.reads(prepare.Tokens(tmp_path, rows, 257), [0], 8)
    wait_for(lambda: waits.done, waits)
    waits.close()
    assert never.thread.ident is None and not waits.thread.is_alive()


def test_shards_are_hashed_at_a_bounded_rate_and_lowest_priority(tmp_path, hashing, monkeypatch):
    monkeypatch.setattr(shards, "HASH_BYTES_PER_S", 20e6)
    shard = sparse_shard(tmp_path, 4 * 2**20)  # 8 MiB
    sha256 = hashlib.sha256(bytes(2 * shard["tokens"])).hexdigest()
    hasher, before = hashing(), time.monotonic()
    hasher.reads(prepare.Tokens(tmp_path, [shard | {"sha256": sha256}], 257), [0], 8)
    assert hasher.at_work.wait(20)
    if sys.platform == "linux":
        assert os.getpriority(os.PRIO_PROCESS, hasher.thread.native_id) == 19
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19
    wait_for(lambda: hasher.done, hasher)
    assert time.monotonic() - before > 2 * shard["tokens"] / 20e6 and hasher.damage == ""


def test_after_damage_the_thread_costs_nothing(tmp_path, hashing):
    rows, _ = write_shards(tmp_path, [100, 100, 100])
    for number in range(3):
        flip(tmp_path / f"train-{number:05d}.bin")
    hasher = hashing()
    hasher.reads(prepare.Tokens(tmp_path, rows, 257), [0, 100, 200], 8)
    wait_for(lambda: hasher.damage, hasher)
    used = time.process_time()
    hasher.thread.join(0.5)
    assert time.process_time() - used < 0.1
    assert len(hasher.done) == 1  # the first damage stops the run
