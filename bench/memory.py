"""Whether host memory stays flat over 10,000 steps, and how far the slowest steps lie from the median.

    python bench/memory.py                  10,000 steps of a tiny model, about 2 minutes
    python bench/memory.py --steps 400 --warm 100 --interval 20 -- --n_embd=64    words for train.py come last

Trains with rows, evaluations, samples and checkpoints on the way in one process, and looks at its memory every 100
steps. VmRSS counts pages of mapped files, such as libraries; RssAnon leaves them out. What malloc has given out and not
got back (mallinfo2, glibc 2.33) leaves out the gaps between too, touched or not: a leak of tensors shows there first.
Python's own small objects are not in it, but in the other two. The slope is that of a line
through the samples after the first 1,000 steps (least squares), and of one through the second half of them. A step
lasts until the next one begins, so whatever stands between them is in it; those with a save, evaluation or sample
between are counted apart. The spread of step times says something only where other work took less than 5 % of the
machine. How much of it is the machine's own is seen by a bare loop of products beside: before every fourth step, of
about the length of a step. Prints a table, then one JSON line.
"""
import argparse
import ctypes
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from loader import percentile
from throughput import clocks, foreign_share

ROOT = Path(__file__).resolve().parent.parent
MOST_FOREIGN = 0.05
SQUARE, BARE_EVERY = 192, 4  # the products of the bare loop, and the steps from one loop to the next
KINDS = {"rss": "all in RAM (VmRSS)", "anon": "without mapped files (RssAnon)", "given": "given out by malloc"}
TOKENS = 8_000_000
WORDS = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=8", "--batch_tokens=256",
         "--schedule=constant", "--warmup_steps=0", "--learning_rate=1e-3", "--dropout=0.1", "--log_interval=100",
         "--eval_tokens=4096", "--sample_tokens=16", "--data_verify=background", "--device=cpu", "--compile=off"]


def slope(xs, ys):
    """Of the straight line through the points with the least sum of squares."""
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    return (sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys))
            / sum((x - mean_x) ** 2 for x in xs))


class Given(ctypes.Structure):
    """glibc's struct mallinfo2; see mallinfo(3)."""
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]


def memory_mb():
    """What of this process lies in RAM, the same without the pages of mapped files, and what malloc has given out; in
    MB of 10^6 bytes."""
    status, of_malloc = Path("/proc/self/status").read_text(), ctypes.CDLL(None).mallinfo2
    of_malloc.restype = Given
    given = of_malloc()
    return [*(int(re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024 / 1e6
              for name in ("VmRSS", "RssAnon")), (given.uordblks + given.hblkhd) / 1e6]


# ---- in the process that trains

def measure(words, steps, warm, interval):
    """Trains and prints one JSON line: the samples, and when each step began; the memory for these is taken before."""
    sys.path.insert(0, str(ROOT))
    import torch

    import configurator
    import train

    configurator.configure(vars(train), words)
    began, entered, samples = np.ones(steps), np.ones(steps), np.ones((steps // interval, 1 + len(KINDS)))
    bare, square, products = np.ones(steps), torch.ones(SQUARE, SQUARE), [1]
    at_warm, numbers, train_step = [], itertools.count(1), train.train_step

    def watched_step(*arguments):
        step = next(numbers)
        entered[step - 1] = time.perf_counter()
        if step % BARE_EVERY == 0:
            for _ in range(products[0]):
                torch.mm(square, square)
            bare[step - 1] = time.perf_counter() - entered[step - 1]
        if step == warm // 2:
            one = np.median(bare[BARE_EVERY - 1:step:BARE_EVERY])
            products[0] = max(1, round(np.median(entered[1:step] - began[:step - 1]) / one))
        if step == warm:
            at_warm.extend(clocks())
        if step % interval == 0:
            samples[step // interval - 1] = step, *memory_mb()
        began[step - 1] = time.perf_counter()
        return train_step(*arguments)

    train.train_step = watched_step
    train.main()
    foreign = foreign_share(at_warm, clocks(), os.cpu_count())
    print("\n" + json.dumps({"samples": samples.tolist(), "began": began.tolist(), "entered": entered.tolist(),
                             "bare": bare[BARE_EVERY - 1::BARE_EVERY].tolist(), "foreign": foreign}))


# ---- around it

def session(steps, warm, interval, pause, more, folder):
    """What `measure` found in a session with a save, an evaluation and a sample every `pause` steps."""
    draw = np.random.default_rng(1337)
    for name, tokens in (("train.bin", TOKENS), ("val.bin", TOKENS // 100)):
        draw.integers(0, 256, tokens, dtype=np.uint16).tofile(folder / name)
    subprocess.run([sys.executable, "data/prepare.py", "import", folder / "train.bin", folder / "val.bin", "--out",
                    folder / "data", "--tokenizer", "bytes"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)
    words = [*WORDS, f"--max_steps={steps}", f"--data_dir={folder / 'data'}", f"--out_dir={folder / 'out'}",
             *(f"--{name}_interval={pause}" for name in ("checkpoint", "eval", "sample")), *more]
    done = subprocess.run([sys.executable, __file__, "--measure", *map(str, (steps, warm, interval)), *words],
                          cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def steps_of(began, entered, warm, pause):
    """(milliseconds of the steps after the first `warm`, those after which the loop did something else)"""
    spans = [(number, 1000 * (later - earlier)) for number, (earlier, later) in enumerate(zip(began, entered[1:]), 1)]
    return ([ms for number, ms in spans if number > warm and number % pause],
            [ms for number, ms in spans if number > warm and number % pause == 0])


def summary(found, warm, pause):
    """The figures in what `measure` found."""
    after = [sample for sample in found["samples"] if sample[0] >= warm]
    plain, paused = steps_of(found["began"], found["entered"], warm, pause)
    bare = [1000 * seconds for seconds in found["bare"][warm // BARE_EVERY:]]
    at = [sample[0] for sample in after]
    row = {"steps": len(found["began"]), "samples": len(after), "first_at": int(at[0]), "last_at": int(at[-1])}
    for column, name in enumerate(KINDS, 1):
        numbers = [sample[column] for sample in after]
        late = len(after) // 2  # what grows at first is what the first saves and evaluations leave
        row |= {f"{name}_late_slope_kb_per_1000_steps": 1e6 * slope(at[late:], numbers[late:])}
        row |= {f"{name}_first_mb": numbers[0], f"{name}_last_mb": numbers[-1], f"{name}_least_mb": min(numbers),
                f"{name}_most_mb": max(numbers), f"{name}_slope_kb_per_1000_steps": 1e6 * slope(at, numbers)}
    row |= {"step_ms": statistics.median(plain), "step_p99_ms": percentile(plain, 99),
            "step_p99_over_median": percentile(plain, 99) / statistics.median(plain),
            "bare_ms": statistics.median(bare), "bare_p99_over_median": percentile(bare, 99) / statistics.median(bare),
            "pause_ms": statistics.median(paused) if paused else None, "foreign": found["foreign"]}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--warm", type=int, default=1000, help="steps before the samples that count")
    parser.add_argument("--interval", type=int, default=100, help="steps from sample to sample")
    parser.add_argument("--pause", type=int, default=1000, help="steps from save to save")
    parser.add_argument("words", nargs="*", help="more words for train.py, after --")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = session(asked.steps, asked.warm, asked.interval, asked.pause, asked.words, Path(folder))
        row = summary(found, asked.warm, asked.pause)
    for name, label in KINDS.items():
        print(f"{label:31} {row[f'{name}_first_mb']:8.2f} MB at step {row['first_at']:,}, "
              f"{row[f'{name}_last_mb']:8.2f} MB at step {row['last_at']:,} ({row[f'{name}_least_mb']:.2f} to "
              f"{row[f'{name}_most_mb']:.2f}), slope {row[f'{name}_slope_kb_per_1000_steps']:+.1f} kB per 1,000 steps, "
              f"{row[f'{name}_late_slope_kb_per_1000_steps']:+.1f} in the second half")
    print(f"a step {row['step_ms']:.2f} ms, p99 {row['step_p99_ms']:.2f} ms, p99 / median "
          f"{row['step_p99_over_median']:.2f}; a bare loop of products beside it {row['bare_ms']:.2f} ms, "
          f"{row['bare_p99_over_median']:.2f}; other work took {row['foreign']:.1%} of the machine"
          + ("" if row["foreign"] < MOST_FOREIGN else ": too much for the step times to say anything"))
    print(json.dumps({"bench": "memory", **row, "words": asked.words,
                      "quiet": row["foreign"] < MOST_FOREIGN, "cores": os.cpu_count(),
                      "python": platform.python_version()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[5:], *map(int, sys.argv[2:5]))
    else:
        main()
