"""What the cards could do at most, on paper: compute, the update's memory traffic and the exchange of gradients.

    python bench/roofline.py

Nothing is measured here. Peaks are preflight.PEAKS; memory and link bandwidths are those of NVIDIA's data sheets (the
link of a T4 is PCIe 3.0 x16). An update reads and writes weights, gradients and two moments in float32: 36 bytes a
parameter, with the norm and the scaling of the gradients. An exchange sends 2 (n - 1) / n of the float32 gradients
over a link. Beside each roofline stands the speed that is aimed at and what of a step's time there the parts would take
that are not the model's products. Prints a table, then one JSON line.
"""
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import configurator
import preflight
import train
from model import GPT, GPTConfig, flops_per_token, parameter_counts

CASES = (  # config, vocabulary, card, how many, dtype, aimed at (tokens/s), GB/s of memory, GB/s of a link one way
    ("config/106m_2xt4.py", 0, "Tesla T4", 2, "float16", 30_000, 320, 15.75),
    ("config/124m.py", 50257, "NVIDIA RTX A5000", 1, "bfloat16", 60_000, 768, 0),
    ("config/124m.py", 50257, "NVIDIA H200", 1, "bfloat16", 440_000, 4800, 0),
    ("config/124m.py", 50257, "NVIDIA H200", 8, "bfloat16", 8 * 440_000, 4800, 450),
)
UPDATE_BYTES, GRADIENT_BYTES = 36, 4


def case(name, vocabulary, card, count, dtype, target, memory, link):
    settings = dict(vars(train))
    configurator.configure(settings, [str(ROOT / name)])
    words = {key: settings[key] for key in GPTConfig.__dataclass_fields__}
    config = GPTConfig(**words | {"vocab_size": settings["vocab_size"] or vocabulary})
    peak = next(row[dtype] for known, row in preflight.PEAKS if known in card) * 1e12
    parameters = parameter_counts(GPT(config, seed=None))["total"]
    step_s = settings["batch_tokens"] / target
    copied = settings["batch_size"] * (settings["block_size"] + 1) * 8  # bytes of a micro-batch of int64 windows
    micro_s = settings["batch_size"] * settings["block_size"] / (target / count)
    return {"config": name, "card": card, "count": count, "mflop_a_token": flops_per_token(config) / 1e6,
            "roofline_tokens_per_s": count * peak / flops_per_token(config), "target_tokens_per_s": target,
            "target_mfu": target * flops_per_token(config) / (count * peak), "step_ms": 1000 * step_s,
            "update_share": UPDATE_BYTES * parameters / (memory * 1e9) / step_s,
            "exchange_share": (2 * (count - 1) / count * GRADIENT_BYTES * parameters / (link * 1e9) / step_s
                               if link else 0.0),
            "copy_share": copied / 12e9 / micro_s}  # over PCIe, taken to carry 12 GB/s


def main():
    rows = [case(*numbers) for numbers in CASES]
    print(f"{'config':22} {'cards':22} {'roofline':>10} {'aim':>10} {'MFU':>6} {'step':>8}  update  exchange  copies")
    for row in rows:
        print(f"{row['config']:22} {row['count']} x {row['card']:18} {row['roofline_tokens_per_s']:10,.0f} "
              f"{row['target_tokens_per_s']:10,} {row['target_mfu']:6.1%} {row['step_ms']:5,.0f} ms "
              f"{row['update_share']:7.2%} {row['exchange_share']:9.2%} {row['copy_share']:7.3%}")
    print(json.dumps({"bench": "roofline", "rows": rows}))


if __name__ == "__main__":
    main()
