"""What the loader of train.py costs a step, in microseconds and as a share of a step of 50 ms.

    python bench/loader.py                                  10,000 steps of each shape on 1 GB of random tokens
    python bench/loader.py --steps 50 --tokens 1000000      a look

The shapes: one forward of 8 windows of 256 tokens; one of 16 x 1,024; and the whole step of config/124m.py on one rank,
32 of these forwards, which takes far longer than 50 ms. A step is timed as `main` does it: windows are drawn and read
for many steps at once, and those after them asked for; the other steps take what is there. The corpus lies in several
shards that were just written, so the page cache is warm as far as memory goes.
Prints a table, then one JSON line.
"""
import argparse
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

from throughput import clocks, foreign_share

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
    """Mean, median, p99 and the most of a list of microseconds, and as shares of a step of 50 ms."""
    found = {"mean": statistics.mean(numbers_us), "median": statistics.median(numbers_us),
             "p99": percentile(numbers_us, 99), "max": max(numbers_us)}
    return ({f"{name}_us": round(value, 2) for name, value in found.items()}
            | {f"{name}_share": round(value / STEP_US, 6) for name, value in found.items()} | {"n": len(numbers_us)})


def write_corpus(folder, tokens):
    """Shards of random ids, as rows of a manifest."""
    rows, draw = [], np.random.default_rng(1337)
    for number in range(SHARDS):
        name = f"train-{number:05d}.bin"
        draw.integers(0, VOCAB, tokens // SHARDS, dtype=np.uint16).tofile(folder / name)
        rows.append({"file": name, "tokens": tokens // SHARDS, "header_bytes": 0})
    return rows


def time_loader(train, stream, shape, steps, device, seed=1337, step_s=0.0):
    """{what: microseconds}: each step until its windows are on the device, and apart those steps that read for many.
    Between two steps the process sleeps for step_s."""
    block_size, batch_size, forwards = shape
    order, count, found = ((0, len(stream)),), batch_size * forwards, {"a step": [], "a read of many": []}
    draw = functools.lru_cache(2)(train.draw_windows)
    queue = train.data_prepare.StepQueue(
        lambda step, number: np.stack(draw(step * count, number * count, order, seed, block_size)).reshape(
            -1, number, count),
        lambda windows: [list(zip(range(forwards), zip(*(part.split(batch_size) for part in step))))
                         for step in zip(*train.to_batch(windows, device))],
        slice(0, count), train.READ_STEPS, train.READ_TOKENS)
    for step in range(steps):
        reads, began = not queue.ready, time.perf_counter()
        assert len(queue.take(step, steps, stream, block_size)[1]) == forwards
        found["a step"].append(1e6 * (time.perf_counter() - began))
        if reads:
            found["a read of many"].append(found["a step"][-1])
        time.sleep(step_s)
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
    before, rows = clocks(), {}
    with tempfile.TemporaryDirectory() as folder:
        shards = write_corpus(Path(folder), asked.tokens)
        for name, shape in SHAPES.items():
            stream = train.data_prepare.Tokens(folder, shards, VOCAB)
            found = time_loader(train, stream, shape, asked.steps, torch.device(asked.device))
            rows |= {f"{name}: {part}": figures(numbers) for part, numbers in found.items()}
    foreign = foreign_share(before, clocks(), os.cpu_count())
    print(f"{asked.steps:,} steps of each shape, {asked.tokens:,} tokens in {SHARDS} shards, to {asked.device}; other "
          f"work took {foreign:.0%} of the machine")
    print(f"{'':34}{'mean us':>11}{'median us':>11}{'p99 us':>11}{'max us':>12}{'mean':>10}{'median':>10}{'p99':>9}"
          " of 50 ms")
    for name, row in rows.items():
        print(f"{name:34}{row['mean_us']:11,.1f}{row['median_us']:11,.1f}{row['p99_us']:11,.1f}{row['max_us']:12,.1f}"
              f"{row['mean_share']:10.3%}{row['median_share']:10.3%}{row['p99_share']:9.3%}")
    print(json.dumps({"bench": "loader", "rows": rows, "steps": asked.steps, "tokens": asked.tokens,
                      "device": asked.device, "foreign": round(foreign, 4), "cores": os.cpu_count(),
                      "python": platform.python_version(), "numpy": np.__version__}))


if __name__ == "__main__":
    main()
