"""What each change for speed is worth on the CPU of this machine: steps with it and without, side by side in one run.

    python bench/gains.py                                both shapes of throughput.py, about 20 minutes
    python bench/gains.py --shape byte --pairs 1 --steps 1

train.py trains; before a step one change is undone or made again, all others stay. A pair is one step that settles and
then the ones that count, without the change, and the same with it, in one order and the other by turns; its ratio is
the step time without over that with, so above 1 the change pays. A step lasts until the next one begins. "nothing"
undoes nothing: what it shows is the noise of this machine. Of kept memory it is what mallopt says of large buffers and
of the top of the heap; the one pool for all threads stays (--rows 0: with all logits at once, which need it more).
Garbage collections are too rare to be seen so. Prints a table, then one JSON line.
"""
import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from throughput import BATCH, CONTEXT, ROOT, SHAPES, clocks, foreign_share, our_command, write_data

CHANGES = ("nothing", "loss in chunks", "kept memory", "fused AdamW")


# ---- in the process that trains

def unfused_update(opt, named, lr, weight_decay, skip, eps=1e-8):
    """AdamW with one pass over the parameters for each term, as before torch had a fused one."""
    p, g = [p.data for _, p in named], [p.grad for _, p in named]
    m, v = ([opt.state[slot + name] for name, _ in named] for slot in ("exp_avg.", "exp_avg_sq."))
    torch._foreach_mul_(p, 1 - lr * weight_decay)
    torch._foreach_lerp_(m, g, 1 - opt.betas[0])
    torch._foreach_mul_(v, opt.betas[1])
    torch._foreach_addcmul_(v, g, g, 1 - opt.betas[1])
    n = float(opt.updates)
    root = torch._foreach_sqrt(v)
    torch._foreach_div_(root, (1 - opt.betas[1] ** n) ** 0.5)
    torch._foreach_add_(root, eps)
    torch._foreach_addcdiv_(p, m, root, -lr / (1 - opt.betas[0] ** n))


def switch(change, on, train, preflight, model, rows, fused):
    """Make a change, or undo it."""
    if change == "loss in chunks":
        model.loss_chunk_tokens = rows if on else 0
    elif change == "kept memory":
        preflight.keep_freed_memory(on)
        if not on:  # where nothing was ever set, glibc's own limits have grown as far as they go (mallopt(3))
            ctypes.CDLL(None).mallopt(-3, 32 << 20)
            ctypes.CDLL(None).mallopt(-1, 64 << 20)
    elif change == "fused AdamW":
        train.adamw_update = fused if on else unfused_update


def plan(changes, pairs, steps):
    """[(change, whether it is made, whether the step counts)] of all steps after the first ones."""
    return [(change, on, number > 0) for pair in range(pairs) for change in changes
            for on in ((False, True), (True, False))[pair % 2] for number in range(1 + steps)]


def measure(changes, pairs, steps, warm, rows, words):
    """Trains and prints one JSON line: {change: [[seconds without, with] of each pair]} and the foreign share."""
    sys.path.insert(0, str(ROOT))
    import configurator
    import preflight
    import train

    configurator.configure(vars(train), words)
    train_step, fused = train.train_step, train.adamw_update
    todo, entered, began, at_warm = [None] * warm + plan(changes, pairs, steps) + [None], [], [], []

    def watched_step(model, *arguments):
        entered.append(time.perf_counter())
        before, now = todo[len(entered) - 2], todo[len(entered) - 1]
        if now and now[:2] != (before or ())[:2]:
            if before:
                switch(before[0], True, train, preflight, model, rows, fused)
            switch(*now[:2], train, preflight, model, rows, fused)
        if len(entered) == warm:
            at_warm.extend(clocks())
        began.append(time.perf_counter())
        return train_step(model, *arguments)

    train.train_step = watched_step
    train.main()
    foreign = foreign_share(at_warm, clocks(), os.cpu_count())
    spans = [after - before for before, after in zip(began, entered[1:])]
    print("\n" + json.dumps({"times": times_of(todo, spans, changes, steps), "foreign": foreign}))


def times_of(todo, spans, changes, steps):
    """{change: [[seconds without, with] of each pair]}, each the mean of the steps that count."""
    found = {change: {False: [], True: []} for change in changes}
    for step, span in zip(todo, spans):
        if step and step[2]:
            found[step[0]][step[1]].append(span)
    return {change: [[statistics.fmean(by[on][at:at + steps]) for on in (False, True)]
                     for at in range(0, len(by[True]), steps)] for change, by in found.items()}


# ---- around it

def session(name, asked, folder):
    """What `measure` found in a session of one shape."""
    data, total = folder / name, asked.warm + len(CHANGES) * asked.pairs * 2 * (1 + asked.steps) + 1
    write_data(data, SHAPES[name]["vocab"])
    _, _, *words = our_command(SHAPES[name], data, folder / f"{name}-out", total,
                               [f"--loss_chunk_tokens={asked.rows}"])
    numbers = map(str, (asked.pairs, asked.steps, asked.warm, asked.rows))
    done = subprocess.run([sys.executable, __file__, "--measure", *numbers, *words], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary(times):
    """Of the pairs of one change: median ratio, its quartiles and how many."""
    ratios = sorted(without / made for without, made in times)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4), "pairs": len(ratios)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--pairs", type=int, default=20, help="of each change")
    parser.add_argument("--warm", type=int, default=4, help="steps before the first pair")
    parser.add_argument("--steps", type=int, default=2, help="steps that count, each way")
    parser.add_argument("--rows", type=int, default=512, help="loss_chunk_tokens where the loss is in chunks")
    asked, shapes = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.shape:
            found = session(name, asked, Path(folder))
            shapes[name] = {**found, "ratios": {change: summary(times) for change, times in found["times"].items()}}
            speed = BATCH * CONTEXT / statistics.median(made for times in found["times"].values() for _, made in times)
            print(f"{name}: {speed:,.0f} tokens/s with all changes, other work took {found['foreign']:.1%} of the "
                  "machine; step time without / with")
            for change, row in shapes[name]["ratios"].items():
                print(f"  {change:16} {row['median']:.3f}, half of {row['pairs']} pairs {row['low']:.3f} to "
                      f"{row['high']:.3f}")
    print(json.dumps({"bench": "gains", "shapes": shapes, "rows": asked.rows, "cores": os.cpu_count(),
                      "python": platform.python_version()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(CHANGES, *map(int, sys.argv[2:6]), sys.argv[6:])
    else:
        main()
