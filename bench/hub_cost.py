"""What the Hub costs a run: step time while a checkpoint is pushed, seconds a push takes, a cold start by phase.

    python bench/hub_cost.py                    3 rounds of four sessions, 10.8M parameters (130 MB)
    python bench/hub_cost.py --rounds 1

Each round trains the same 60 steps without a Hub, with one that takes connections and says nothing (what is left is
what training itself spends on the Hub), and with one that works; their order alternates. In a fourth session, of short
steps, the process that pushes is stopped and let go on by turns, each second, and the steps while it runs are compared
with those just before or after, while it stands: a machine whose speed drifts by tenths within a minute shows a
difference of hundredths so; what a push costs a run is that difference times the seconds it lasts. What the process
has used of a core over that session, its start included, is counted too. The Hub is the tests' stand-in on this
machine, an idle process that keeps its files in memory where there is room (/dev/shm): its work belongs to another
machine and is not the run's. Last, a session begins on an empty disk. Prints a table, then one JSON line.
"""
import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
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
SHORT = ["--batch_size=2", "--batch_tokens=512", "--checkpoint_interval=60", "--max_steps=240"]  # the fourth session
TICK = os.sysconf("SC_CLK_TCK")
TURN_S = 1.0  # of it; a step that lies in two turns is of neither
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
    return told(begin(out_dir, data, environment, *words), out_dir)


def begin(out_dir, data, environment, *words):
    with open(out_dir.with_suffix(".log"), "w") as log:
        return subprocess.Popen([sys.executable, "train.py", *WORDS, f"--data_dir={data}", f"--out_dir={out_dir}",
                                 *words], cwd=ROOT, env=environment, stdout=log, stderr=log)


def told(process, out_dir):
    assert process.wait() == 0, out_dir.with_suffix(".log").read_text()[-2000:]
    events = lines(out_dir / "events.jsonl")
    mine = events[-1]["session"]
    return ([row for row in lines(out_dir / "metrics.jsonl") if row["session"] == mine and row["step"] >= FIRST],
            [row for row in events if row["session"] == mine])


def taking_turns(out_dir, data, environment):
    """Trains while the process that pushes runs and stands by turns; [(time of the day, whether it runs)], the seconds
    of a core that it used, and as `session`. Whether it runs is None where there was nothing to push."""
    turns, used, process = [], {}, begin(out_dir, data, environment, *SHORT, f"--hub_repo=me/{out_dir.name}")
    while process.poll() is None:
        time.sleep(0.02)
        if child := pushing_child(process.pid):
            used[child] = cpu_s(child) or used.get(child, 0.0)
        if not child or not any(out_dir.glob(".tmp-push-*")):  # it waits for the next checkpoint
            turns.append((time.time(), None))
        elif turns[-1][1] is None or time.time() > turns[-1][0] + TURN_S:
            runs = turns[-1][1] is not True
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(child, signal.SIGCONT if runs else signal.SIGSTOP)
            turns.append((time.time(), runs))
    return turns, sum(used.values()), *told(process, out_dir)


def cpu_s(pid):
    """Seconds of a core that a process has used, 0 where it has ended."""
    with contextlib.suppress(OSError):
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / TICK
    return 0.0


def pushing_child(parent):
    """The process under this one that pushes, or None."""
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in task.read_text().split():
                if b"hub.py\0work\0push" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return None


def ratios_of(turns, rows, events):
    """Mean time of the steps in each turn in which a push runs / in the turn after or, once more, before it."""
    saves, means = spans_of(events)[0], []
    for (began, runs), (ended, _) in zip(turns, turns[1:]):
        steps = [row["step_ms"] for row in rows if during(row, [(began, ended)], True)
                 and not during(row, saves, False)] if runs is not None else []
        means.append((runs, statistics.mean(steps) if steps else None))
    pairs = [(a, b) if runs else (b, a) for (runs, a), (other, b) in zip(means, means[1:])
             if a and b and {runs, other} == {True, False}]
    return [running / standing for running, standing in pairs]


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
    """Milliseconds: mean over all steps, median where no save and no push runs, and the longest wait for a save."""
    alone = [row["step_ms"] for row in rows if not during(row, [*spans_of(events)[0], *spans_of(events)[1]], False)]
    return {"mean_ms": statistics.mean(row["step_ms"] for row in rows), "alone_ms": statistics.median(alone),
            "stall_ms": 1000 * max(row["stall_s"] for row in events if row["event"] == "save")}


def one_round(number, folder, data, hubs):
    """A session of each arm and one of turns; {arm: its times}, its ratios and the seconds of a core that each of its
    pushes used, and the events of the one that pushes."""
    found, order = {}, ARMS if number % 2 == 0 else ARMS[::-1]
    for arm in order:
        words = [] if arm == "off" else [f"--hub_repo=me/run-{number}", "--hub_exit_minutes=" + (
            "10" if arm == "on" else "0.01")]
        rows, events = session(folder / f"{arm}-{number}", data, hubs.get(arm, os.environ), *words,
                               f"--max_steps={STEPS}")
        found[arm] = step_times(rows, events)
        if arm == "on":
            pushed = events
    turns, used_s, rows, events = taking_turns(folder / f"turns-{number}", data, hubs["turns"])
    return found, ratios_of(turns, rows, events), used_s / len(cycles(events)), pushed


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
    began, rounds, turns, used, pushes, processes = time.monotonic(), [], [], [], [], []
    memory = "/dev/shm" if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4e9 else None
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=memory) as there:
        folder = Path(name)
        (folder / "text.txt").write_text("the run after so many kills is the same run. " * 20000)
        data = folder / "data"
        subprocess.run([sys.executable, "data/prepare.py", "build", str(folder / "text.txt"), "--out", str(data),
                        "--val-ratio", "0"],
                       cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        try:
            hubs = {}
            hang = {"kind": "hang", "match": "POST .*(preupload|batch|commit)", "times": 0}
            for arm, faults in (("on", []), ("turns", []), ("silent", [hang])):
                process, hubs[arm] = start_hub(Path(there, arm), faults)
                processes.append(process)
            for number in range(asked.rounds):
                found, ratios, used_s, events = one_round(number, folder, data, hubs)
                rounds.append(found)
                turns.append(ratios)
                used.append(used_s)
                pushes += cycles(events)
            cold, events = session(folder / "cold", data, hubs["on"], f"--hub_repo=me/run-{asked.rounds - 1}",
                                   f"--max_steps={STEPS + 2}")
            assert [row["step"] for row in cold] == [STEPS + 1, STEPS + 2], "the run on the empty disk goes on"
        finally:
            for process in processes:
                process.kill()
                process.wait()
    report(rounds, turns, used, pushes, events, time.monotonic() - began)


def report(rounds, turns, used, pushes, cold_events, seconds):
    assert all(turns), "no push was under way while the steps of the fourth session were done"
    ratios = {
        "while a push runs / while it stands": [statistics.median(found) for found in turns],
        "all steps, Hub / without": [r["on"]["mean_ms"] / r["off"]["mean_ms"] for r in rounds],
        "all steps, silent Hub / without": [r["silent"]["mean_ms"] / r["off"]["mean_ms"] for r in rounds]}
    print(f"{'milliseconds':28}" + "".join(f"{arm:>12}" for arm in ARMS))
    for key in ("mean_ms", "alone_ms", "stall_ms"):
        print(f"{key:28}" + "".join(f"{statistics.median(r[arm][key] for r in rounds):12.1f}" for arm in ARMS))
    for name, found in ratios.items():
        print(f"{name:42} {statistics.median(found):.4f}  ({min(found):.4f} to {max(found):.4f}, n {len(found)})")
    every = sorted(ratio for found in turns for ratio in found)
    low, middle_pair, high = statistics.quantiles(every, n=4)
    print(f"{len(every)} pairs of turns in all: median {middle_pair:.4f}, half of them {low:.4f} to {high:.4f}")
    middle = {key: statistics.median(row[key] for row in pushes) for key in pushes[0]}
    spread = f"{min(row['all_s'] for row in pushes):.2f} to {max(row['all_s'] for row in pushes):.2f}, n {len(pushes)}"
    parts = ", ".join(f"{key} {middle[key]:.2f}" for key in ("push_s", "verify_s", "pointer_s"))
    print(f"a push of {middle['gb']:.3f} GB: {middle['all_s']:.2f} s ({spread}), of it {parts}; "
          f"{middle['all_s'] / middle['gb']:.1f} s a GB")
    core_s, cost_s = statistics.median(used), (middle_pair - 1) * middle["all_s"]
    print(f"it costs training {cost_s:.2f} s by the pairs of turns, and uses {core_s:.2f} s of a core "
          f"({min(used):.2f} to {max(used):.2f}, n {len(used)})")
    [start], [pull] = ([row for row in cold_events if row["event"] == name] for name in ("start", "pull"))
    stages = start["stages"] | {key: value for key, value in pull.items() if key.endswith("_s")}
    print("cold start, seconds: " + ", ".join(f"{key} {value:.2f}" for key, value in stages.items()))
    print(json.dumps({"bench": "hub_cost", "rounds": rounds, "turns": turns, "ratios": ratios,
                      "pairs_median": middle_pair, "push": middle, "core_s": used, "cold_start": stages,
                      "minutes": round(seconds / 60, 1), "cores": os.cpu_count(), "python": platform.python_version(),
                      "load": round(os.getloadavg()[0], 2)}))


if __name__ == "__main__":
    main()
