"""Tokens a second on the CPU of this machine, in two shapes; beside another trainer in one interleaved run.

    python bench/throughput.py                             both shapes, 3 rounds
    python bench/throughput.py --shape byte --rounds 5 --against 'python -u other.py --data={data} --steps={steps}'

train.py itself runs with its logging on. A step is the wall clock between two of its lines as they arrive, so loader,
clipping, optimizer and logging are in it; the first step counts from the start of the process. Another trainer must
print one line a step that begins with "step N" or "iter N", or as --line says; {data}, {out}, {steps}, {vocab},
{n_layer}, {n_head}, {n_embd}, {context} and {batch} are filled in, where {data} has train.bin and val.bin of uint16
token ids. train.py tells steps shorter than 0.2 s together, so no ratio is told where a step took less than 0.25 s.

In a round both start afresh, one after the other, and then take turns: one stands still (SIGSTOP) while the other does
a step that settles and then those that count. A machine whose speed drifts is the same for two turns that follow one
another, so ratios are taken between these; the order alternates. A round's ratio is the geometric mean of its turns',
and the standard error is that over rounds. What train.py does by the clock (a look at the machine every 10 s) falls
into a step that settles: about 0.01 %. No ratio is printed from fewer than 5 rounds in which other work on the machine
took at most 10 % of it, in the turns and from each start to the first step. Prints a table, then one JSON line.
"""
import argparse
import contextlib
import ctypes
import json
import math
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
ENOUGH_ROUNDS, MOST_FOREIGN, SHORTEST_STEP_S = 5, 0.10, 0.25
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


def die_with_parent():
    """In a child: a bench that is killed leaves no trainer that stands still for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, prctl(2)


class Trainer:
    """A trainer that runs in a session of its own and prints a line a step; it stands still between two calls.

    Raises: SystemExit where its command is not found, or where it ends too soon."""

    def __init__(self, command, folder, log, line=STEP_LINE):
        self.command, self.log, self.line, self.began = shlex.join(map(str, command)), log, line, time.monotonic()
        self.foreign, self.wall = 0.0, 0.0  # seconds of all cores that others took, and seconds, while it ran
        try:
            self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                            start_new_session=True, preexec_fn=die_with_parent)
        except OSError as error:
            raise SystemExit(f"{self.command}: {error}") from error

    def steps(self, count):
        """Lets it run until `count` more step lines have come; when each came."""
        began, busy, used, marks = time.monotonic(), busy_s(), used_s(self.process.pid), []
        os.killpg(self.process.pid, signal.SIGCONT)
        while len(marks) < count:
            line = self.process.stdout.readline()
            self.log.write(line)
            if self.line.match(line):
                marks.append(time.monotonic())
            if not line:
                self.log.flush()
                raise SystemExit(f"{self.command}: {len(marks)} of {count} step lines came; the last it said:\n"
                                 f"{Path(self.log.name).read_text()[-2000:]}")
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.foreign += busy_s() - busy - (used_s(self.process.pid) - used)
        self.wall += time.monotonic() - began
        return marks

    def turn(self, steps):
        """One step that settles, then the seconds of each that counts."""
        marks = self.steps(1 + steps)
        return [later - earlier for earlier, later in zip(marks, marks[1:])]

    def foreign_share(self):
        return max(0.0, self.foreign) / self.wall / os.cpu_count()

    def end(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def one_round(commands, asked, folder):
    """{trainer: {first step s, seconds of the steps of each turn, peak GB, foreign share}} of fresh processes."""
    found, running = {}, {}
    with contextlib.ExitStack() as stack:
        for name, (command, where, line) in commands.items():
            log = stack.enter_context(open(folder / f"{name}.log", "wb"))
            running[name] = trainer = Trainer(command, where, log, line)
            stack.callback(trainer.end)
            found[name] = {"first_s": trainer.steps(1)[0] - trainer.began, "turns": []}
            trainer.steps(asked.warm)
        for number in range(asked.turns):
            for name in list(commands)[::1 if number % 2 == 0 else -1]:
                found[name]["turns"].append(running[name].turn(asked.steps))
        for name, trainer in running.items():
            found[name] |= {"peak_gb": peak_gb(trainer.process.pid), "foreign": trainer.foreign_share(),
                            "step_s": statistics.median(span for spans in found[name]["turns"] for span in spans)}
    return found


def one_shape(name, asked, folder):
    """Rounds of one trainer or both; {trainer: [run of each round]}."""
    shape, data, total = SHAPES[name], folder / name, asked.warm + asked.turns * (1 + asked.steps) + 3
    write_data(data, shape["vocab"])
    fill, runs = {**shape, "data": data, "steps": total, "context": CONTEXT, "batch": BATCH}, {}
    for number in range(asked.rounds):
        place = folder / f"{name}-{number}"
        place.mkdir()
        commands = {"longhaul": (our_command(shape, data, place / "ours", total, asked.words), ROOT, STEP_LINE)}
        if asked.against:
            words = shlex.split(asked.against.format(out=place / "theirs", **fill))
            commands["other"] = words, folder, re.compile(asked.line.encode())
        in_turn = dict(list(commands.items())[::1 if number % 2 == 0 else -1])
        for trainer, found in one_round(in_turn, asked, place).items():
            runs.setdefault(trainer, []).append(found)
    return runs


def ratios_of(runs):
    """{what: [other / ours or ours / other of each quiet round]}, {} where they are too few to say anything."""
    rounds = [(ours, other) for ours, other in zip(runs["longhaul"], runs.get("other", []))
              if max(ours["foreign"], other["foreign"]) <= MOST_FOREIGN]
    if len(rounds) < ENOUGH_ROUNDS or min(run["step_s"] for pair in rounds for run in pair) < SHORTEST_STEP_S:
        return {}
    return {"tokens_per_s": [statistics.geometric_mean(sum(theirs) / sum(mine) for mine, theirs in
                                                       zip(ours["turns"], other["turns"])) for ours, other in rounds],
            "peak_gb": [ours["peak_gb"] / other["peak_gb"] for ours, other in rounds],
            "first_s": [ours["first_s"] / other["first_s"] for ours, other in rounds]}


def spread(numbers):
    """The median, least and most of the ratios, their geometric mean and its standard error."""
    mean = statistics.geometric_mean(numbers)
    return {"median": statistics.median(numbers), "least": min(numbers), "most": max(numbers), "mean": mean,
            "error": mean * statistics.stdev(map(math.log, numbers)) / len(numbers) ** 0.5}


def at_least_one(text):
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--warm", type=int, default=2, help="steps of each run, after the first, that do not count")
    parser.add_argument("--turns", type=at_least_one, default=8, help="turns of each run")
    parser.add_argument("--steps", type=at_least_one, default=2,
                        help="steps of each turn that count, after one that settles")
    parser.add_argument("--against", metavar="CMD", default="", help="another trainer's command line")
    parser.add_argument("--line", default=STEP_LINE.pattern.decode(), help="regex of its step lines, one a step")
    parser.add_argument("words", nargs="*", help="more words for train.py, after --")
    asked = parser.parse_args()
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(signal.Signals[name], lambda *_: sys.exit(1))
    shapes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.shape:
            runs = one_shape(name, asked, Path(folder))
            ratios = ratios_of(runs)
            shapes[name] = {"runs": runs, "ratios": {what: spread(numbers) for what, numbers in ratios.items()}}
            print(f"{name}: {SHAPES[name]}, context {CONTEXT}, batch {BATCH}, {len(runs['longhaul'])} rounds of "
                  f"{asked.turns} turns")
            for trainer, found in runs.items():
                speeds = [BATCH * CONTEXT / run["step_s"] for run in found]
                print(f"  {trainer:9} {statistics.median(speeds):8,.0f} tokens/s ({min(speeds):,.0f} to "
                      f"{max(speeds):,.0f}), first step after {statistics.median(r['first_s'] for r in found):.2f} s, "
                      f"peak {max(run['peak_gb'] for run in found):.3f} GB, other work "
                      f"{max(run['foreign'] for run in found):.0%} of the machine")
            for what, row in shapes[name]["ratios"].items():
                print(f"  ratio {what:13} {row['median']:.3f} ({row['least']:.3f} to {row['most']:.3f}), geometric "
                      f"mean {row['mean']:.3f}, standard error {row['error']:.3f}, n {len(ratios[what])}")
            if asked.against and not ratios:
                print(f"  no ratio: fewer than {ENOUGH_ROUNDS} rounds with at most {MOST_FOREIGN:.0%} of other work, "
                      f"or steps under {SHORTEST_STEP_S} s")
    print(json.dumps({"bench": "throughput", "shapes": shapes, "against": asked.against, "line": asked.line,
                      "words": asked.words, "warm": asked.warm, "steps": asked.steps, "turns": asked.turns,
                      "cores": os.cpu_count(), "python": platform.python_version()}))


if __name__ == "__main__":
    main()
