"""What reproducible=True costs: milliseconds a step with it and without, at 1, 2 and 4 ranks, interleaved.

    python bench/reproducible.py --rounds 5

The model and the step are the quickstart's, in micro-batches of 4 windows. Beside the time it shows that the weights
are the same at 1, 2 and 4 ranks with it, and not without it. Prints a table, then one JSON line.
"""
import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 12  # a session; the first three are not counted
WORDS = ["config/quickstart.py", "--batch_size=4", f"--stop_after_steps={STEPS}", "--checkpoint_interval=0",
         "--eval_interval=0", "--sample_interval=0", "--log_interval=1", "--data_verify=off", "--dropout=0.1"]
CELLS = [(world_size, reproducible) for world_size in (1, 2, 4) for reproducible in (False, True)]


def session(world_size, reproducible, data, out_dir):
    """Median milliseconds of a step, and a hash of the weights at the end."""
    words = [*WORDS, f"--data_dir={data}", f"--out_dir={out_dir}", f"--reproducible={reproducible}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    subprocess.run([sys.executable, *launcher[:4 * (world_size > 1)], "train.py", *words], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in Path(out_dir, "metrics.jsonl").read_text().splitlines()]
    weights = Path(out_dir, "checkpoints", f"step_{STEPS:08d}", "model.safetensors").read_bytes()
    return statistics.median(row["step_ms"] for row in rows[3:]), hashlib.sha256(weights).hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    began, times, weights = time.monotonic(), {cell: [] for cell in CELLS}, {cell: set() for cell in CELLS}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "data/prepare.py", "stdlib", "--out", f"{folder}/data"], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL)
        for number in range(rounds):
            for cell in CELLS[::1 - 2 * (number % 2)]:  # there and back, so that a busy minute meets all of them
                step_ms, digest = session(*cell, f"{folder}/data", f"{folder}/{number}-{cell[0]}-{cell[1]}")
                times[cell].append(step_ms)
                weights[cell].add(digest)
    print(f"{'ranks':>5} {'plain ms':>10} {'reproducible ms':>16} {'ratio of these':>14} {'of pairs':>9} {'least':>7} "
          f"{'most':>7}  weights")
    rows = []
    for world_size in sorted({world_size for world_size, _ in CELLS}):
        plain, tree = times[world_size, False], times[world_size, True]
        ratios = [slow / fast for slow, fast in zip(tree, plain)]
        of_medians = statistics.median(tree) / statistics.median(plain)
        rows.append({"ranks": world_size, "plain_ms": round(statistics.median(plain), 1),
                     "reproducible_ms": round(statistics.median(tree), 1), "ratio": round(statistics.median(ratios), 3),
                     "ratio_of_medians": round(of_medians, 3),
                     "least": round(min(ratios), 3), "most": round(max(ratios), 3),
                     "weights": sorted(digest[:16] for digest in weights[world_size, True])})
        row = rows[-1]
        print(f"{world_size:>5} {row['plain_ms']:>10} {row['reproducible_ms']:>16} {row['ratio_of_medians']:>14} "
              f"{row['ratio']:>9} {row['least']:>7} {row['most']:>7}  {' '.join(row['weights'])}")
    ends = {reproducible: len(set().union(*(weights[cell] for cell in CELLS if cell[1] == reproducible)))
            for reproducible in (False, True)}
    print(f"different weights over ranks and rounds: {ends[True]} with it, {ends[False]} without")
    print(json.dumps({"bench": "reproducible", "rounds": rounds, "rows": rows, "different_ends": ends[True],
                      "different_ends_without": ends[False], "minutes": round((time.monotonic() - began) / 60, 1),
                      "cores": os.cpu_count(), "python": platform.python_version(),
                      "load": round(os.getloadavg()[0], 2)}))
    return int(ends[True] != 1)


if __name__ == "__main__":
    sys.exit(main())
