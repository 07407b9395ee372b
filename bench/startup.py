"""Seconds from a launch to the start of its first step, beside a bare script that imports torch and builds one AdamW.

    python bench/startup.py                                      5 rounds, about 6 minutes
    python bench/startup.py --rounds 1 --shards 100 --size 10m   a look

A round is the bare script; train.py on small data; train.py on a manifest of 10,000 shards with 10^12 tokens (sparse
files); and of one model a fresh start, a resume from its checkpoint, and its bytes read once, and read and hashed once.
The page cache is warm: an unmeasured launch of each comes first. Every launch is the real command and is killed after
its first step. That step began at the time of its row less the milliseconds that the row gives it; the seconds count
from before the process is started. The bare script ends at its last statement, its teardown is left out. Differences
are taken within a round. Prints a table, then one JSON line.
"""
import argparse
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from throughput import clocks, foreign_share

ROOT = Path(__file__).resolve().parent.parent
BARE = "import time, torch; torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]); print(time.time())"
TOKENS = 10**12
COMMON = ["--warmup_steps=0", "--schedule=constant", "--eval_interval=0", "--sample_interval=0", "--log_interval=1",
          "--checkpoint_interval=500", "--max_steps=1000", "--compile=off", "--device=cpu"]
TINY = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=8", "--batch_tokens=256"]
SIZES = {  # windows of 64 tokens: the control loss on 8 of them is part of a resume
    "tiny": TINY,
    "10m": ["--n_layer=6", "--n_head=6", "--n_embd=384", "--block_size=64", "--batch_size=1", "--batch_tokens=64"],
    "124m": ["--n_layer=12", "--n_head=12", "--n_embd=768", "--vocab_size=50257", "--block_size=64", "--batch_size=1",
             "--batch_tokens=64"],
}


def write_small(folder):
    folder.parent.joinpath("text.txt").write_text("the run after so many kills is the same run. " * 20_000)
    subprocess.run([sys.executable, "data/prepare.py", "build", folder.parent / "text.txt", "--out", folder,
                    "--val-ratio", "0"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def write_sparse(folder, small, shards):
    """A data folder of sparse shards with 10^12 tokens in all. Start-up looks at names and sizes, never at contents,
    so the hashes are made up."""
    folder.mkdir()
    manifest = json.loads((small / "manifest.json").read_text())
    size = 2 * (TOKENS // shards)
    manifest["train"] = [{"file": f"train-{i:05d}.bin", "tokens": size // 2, "bytes": size, "header_bytes": 0,
                          "sha256": f"{i:064x}"} for i in range(shards)]
    for row in manifest["train"]:
        with open(folder / row["file"], "wb") as file:
            file.truncate(row["bytes"])
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def bare_s():
    began = time.time()
    done = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout) - began


def last_row(path, **wanted):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row.items() >= wanted.items()][-1]


def launch(words, out_dir, python=()):
    """Seconds until train.py starts its first step, and its stages; it is killed after that step. Also what it said."""
    command, said = [sys.executable, *python, "train.py", *COMMON, *words, f"--out_dir={out_dir}"], []
    began = time.time()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True) as process:
        try:
            for line in process.stdout:
                said.append(line)
                if line.startswith("step "):
                    break
            else:
                raise SystemExit(f"{' '.join(map(str, command))} did no step; it said:\n{''.join(said)}")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    row, start = last_row(out_dir / "metrics.jsonl"), last_row(out_dir / "events.jsonl", event="start")
    first_step, stages = row["time"] - row["step_ms"] / 1000, start["stages"]
    python_s = start["time"] - began - sum(stages.values())  # before the first line of train.py, and what is recorded
    stages = {"python": python_s, **stages, "begin": first_step - start["time"]}
    return {"first_step_s": first_step - began, "stages": stages}, "".join(said)


def has_compiler(told):
    """Whether torch._dynamo is among the modules that -X importtime has listed."""
    return "torch._dynamo" in {line.rpartition("|")[2].strip() for line in told.splitlines()
                               if line.startswith("import time:")}


def read_once(folder, hashed):
    """Seconds to read every byte of a folder once in this process, and to hash it."""
    began, buffer = time.perf_counter(), memoryview(bytearray(1 << 20))
    for path in sorted(Path(folder).iterdir()):
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while taken := file.readinto(buffer):
                if hashed:
                    digest.update(buffer[:taken])
    return time.perf_counter() - began


def one_round(number, small, huge, model, folder):
    before, saved = clocks(), folder / "saved"
    tiny = [*TINY, f"--data_dir={small}"]
    found = {"bare_s": bare_s(), "small": launch(tiny, folder / f"small-{number}")[0],
             "huge": launch([*TINY, f"--data_dir={huge}"], folder / f"huge-{number}")[0],
             "fresh": launch(model, folder / f"fresh-{number}")[0],
             "resume": launch([*model, "--resume=must"], saved)[0],
             "read_s": read_once(saved / "checkpoints" / "step_00000001", False),
             "hash_s": read_once(saved / "checkpoints" / "step_00000001", True)}
    return found | {"foreign": foreign_share(before, clocks(), os.cpu_count())}


def differences(found):
    """What the promises are about, in seconds, of one round."""
    extra = found["resume"]["first_step_s"] - found["fresh"]["first_step_s"]
    return {"small_over_bare_s": found["small"]["first_step_s"] - found["bare_s"],
            "huge_over_bare_s": found["huge"]["first_step_s"] - found["bare_s"],
            "huge_over_small_s": found["huge"]["first_step_s"] - found["small"]["first_step_s"],
            "resume_over_fresh_s": extra, "load_s": found["resume"]["stages"]["load"],
            "load_over_hash": found["resume"]["stages"]["load"] / found["hash_s"]}


def spread(numbers):
    return {"median": round(statistics.median(numbers), 4), "least": round(min(numbers), 4),
            "most": round(max(numbers), 4)}


def summary(rounds):
    """{figure: its median, least and most over the rounds}"""
    figures = [{"bare_s": found["bare_s"], **{f"{name}_s": found[name]["first_step_s"] for name in
                                              ("small", "huge", "fresh", "resume")},
                "read_s": found["read_s"], "hash_s": found["hash_s"], **differences(found)} for found in rounds]
    return {name: spread([row[name] for row in figures]) for name in figures[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=10_000, help="of the large manifest")
    parser.add_argument("--size", choices=list(SIZES), default="124m", help="of the model that is resumed")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, huge, saved = folder / "small", folder / "huge", folder / "saved"
        write_small(small)
        write_sparse(huge, small, asked.shards)
        model = [*SIZES[asked.size], f"--data_dir={small}"]
        subprocess.run([sys.executable, "train.py", *COMMON, *model, "--stop_after_steps=1", f"--out_dir={saved}"],
                       cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        size = sum(path.stat().st_size for path in (saved / "checkpoints" / "step_00000001").iterdir())
        tell = ("-X", "importtime")
        bare = subprocess.run([sys.executable, *tell, "-c", BARE], check=True, capture_output=True, text=True).stderr
        compiler = {"bare": has_compiler(bare),
                    "train": has_compiler(launch([*TINY, f"--data_dir={small}"], folder / "told", tell)[1])}
        one_round("warm", small, huge, model, folder)
        rounds = [one_round(number, small, huge, model, folder) for number in range(asked.rounds)]
    figures = summary(rounds)
    print(f"{asked.rounds} rounds, {asked.shards:,} sparse shards, {size:,} bytes of a {asked.size} checkpoint; other "
          f"work took up to {max(found['foreign'] for found in rounds):.0%} of the machine")
    print(f"{'seconds':24}median   least    most")
    for name, row in figures.items():
        print(f"{name:22}" + "".join(f"{number:8.3f}" for number in row.values()))
    stages = {name: {stage: round(statistics.median(found[name]["stages"][stage] for found in rounds), 3)
                     for stage in rounds[0][name]["stages"]} for name in ("small", "huge", "fresh", "resume")}
    print(f"{'median of a stage, s':22}" + "".join(f"{stage:>9}" for stage in stages["small"]))
    for name, row in stages.items():
        print(f"  {name:20}" + "".join(f"{seconds:9.3f}" for seconds in row.values()))
    print("torch._dynamo is imported: " + ", ".join(f"{name} {found}" for name, found in compiler.items()))
    print(json.dumps({"bench": "startup", "figures": figures, "stages": stages, "compiler": compiler, "bytes": size,
                      "shards": asked.shards, "size": asked.size, "rounds": rounds, "cores": os.cpu_count(),
                      "python": platform.python_version()}))


if __name__ == "__main__":
    main()
