"""Tokens a second on the CPU of this machine, in two shapes; beside another trainer in one interleaved run.

    python bench/throughput.py                             both shapes, 3 rounds
    python bench/throughput.py --shape byte --rounds 5 --against 'python -u other.py --data={data} --steps={steps}'

train.py itself runs with its logging on. A step is the wall clock between two of its lines as they arrive, so loader,
clipping, optimizer and logging are in it; the first step counts from the start of the process. Another trainer must
print a line a step that begins with "step N" or "iter N"; {data}, {out}, {steps}, {vocab}, {n_layer}, {n_head},
{n_embd}, {context} and {batch} are filled in, where {data} has train.bin and val.bin of uint16 token ids. In a round
one runs after the other, the order alternates, and a ratio is taken within a round. No ratio is printed from fewer than
5 rounds in which other work on the machine took at most 10 % of it. Prints a table, then one JSON line.
"""
import argparse
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {  # both with a context of 256 and a batch of 8, one forward a step
    "gpt2v": {"vocab": 50304, "n_layer": 4, "n_head": 4, "n_embd": 256},
    "byte": {"vocab": 256, "n_layer": 6, "n_head": 6, "n_embd": 384},
}
CONTEXT, BATCH = 256, 8
STEP_LINE = re.compile(rb"^(?:step|iter)\D*([\d,]+)")
ENOUGH_ROUNDS, MOST_FOREIGN = 5, 0.10
TICK = os.sysconf("SC_CLK_TCK")


def write_data(folder, vocab):
    """Token files whose ids are as unequal in frequency as words are (Zipf's law), and our manifest over them."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(1337)
    for name, tokens in (("train.bin", 2_000_000), ("val.bin", 100_000)):
        ((draw.zipf(1.3, tokens) - 1) % vocab).astype("<u2").tofile(folder / name)
    subprocess.run([sys.executable, "data/prepare.py", "import", folder / "train.bin", folder / "val.bin", "--out",
                    folder / "ours", "--tokenizer", "none", "--vocab-size", str(vocab)], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def our_command(shape, data, out, steps, more):
    words = [f"--{name}={value}" for name, value in shape.items() if name != "vocab"]
    return [sys.executable, "train.py", *words, f"--vocab_size={shape['vocab']}", f"--block_size={CONTEXT}",
            f"--batch_size={BATCH}", f"--batch_tokens={BATCH * CONTEXT}", f"--max_steps={steps}", "--log_interval=1",
            "--schedule=cosine", "--warmup_steps=2", "--eval_interval=0", f"--eval_tokens={CONTEXT}",
            "--sample_interval=0", "--checkpoint_interval=0", "--device=cpu", "--compile=off", "--data_verify=off",
            f"--data_dir={data / 'ours'}", f"--out_dir={out}", *more]


def busy_s():
    """Seconds of all cores together that were not idle since the machine began."""
    numbers = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    return (sum(numbers) - numbers[3] - numbers[4]) / TICK


def foreign_share(before, after, cores):
    """The share of the machine that others used between two of `clocks`."""
    wall, busy, own = (later - earlier for earlier, later in zip(before, after))
    return max(0.0, busy - own) / wall / cores


def clocks():
    """(wall clock, seconds that all cores were busy, seconds of this process and of children it waited for)"""
    return time.monotonic(), busy_s(), sum(os.times()[:4])


def used_s(session):
    """Seconds that the processes of a session have used, with those of children they have waited for."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return total / TICK


def peak_gb(pid):
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 / 1e9


def timed_run(command, folder, warm, steps, log):
    """Runs a trainer until it has done enough steps; {first step s, median step s, peak GB, foreign share}."""
    began, marks = time.monotonic(), []
    with open(log, "wb") as file, subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE,
                                                   stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            for line in process.stdout:
                file.write(line)
                if STEP_LINE.match(line):
                    marks.append(time.monotonic())
                if len(marks) == warm and STEP_LINE.match(line):
                    busy, used = busy_s(), used_s(process.pid)
                if len(marks) == warm + steps:
                    foreign = busy_s() - busy - (used_s(process.pid) - used)
                    peak = peak_gb(process.pid)
                    break
            else:
                raise SystemExit(f"{shlex.join(map(str, command))}: {len(marks)} step lines came, {warm + steps} are "
                                 f"wanted; the last it said:\n{Path(log).read_text()[-2000:]}")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    spans = [later - earlier for earlier, later in zip(marks[warm - 1:], marks[warm:])]
    return {"first_s": marks[0] - began, "step_s": statistics.median(spans), "peak_gb": peak,
            "foreign": max(0.0, foreign) / (marks[-1] - marks[warm - 1]) / os.cpu_count()}


def one_shape(name, asked, folder):
    """Rounds of both trainers; {trainer: [run of each round]}."""
    shape, data, total = SHAPES[name], folder / name, asked.warm + asked.steps + 2
    write_data(data, shape["vocab"])
    commands = {"longhaul": (lambda out: our_command(shape, data, out, total, asked.words), ROOT)}
    if asked.against:
        fill = {**shape, "data": data, "steps": total, "context": CONTEXT, "batch": BATCH}
        commands["other"] = (lambda out: shlex.split(asked.against.format(out=out, **fill)), folder)
    runs = {trainer: [] for trainer in commands}
    for number in range(asked.rounds):
        for trainer in list(commands)[::1 if number % 2 == 0 else -1]:
            command, where = commands[trainer]
            out = folder / f"{name}-{trainer}-{number}"
            runs[trainer].append(timed_run(command(out), where, asked.warm, asked.steps, out.with_suffix(".log")))
    return runs


def ratios_of(runs):
    """{what: [other / ours or ours / other of each quiet round]}, {} where they are too few to say anything."""
    pairs = [(ours, other) for ours, other in zip(runs["longhaul"], runs.get("other", []))
             if max(ours["foreign"], other["foreign"]) <= MOST_FOREIGN]
    if len(pairs) < ENOUGH_ROUNDS:
        return {}
    return {"tokens_per_s": [other["step_s"] / ours["step_s"] for ours, other in pairs],
            "peak_gb": [ours["peak_gb"] / other["peak_gb"] for ours, other in pairs],
            "first_s": [ours["first_s"] / other["first_s"] for ours, other in pairs]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=3, help="steps of each run that do not count")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run that count")
    parser.add_argument("--against", metavar="CMD", default="", help="another trainer's command line")
    parser.add_argument("words", nargs="*", help="more words for train.py, after --")
    asked = parser.parse_args()
    shapes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.shape:
            runs = one_shape(name, asked, Path(folder))
            ratios = ratios_of(runs)
            shapes[name] = {"runs": runs, "ratios": ratios}
            print(f"{name}: {SHAPES[name]}, context {CONTEXT}, batch {BATCH}, {len(runs['longhaul'])} rounds")
            for trainer, found in runs.items():
                speeds = [BATCH * CONTEXT / run["step_s"] for run in found]
                print(f"  {trainer:9} {statistics.median(speeds):8,.0f} tokens/s ({min(speeds):,.0f} to "
                      f"{max(speeds):,.0f}), first step after {statistics.median(r['first_s'] for r in found):.2f} s, "
                      f"peak {max(run['peak_gb'] for run in found):.3f} GB, other work "
                      f"{max(run['foreign'] for run in found):.0%} of the machine")
            for what, numbers in ratios.items():
                print(f"  ratio {what:13} {statistics.median(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f}, "
                      f"n {len(numbers)})")
            if asked.against and not ratios:
                print(f"  no ratio: fewer than {ENOUGH_ROUNDS} rounds with at most {MOST_FOREIGN:.0%} of other work")
    print(json.dumps({"bench": "throughput", "shapes": shapes, "against": asked.against, "words": asked.words,
                      "cores": os.cpu_count(), "python": platform.python_version()}))


if __name__ == "__main__":
    main()
