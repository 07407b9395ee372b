"""What each change for speed is worth on the CPU of this machine: steps with it and without, in interleaved rounds.

    python bench/gains.py                                both shapes of throughput.py, 5 rounds, about 12 minutes
    python bench/gains.py --shape byte --rounds 1 --steps 3

Every run is train.py with one thing undone by a patch before `main`; a ratio is the step time without the change over
that with all of them, taken within a round, so above 1 the change pays. Prints a table, then one JSON line.
"""
import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path

from throughput import BATCH, CONTEXT, ROOT, SHAPES, our_command, timed_run, write_data

START = ("import gc, sys; sys.path.insert(0, '.'); import configurator, preflight, torch, train; "
         "configurator.configure(vars(train), sys.argv[1:])\n{patch}\ntrain.main()")
UNFUSED = """
def update(opt, named, lr, weight_decay, skip):
    p, g = [p.data for _, p in named], [p.grad for _, p in named]
    m, v = ([opt.state[slot + name] for name, _ in named] for slot in ('exp_avg.', 'exp_avg_sq.'))
    torch._foreach_mul_(p, 1 - lr * weight_decay)
    torch._foreach_lerp_(m, g, 1 - opt.betas[0])
    torch._foreach_mul_(v, opt.betas[1])
    torch._foreach_addcmul_(v, g, g, 1 - opt.betas[1])
    n = float(opt.updates)
    root = torch._foreach_sqrt(v)
    torch._foreach_div_(root, (1 - opt.betas[1] ** n) ** 0.5)
    torch._foreach_add_(root, train.ADAM_EPS)
    torch._foreach_addcdiv_(p, m, root, -lr / (1 - opt.betas[0] ** n))
train.adamw_update = update
"""
WITHOUT = {  # what is undone -> (patch before main, more words for train.py)
    "nothing": ("", []),
    "loss in chunks": ("", ["--loss_chunk_tokens=0"]),
    "kept memory": ("preflight.keep_freed_memory = lambda on: None", []),
    "fused AdamW": (UNFUSED, []),
    "frozen garbage": ("gc.freeze = lambda: None", []),
}


def rounds_of(name, asked, folder):
    """{what is undone: [step seconds of each round]}; the order turns round from round to round."""
    data, total = folder / name, asked.warm + asked.steps + 2
    write_data(data, SHAPES[name]["vocab"])
    found = {undone: [] for undone in WITHOUT}
    for number in range(asked.rounds):
        for undone in list(WITHOUT)[::1 if number % 2 == 0 else -1]:
            patch, more = WITHOUT[undone]
            out = folder / f"{name}-{len(found[undone])}-{undone.replace(' ', '-')}"
            python, _, *words = our_command(SHAPES[name], data, out, total,
                                            [f"--loss_chunk_tokens={asked.rows}", *more])
            run = timed_run([python, "-c", START.format(patch=patch), *words], ROOT, asked.warm, asked.steps,
                            out.with_suffix(".log"))
            found[undone].append(run["step_s"])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=3, help="steps of each run that do not count")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run that count")
    parser.add_argument("--rows", type=int, default=512, help="loss_chunk_tokens of all runs but the one without")
    asked, shapes = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.shape:
            found = rounds_of(name, asked, Path(folder))
            ratios = {undone: [without / whole for without, whole in zip(times, found["nothing"])]
                      for undone, times in found.items()}
            shapes[name] = {"step_s": found, "ratios": ratios}
            speed = BATCH * CONTEXT / statistics.median(found["nothing"])
            print(f"{name}: {asked.rounds} rounds, {speed:,.0f} tokens/s with all of them; step time without / with")
            for undone, numbers in ratios.items():
                print(f"  {undone:16} {statistics.median(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f})")
    print(json.dumps({"bench": "gains", "shapes": shapes, "rows": asked.rows, "cores": os.cpu_count(),
                      "python": platform.python_version()}))


if __name__ == "__main__":
    main()
