"""What the loader and the log lines of train.py cost a step, in microseconds and as a share of a step of 50 ms.

    python bench/loader.py                                  10,000 steps of each shape on 1 GB of random tokens
    python bench/loader.py --steps 50 --tokens 1000000      a look

The shapes: one forward of 8 windows of 256 tokens; one of 16 x 1,024; and the whole step of config/124m.py on one rank,
32 of these forwards, which takes far longer than 50 ms. A step is timed as `main` does it: the job's windows are drawn,
those of the next step asked for, then each forward's are read. The corpus lies in several shards that were just
written, so the page cache is warm as far as memory goes.
A logged step is its row of metrics.jsonl with the look at the free disk, and its live line; an event is timed beside.
Prints a table, then one JSON line.
"""
import argparse
import contextlib
import functools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from throughput import busy_s

ROOT = Path(__file__).resolve().parent.parent
VOCAB, SHARDS = 50257, 4
STEP_US = 50_000
SHAPES = {  # block_size, batch_size, forwards in a step
    "8 x 256": (256, 8, 1),
    "16 x 1,024": (1024, 16, 1),
    "16 x 1,024 x 32": (1024, 16, 32),
}


def percentile(numbers, percent):
    """The smallest of the numbers that so many percent of them do not exceed."""
    return sorted(numbers)[max(0, math.ceil(len(numbers) * percent / 100) - 1)]


def figures(numbers_us):
    """Median, p99 and the most of a list of microseconds, and the first two as shares of a step of 50 ms."""
    median, p99 = statistics.median(numbers_us), percentile(numbers_us, 99)
    return {"median_us": round(median, 2), "p99_us": round(p99, 2), "max_us": round(max(numbers_us), 2),
            "median_share": round(median / STEP_US, 6), "p99_share": round(p99 / STEP_US, 6), "n": len(numbers_us)}


def write_corpus(folder, tokens):
    """Shards of random ids, as rows of a manifest."""
    rows, draw = [], np.random.default_rng(1337)
    for number in range(SHARDS):
        name = f"train-{number:05d}.bin"
        draw.integers(0, VOCAB, tokens // SHARDS, dtype=np.uint16).tofile(folder / name)
        rows.append({"file": name, "tokens": tokens // SHARDS, "header_bytes": 0})
    return rows


def time_loader(train, stream, shape, steps, device, seed=1337, step_s=0.0):
    """{part of a step: its microseconds in each step}: drawing, asking for the next step's windows, reading one
    forward's, all of it. Between two steps the process sleeps for step_s."""
    block_size, batch_size, forwards = shape
    order, count = ((0, len(stream)),), batch_size * forwards
    draw, at_once = functools.lru_cache(2)(train.draw_windows), max(1, 1024 // count)

    def starts_of(step):
        head = step // at_once * at_once * count
        return draw(head, at_once * count, order, seed, block_size)[2][step * count - head:][:count]

    found = {"draw": [], "ask for the next": [], "read a forward": [], "step": []}
    for step in range(steps):
        marks, starts = [time.perf_counter()], starts_of(step)
        marks.append(time.perf_counter())
        stream.ahead(starts_of(step + 1), block_size + 1)
        marks.append(time.perf_counter())
        for index in range(forwards):
            train.read_windows(stream, starts[index * batch_size:(index + 1) * batch_size], block_size, device)
            marks.append(time.perf_counter())
        times = [1e6 * (later - earlier) for earlier, later in zip(marks, marks[1:])]
        found["draw"].append(times[0])
        found["ask for the next"].append(times[1])
        found["read a forward"] += times[2:]
        found["step"].append(sum(times))
        time.sleep(step_s)
    return found


def time_log(train, stream, steps, folder):
    """{kind of line: its microseconds each time}: a logged step as `main` logs it, and one event."""
    from checkpoint import Journal
    run = train.Run(run="bench", session=1, horizon=steps)
    journal, order = Journal(str(folder), True, run), [(0, len(stream))]
    outcome = train.Outcome(3.1415926, 0.75, "applied", 1.0, "", 4.5)
    found = {"a logged step": [], "an event": []}
    for step in range(1, steps + 1):
        run.step, began = step, time.perf_counter()
        row = train.metrics_row(outcome, step, 1, 10, 0.5, 0.001, order, 524288, 1024)
        row |= {"lr": 6e-4, "free_gb": round(train.preflight.free_gb(str(folder)), 3), "muon_lr": None, "mfu": 0.4}
        journal.line("metrics.jsonl", row)
        train.preflight.say(train.preflight.live_line(row, steps, 3600.0, None))
        found["a logged step"].append(1e6 * (time.perf_counter() - began))
        began = time.perf_counter()
        journal.report("overflow", at=step, loss_scale=outcome.loss_scale)
        found["an event"].append(1e6 * (time.perf_counter() - began))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=500_000_000, help="in the corpus, two bytes each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the windows go")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import torch

    import train
    began, busy, own, rows = time.monotonic(), busy_s(), sum(os.times()[:4]), {}
    with tempfile.TemporaryDirectory() as folder:
        shards = write_corpus(Path(folder), asked.tokens)
        for name, shape in SHAPES.items():
            stream = train.data_prepare.Tokens(folder, shards, VOCAB)
            found = time_loader(train, stream, shape, asked.steps, torch.device(asked.device))
            rows |= {f"{name}: {part}": figures(numbers) for part, numbers in found.items()}
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            found = time_log(train, stream, asked.steps, Path(folder))
        rows |= {part: figures(numbers) for part, numbers in found.items()}
    foreign = max(0.0, busy_s() - busy - (sum(os.times()[:4]) - own)) / (time.monotonic() - began) / os.cpu_count()
    print(f"{asked.steps:,} steps of each shape, {asked.tokens:,} tokens in {SHARDS} shards, to {asked.device}; other "
          f"work took {foreign:.0%} of the machine")
    print(f"{'':34}{'median us':>11}{'p99 us':>11}{'max us':>12}{'median':>10}{'p99':>9} of 50 ms")
    for name, row in rows.items():
        print(f"{name:34}{row['median_us']:11,.1f}{row['p99_us']:11,.1f}{row['max_us']:12,.1f}"
              f"{row['median_share']:10.3%}{row['p99_share']:9.3%}")
    print(json.dumps({"bench": "loader", "rows": rows, "steps": asked.steps, "tokens": asked.tokens,
                      "device": asked.device, "foreign": round(foreign, 4), "cores": os.cpu_count(),
                      "python": platform.python_version(), "numpy": np.__version__}))


if __name__ == "__main__":
    main()
