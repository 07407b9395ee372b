"""What the Hub costs a run: step time while a checkpoint is pushed, seconds a push takes, a cold start by phase.

    python bench/hub_cost.py                    3 rounds of three sessions of 60 steps, 10.8M parameters (130 MB)
    python bench/hub_cost.py --rounds 1

Each round trains the same steps without a Hub, with one that takes connections and says nothing (what is left is what
training itself spends on the Hub), and with one that works; their order alternates. The Hub is the tests' stand-in on
this machine, an idle process: its work belongs to another machine and is not the run's. Then a session begins
on an empty disk. Prints a table, then one JSON line.
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
sys.path.insert(0, str(ROOT / "tests"))
import hub_server

ARMS = ("off", "silent", "on")
STEPS, INTERVAL, FIRST = 60, 20, 6  # steps of a session, from checkpoint to checkpoint, and the first that counts
WORDS = ["--n_layer=6", "--n_head=6", "--n_embd=384", "--vocab_size=257", "--block_size=256", "--batch_size=8",
         "--batch_tokens=2048", "--schedule=constant", "--warmup_steps=0", "--learning_rate=1e-4", "--eval_interval=0",
         "--eval_tokens=2048", "--sample_interval=0", "--log_interval=1", "--data_verify=off", "--device=cpu",
         "--compile=off", f"--checkpoint_interval={INTERVAL}"]


def start_hub(folder, faults):
    """A stand-in in a process of its own that takes only what the others leave; (process, environment for a run)."""
    folder.mkdir()
    port_file = folder / "port.json"
    process = subprocess.Popen(["chrt", "--idle", "0", sys.executable, "tests/hub_server.py", "--folder", str(folder),
                                "--port-file", str(port_file), "--faults", json.dumps(faults)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not port_file.exists():
        assert process.poll() is None and time.monotonic() < deadline, "the stand-in does not start"
        time.sleep(0.05)
    hub = hub_server.Hub(folder / "unused")
    hub.url = json.loads(port_file.read_text())["url"]
    return process, hub.environment(folder / "home")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def session(out_dir, data, environment, *words):
    """Trains; the rows of the steps that count and the events of this session."""
    with open(out_dir.with_suffix(".log"), "w") as log:
        done = subprocess.run([sys.executable, "train.py", *WORDS, f"--data_dir={data}", f"--out_dir={out_dir}",
                               *words], cwd=ROOT, env=environment, stdout=log, stderr=log)
    assert done.returncode == 0, out_dir.with_suffix(".log").read_text()[-2000:]
    events = lines(out_dir / "events.jsonl")
    mine = events[-1]["session"]
    return ([row for row in lines(out_dir / "metrics.jsonl") if row["session"] == mine and row["step"] >= FIRST],
            [row for row in events if row["session"] == mine])


def spans_of(events):
    """[(begin, end)] of the saves, and of the pushes up to the pointer that is read back, as times of the day."""
    saves = {row["step"]: row for row in events if row["event"] == "save"}
    pushes = [(saves[row["step"]]["time"], row["time"]) for row in events
              if row["event"] == "pointer" and row["step"] in saves]
    return [(row["time"] - row["seconds"], row["time"]) for row in saves.values()], pushes


def during(row, spans, wholly):
    """Whether a step lies in one of the spans, or touches one."""
    began, ended = row["time"] - row["step_ms"] / 1000, row["time"]
    return any((first <= began and ended <= last) if wholly else (began < last and first < ended)
               for first, last in spans)


def step_times(rows, events):
    """Milliseconds: mean over all steps, median where nothing else runs, median while a push alone runs (None: no
    such step)."""
    saves, pushes = spans_of(events)
    alone = [row["step_ms"] for row in rows if not during(row, [*saves, *pushes], False)]
    pushing = [row["step_ms"] for row in rows if during(row, pushes, True) and not during(row, saves, False)]
    return {"mean_ms": statistics.mean(row["step_ms"] for row in rows), "alone_ms": statistics.median(alone),
            "pushing_ms": statistics.median(pushing) if pushing else None, "pushing_steps": len(pushing),
            "stall_ms": 1000 * max(row["stall_s"] for row in events if row["event"] == "save")}


def one_round(number, folder, data, hubs):
    """A session of each arm; {arm: its times} and the events of the one that pushes."""
    found, order = {}, ARMS if number % 2 == 0 else ARMS[::-1]
    for arm in order:
        words = [] if arm == "off" else [f"--hub_repo=me/run-{number}", "--hub_exit_minutes=" + (
            "10" if arm == "on" else "0.01")]
        rows, events = session(folder / f"{arm}-{number}", data, hubs.get(arm, os.environ), *words,
                               f"--max_steps={STEPS}")
        found[arm] = step_times(rows, events)
        if arm == "on":
            pushed = events
    return found, pushed


def cycles(events):
    """Of each push: seconds from the durable checkpoint to the pointer that was read back, and their parts."""
    saves = {row["step"]: row["time"] for row in events if row["event"] == "save"}
    parts = {kind: {row["step"]: row for row in events if row["event"] == kind}
             for kind in ("push", "verify", "pointer")}
    return [{"all_s": parts["pointer"][step]["time"] - saves[step], "gb": parts["push"][step]["bytes"] / 1e9,
             **{f"{kind}_s": rows[step]["seconds"] for kind, rows in parts.items()}}
            for step in saves if step in parts["pointer"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    began, rounds, pushes, processes = time.monotonic(), [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("the run after so many kills is the same run. " * 20000)
        data = folder / "data"
        subprocess.run([sys.executable, "data/prepare.py", "build", str(folder / "text.txt"), "--out", str(data),
                        "--val-ratio", "0"],
                       cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        try:
            hubs = {}
            for arm, faults in (("on", []), ("silent", [{"kind": "hang", "match": "POST .*(preupload|batch|commit)",
                                                         "times": 0}])):
                process, hubs[arm] = start_hub(folder / f"hub-{arm}", faults)
                processes.append(process)
            for number in range(asked.rounds):
                found, events = one_round(number, folder, data, hubs)
                rounds.append(found)
                pushes += cycles(events)
            cold, events = session(folder / "cold", data, hubs["on"], f"--hub_repo=me/run-{asked.rounds - 1}",
                                   f"--max_steps={STEPS + 2}")
            assert [row["step"] for row in cold] == [STEPS + 1, STEPS + 2], "the run on the empty disk goes on"
        finally:
            for process in processes:
                process.kill()
                process.wait()
    report(rounds, pushes, events, time.monotonic() - began)


def report(rounds, pushes, cold_events, seconds):
    ratios = {
        "while a push runs / alone, same session": [r["on"]["pushing_ms"] / r["on"]["alone_ms"] for r in rounds
                                                    if r["on"]["pushing_ms"]],
        "all steps, Hub / without": [r["on"]["mean_ms"] / r["off"]["mean_ms"] for r in rounds],
        "all steps, silent Hub / without": [r["silent"]["mean_ms"] / r["off"]["mean_ms"] for r in rounds]}
    print(f"{'milliseconds':28}" + "".join(f"{arm:>12}" for arm in ARMS))
    for key in ("mean_ms", "alone_ms", "pushing_ms", "stall_ms", "pushing_steps"):
        cells = [[r[arm][key] for r in rounds if r[arm][key] is not None] for arm in ARMS]
        print(f"{key:28}" + "".join(f"{statistics.median(cell):12.1f}" if cell else f"{'-':>12}" for cell in cells))
    for name, found in ratios.items():
        if found:
            print(f"{name:42} {statistics.median(found):.4f}  ({min(found):.4f} to {max(found):.4f}, n {len(found)})")
    middle = {key: statistics.median(row[key] for row in pushes) for key in pushes[0]}
    spread = f"{min(row['all_s'] for row in pushes):.2f} to {max(row['all_s'] for row in pushes):.2f}, n {len(pushes)}"
    parts = ", ".join(f"{key} {middle[key]:.2f}" for key in ("push_s", "verify_s", "pointer_s"))
    print(f"a push of {middle['gb']:.3f} GB: {middle['all_s']:.2f} s ({spread}), of it {parts}; "
          f"{middle['all_s'] / middle['gb']:.1f} s a GB")
    [start], [pull] = ([row for row in cold_events if row["event"] == name] for name in ("start", "pull"))
    stages = start["stages"] | {key: value for key, value in pull.items() if key.endswith("_s")}
    print("cold start, seconds: " + ", ".join(f"{key} {value:.2f}" for key, value in stages.items()))
    print(json.dumps({"bench": "hub_cost", "rounds": rounds, "ratios": ratios, "push": middle, "cold_start": stages,
                      "minutes": round(seconds / 60, 1), "cores": os.cpu_count(), "python": platform.python_version(),
                      "load": round(os.getloadavg()[0], 2)}))


if __name__ == "__main__":
    main()
