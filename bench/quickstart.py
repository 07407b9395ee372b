"""The README's first command, timed from start to end in fresh folders: final validation loss and wall time.

    python bench/quickstart.py --runs 3

Prints a row a run, then median and spread, then one JSON line. Meant for a quiet machine; it prints the load it met.
"""
import argparse
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


def one_run(number):
    """Runs the quickstart with its own corpus and run folder; returns what it came to."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["config/quickstart.py", f"--out_dir={folder}/run", f"--data_dir={folder}/data"]
        began = time.monotonic()
        subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        wall_s = time.monotonic() - began
        events = [json.loads(line) for line in Path(folder, "run", "events.jsonl").read_text().splitlines()]
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "eval"][-1]
    return {"run": number, "wall_s": round(wall_s, 1), "val_loss": last["val_loss"],
            "bits_per_byte": last["bits_per_byte"], "steps": last["step"],
            "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
            "load": round(os.getloadavg()[0], 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    print("run  wall s  val nats/token  bits/byte  median tokens/s  load")
    results = []
    for number in range(1, runs + 1):
        results.append(one_run(number))
        print("{run:3}  {wall_s:6.1f}  {val_loss:14.4f}  {bits_per_byte:9.4f}  {tokens_per_s:15,.0f}  {load:4.2f}"
              .format(**results[-1]), flush=True)
    import torch  # for its version, after the runs
    summary = {"bench": "quickstart", "n": runs, "python": platform.python_version(), "torch": torch.__version__,
               "cores": len(os.sched_getaffinity(0)), "steps": results[0]["steps"]}
    for name in ("wall_s", "val_loss", "bits_per_byte", "tokens_per_s"):
        values = [result[name] for result in results]
        summary[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        print(f"{name}: median {statistics.median(values):,.4g}, {min(values):,.4g} to {max(values):,.4g}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
