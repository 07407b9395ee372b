"""What a run's logging costs the training thread when every step is logged, as a share of a step of 50 ms.

    python bench/log_cost.py                      2,000 steps of each arm, 5 rounds
    python bench/log_cost.py --steps 50 --rounds 1

Logged is a row of metrics.jsonl with its live line and an event for each step, while the child that copies them into
wandb (offline) and the thread that samples the machine run. The arms: a step of 50 ms alone (`plain`), and with all
of that (`all`). A step is products of small matrices on one thread, so many as take 50 ms; what the child and the
thread take from it shows in the step's own time. Beside, as a share of the plain step of the same round: the row and
its live line, which each step has, as a mean, as those of all steps of 0.2 s are written at once; an event, which
few have; and a sample of the machine in CPU time, as a share of the 10 s between two. Before a row `main` asks for the
pass of the next step whether or not it logs, and so does this, outside of the time. Prints a table, then one JSON line.
"""
import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP_S = 0.05


def one_step(torch, matrix, products):
    """The work of a step."""
    for _ in range(products):
        matrix @ matrix


def products_of(torch, matrix, step_s):
    """How many products take a step's time, by the fastest of some tries."""
    took = []
    for _ in range(5):
        began = time.perf_counter()
        one_step(torch, matrix, 20)
        took.append((time.perf_counter() - began) / 20)
    return max(1, round(step_s / min(took)))


def log_step(train, journal, run, watcher, step, folder):
    """What `main` logs of a step, and one event; the seconds of both."""
    order = [(0, 10**9)]
    run.step, outcome = step, train.Outcome(3.1415926, 0.75, "applied", 1.0, "", 4.5)
    train.pass_starting_in(512 * step, 512, order, 1024)

    def row_of(step, outcome, *spent):
        return train.metrics_row(outcome, step, 1, order, 524288, 1024, 4e-8, *spent) | {
            "lr": 6e-4, "free_gb": train.preflight.free_gb_around(str(folder), time.time() // 5), "muon_lr": None}

    def line_of(row, *_):
        return train.preflight.live_line(row, 10**6, 3600.0, None, 3.1, "", watcher.costs())
    began = time.perf_counter()
    journal.log(row_of, line_of, train.preflight.say, step, outcome, time.time(), 1, STEP_S, 0.001)
    logged = time.perf_counter()
    journal.report("overflow", at=step, loss_scale=1.0)
    return logged - began, time.perf_counter() - logged


def arm(train, steps, work, folder, logs):
    """Seconds of each step with its logging, and of its lines and its event alone."""
    from checkpoint import Journal

    run = train.Run(run="bench", session=1, horizon=10**6)
    journal, found, lines = Journal(str(folder), True, run), [], []
    (folder / "config.json").write_text("{}")
    watcher = train.watch.Watcher(journal, "cpu", (1.0, 1.0), train.preflight.say, train.preflight.Interrupt(),
                                  math.inf) if logs else None
    if logs:
        watcher.start_mirror("bench", "bench")
        wait_for_rows(journal, folder)
    for step in range(1, steps + 1):
        began = time.perf_counter()
        work()
        if logs:
            lines.append(log_step(train, journal, run, watcher, step, folder))
        found.append(time.perf_counter() - began)
    if logs:
        began = time.perf_counter()
        journal.settle()
        lines[-1] = lines[-1][0] + time.perf_counter() - began, lines[-1][1]
        watcher.close()
    return found, lines


def wait_for_rows(journal, folder):
    """Until wandb runs: what its start takes is paid once a session, not by each step."""
    deadline = time.monotonic() + 120
    journal.report("init", source="bench")
    while not list(folder.glob("wandb/offline-run-*/*.wandb")) and time.monotonic() < deadline:
        time.sleep(0.05)


def sample_cost(train, folder, times):
    """Microseconds of CPU that a sample of the machine takes, each."""
    machine, found = train.watch.Machine(folder, 0, print), []
    machine.close()
    for _ in range(times):
        began = time.thread_time()
        machine.write(machine.sample())
        found.append(1e6 * (time.thread_time() - began))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ |= {"WANDB_MODE": "offline"}
    import torch

    import train
    torch.set_num_threads(1)
    matrix = torch.ones(256, 256) / 256
    products, rounds = products_of(torch, matrix, STEP_S), []
    work = lambda: one_step(torch, matrix, products)
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nowhere:
        for number in range(asked.rounds):
            found = {}
            for logs in ((False, True) if number % 2 == 0 else (True, False)):
                folder = Path(name, f"{number}-{logs}")
                folder.mkdir()
                with contextlib.redirect_stdout(nowhere):
                    found[logs] = arm(train, asked.steps, work, folder, logs)
            rounds.append({"plain_ms": 1000 * statistics.median(found[False][0]),
                           "all_ms": 1000 * statistics.median(found[True][0]),
                           "plain_mean_ms": 1000 * statistics.mean(found[False][0]),
                           "all_mean_ms": 1000 * statistics.mean(found[True][0]),
                           "lines_us": 1e6 * statistics.mean(lines for lines, _ in found[True][1]),
                           "lines_median_us": 1e6 * statistics.median(lines for lines, _ in found[True][1]),
                           "lines_max_us": 1e6 * max(lines for lines, _ in found[True][1]),
                           "event_us": 1e6 * statistics.median(event for _, event in found[True][1])})
        with contextlib.redirect_stdout(nowhere):
            samples = sample_cost(train, Path(name), 50)
    report(asked, rounds, samples)


def report(asked, rounds, samples):
    shares = [row["all_ms"] / row["plain_ms"] - 1 for row in rounds]
    lines = [row["lines_us"] / 1000 / row["plain_ms"] for row in rounds]  # a machine that slows both down is in neither
    sample_us = statistics.median(samples)
    print(f"{'round':>6}{'plain ms':>10}{'all ms':>10}{'means':>18}{'more':>9}{'lines us':>10}{'of plain':>10}"
          f"{'median':>8}{'most':>8}{'event us':>10}")
    for number, (row, share, part) in enumerate(zip(rounds, shares, lines)):
        means = f"{row['plain_mean_ms']:.2f}, {row['all_mean_ms']:.2f}"
        print(f"{number:6}{row['plain_ms']:10.3f}{row['all_ms']:10.3f}{means:>18}{share:9.2%}{row['lines_us']:10.1f}"
              f"{part:10.3%}{row['lines_median_us']:8.1f}{row['lines_max_us']:8.0f}{row['event_us']:10.1f}")
    print(f"all that is logged, of a step: {statistics.median(shares):.2%} ({min(shares):.2%} to {max(shares):.2%}); "
          f"its lines alone {statistics.median(lines):.3%}")
    print(f"a sample of the machine: {sample_us:.0f} us of CPU, {sample_us / 1e7:.4%} of the 10 s between two")
    print(json.dumps({"bench": "log_cost", "rounds": rounds, "share": statistics.median(shares),
                      "lines_share": statistics.median(lines), "sample_us": sample_us,
                      "sample_share": sample_us / 1e7, "steps": asked.steps, "cores": os.cpu_count(),
                      "load": round(os.getloadavg()[0], 2), "python": platform.python_version()}))


if __name__ == "__main__":
    main()
