"""What a checkpoint costs a run: how long training waits, until it is durable, to load, in bytes and memory.

    python bench/checkpoint.py                  10M and 124M parameters, 12 saves each, the first one left out
    python bench/checkpoint.py --saves 4 --sizes 10m

Runs train.py itself in a process of its own and times it at each save; right before the save, torch.save with fsync of
the same tensors is timed as well, as a trainer that stops for it would do it. Saves lie far enough apart that none
waits for the one before. Windows are of 64 tokens: the control loss on 8 of them is part of the time until a save is
durable.
Memory is what lies in RAM at the end of a step (VmRSS). Prints a table, then one JSON line.
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
COMMON = ["--block_size=64", "--batch_size=1", "--batch_tokens=64", "--schedule=constant", "--warmup_steps=0",
          "--learning_rate=1e-4", "--eval_interval=0", "--eval_tokens=64", "--sample_interval=0", "--log_interval=1",
          "--data_verify=off", "--device=cpu", "--compile=off", "--keep_checkpoints=1"]
SIZES = {  # settings, steps from save to save: enough for the one before to be durable
    "10m": (["--n_layer=6", "--n_head=6", "--n_embd=384", "--vocab_size=257"], 20),
    "124m": (["--n_layer=12", "--n_head=12", "--n_embd=768", "--vocab_size=50257"], 20),
}


# ---- in the process that trains

def measure(words, folder):
    """Trains and prints one JSON line: of each save and each step, what it took in seconds."""
    sys.path.insert(0, str(ROOT))
    import torch

    import checkpoint
    import configurator
    import train

    configurator.configure(vars(train), words)
    found = {"torch_save_s": [], "stall_s": [], "quiet_step_s": [], "writing_step_s": [], "quiet_gb": [],
             "writing_gb": []}
    begin, train_step, savers = checkpoint.Saver.begin, train.train_step, []

    def begin_beside_torch_save(saver, *arguments):
        saver.wait()  # the disk is for one of the two at a time
        savers[:] = [saver]
        began = time.perf_counter()
        path = Path(folder, "torch.save")
        with open(path, "wb") as file:
            torch.save(saver.live, file)
            file.flush()
            os.fsync(file.fileno())
        found["torch_save_s"].append(time.perf_counter() - began)
        path.unlink()
        began = time.perf_counter()
        begin(saver, *arguments)
        found["stall_s"].append(time.perf_counter() - began)

    def timed_step(*arguments):
        writing = bool(savers) and not savers[0].saving.done()
        began = time.perf_counter()
        outcome = train_step(*arguments)
        found["writing_step_s" if writing else "quiet_step_s"].append(time.perf_counter() - began)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["writing_gb" if writing else "quiet_gb"].append(pages * os.sysconf("SC_PAGE_SIZE") / 1e9)
        return outcome

    checkpoint.Saver.begin, train.train_step = begin_beside_torch_save, timed_step
    train.main()
    print("\n" + json.dumps(found | {"threads": torch.get_num_threads(), "torch": torch.__version__}))


# ---- around it

def session(words, folder):
    """What `measure` found in a session of these settings."""
    done = subprocess.run([sys.executable, __file__, "--measure", str(folder), *words], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def events(out_dir, name):
    return [row for row in lines(out_dir / "events.jsonl") if row["event"] == name]


def one_size(name, saves, folder):
    """Sessions of one size of model: with saves, without (for memory), and one that loads."""
    shape, interval = SIZES[name]
    out_dir, data = folder / name, folder / "data"
    words = [*COMMON, *shape, f"--data_dir={data}", f"--out_dir={out_dir}", f"--max_steps={interval * (saves + 2)}"]
    with_saves = [f"--checkpoint_interval={interval}", f"--stop_after_steps={interval * (saves + 1)}"]
    found = session([*words, *with_saves], folder)
    saved = events(out_dir, "save")[1:saves + 1]  # the first one is not counted
    session([*words, "--checkpoint_interval=0", "--stop_after_steps=1"], folder)
    load_s = events(out_dir, "start")[-1]["stages"]["load"]
    alone = [*words[:-2], f"--out_dir={folder / name}-alone", words[-1]]
    without = session([*alone, "--checkpoint_interval=0", f"--stop_after_steps={interval}"], folder)
    stalls, torch_saves = found["stall_s"][1:saves + 1], found["torch_save_s"][1:saves + 1]
    quiet, writing = (statistics.median(found[f"{kind}_step_s"][3:]) for kind in ("quiet", "writing"))
    parameters = events(out_dir, "start")[0]["parameters"]
    return {
        "size": name, "parameters": parameters, "saves": len(saved), "bytes": saved[-1]["bytes"],
        "stall_s": statistics.median(stalls), "stall_max_s": max(stalls),
        "torch_save_s": statistics.median(torch_saves), "torch_save_min_s": min(torch_saves),
        "torch_save_max_s": max(torch_saves),
        "ratio": statistics.median(stall / beside for stall, beside in zip(stalls, torch_saves)),
        "durable_s": statistics.median(row["seconds"] for row in saved), "durable_max_s": max(
            row["seconds"] for row in saved),
        "load_s": load_s, "quiet_step_s": quiet, "writing_step_s": writing, "step_ratio": writing / quiet,
        "writing_steps": len(found["writing_step_s"]), "quiet_steps": len(found["quiet_step_s"]),
        "memory_gb": statistics.median(found["quiet_gb"]), "memory_writing_gb": max(found["writing_gb"]),
        "memory_without_gb": statistics.median(without["quiet_gb"]), "snapshot_gb": 12 * parameters / 1e9,
        "threads": found["threads"], "torch": found["torch"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=12)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    asked = parser.parse_args()
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("the run after so many kills is the same run. " * 2000)
        subprocess.run([sys.executable, "data/prepare.py", "build", str(text), "--out", f"{folder}/data",
                        "--val-ratio", "0"], cwd=ROOT,
                       check=True, stdout=subprocess.DEVNULL)
        for name in asked.sizes:
            row = one_size(name, asked.saves, Path(folder))
            rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    print(f"{'':46}" + "".join(f"{row['size']:>14}" for row in rows))
    for label, key in (
            ("parameters", "parameters"), ("bytes of a checkpoint", "bytes"), ("saves timed, after the first", "saves"),
            ("training waits for a save, median, s", "stall_s"), ("  the longest of them, s", "stall_max_s"),
            ("torch.save + fsync of the same, median, s", "torch_save_s"), ("  the shortest, s", "torch_save_min_s"),
            ("  the longest, s", "torch_save_max_s"), ("wait / torch.save + fsync, median", "ratio"),
            ("until durable and verified, median, s", "durable_s"), ("  the longest, s", "durable_max_s"),
            ("loading: verify, read, copy, s", "load_s"), ("step while nothing is written, median, s", "quiet_step_s"),
            ("step while a checkpoint is written, median, s", "writing_step_s"), ("  ratio", "step_ratio"),
            ("memory with saves on the way, median, GB", "memory_gb"), ("  while one is written, most, GB",
                                                                        "memory_writing_gb"),
            ("  without saves, median, GB", "memory_without_gb"), ("bytes of a snapshot, GB", "snapshot_gb")):
        print(f"{label:46}" + "".join(f"{row[key]:>14,}" for row in rows))
    print(json.dumps({"bench": "checkpoint", "rows": rows, "minutes": round((time.monotonic() - began) / 60, 1),
                      "cores": os.cpu_count(), "python": platform.python_version(),
                      "load": round(os.getloadavg()[0], 2)}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[3:], sys.argv[2])
    else:
        main()
