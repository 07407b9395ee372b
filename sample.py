"""Generate text from a checkpoint or a milestone.

    python sample.py --out_dir=out/quickstart
    python sample.py --out_dir=out/124m --prompt="The meaning of life is" --samples=5 --temperature=0.7
    python sample.py --out_dir=out/124m --checkpoint=milestones/step_00005000
    python sample.py --checkpoint=hf:owner/name@main      what a run has pushed to the Hugging Face Hub

Needs the weights, model.json and the tokenizer that it names; optimizer state is not read. Not here: a key/value cache,
batching. Each new token costs a forward pass over the context.
"""
import sys

import configurator

out_dir = "out/quickstart"  # folder of the run
checkpoint = ""  # a folder below out_dir, such as milestones/step_00005000, or hf:owner/name; '' = the newest
prompt = ""  # text to continue; '' = from the start of a document
samples = 3  # how many continuations
tokens = 200  # new tokens in each
temperature = 0.8  # 0 = always the likeliest token
top_k = 200  # draw from so many of the likeliest tokens; 0 = all
seed = 1337  # of the draws
device = "auto"  # 'auto', 'cuda', 'mps', 'cpu'

if __name__ == "__main__":
    configurator.configure(globals(), sys.argv[1:])

import hashlib
import json
import os
from pathlib import Path

import torch

import hub
import preflight
from checkpoint import pointer
from data.prepare import load_tokenizer
from model import generate, load


def folder_of(out_dir, checkpoint):
    """The folder to load: the one named, else the one that latest.json names. Raises ValueError where there is none."""
    if checkpoint.startswith("hf:"):
        return hub.fetch(checkpoint)
    if checkpoint:
        return os.path.join(out_dir, checkpoint)
    pointed = pointer(out_dir)
    if pointed is None:
        raise ValueError(f"{out_dir} has no latest.json, so no checkpoint is known; train first, or name a folder with "
                         "--checkpoint=")
    return os.path.join(out_dir, "checkpoints", pointed["checkpoint"])


def printable(text):
    """The text with control characters, which a young model writes too, replaced: a terminal would obey them."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def write_samples(model, tokenizer, prompts, tokens, seed, out_dir, step, interrupt):
    """Continues each prompt by `tokens` tokens into samples/step_N.md; returns its sections, fewer where a signal came.

    Each prompt has a seed of its own that is the same at every step, so that only the model changes. Ranks: rank 0."""
    sections = []
    for number, prompt in enumerate(prompts):
        digest = hashlib.sha256(json.dumps([seed, "sample", number]).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        ids = generate(model, tokenizer.encode(prompt) or [tokenizer.eot], tokens, generator=generator,
                       stop=lambda: bool(interrupt.name))
        if interrupt.name:
            break
        sections.append(f"## {json.dumps(prompt)}\n\n```\n{prompt}{printable(tokenizer.decode(ids))}\n```\n")
    if not sections:
        return []
    path = Path(out_dir, "samples", f"step_{step:08d}.md")
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(sections), encoding="utf-8")
    except OSError as error:  # a full disk costs the file, not the run
        print(f"samples of step {step} are not on disk: {error}", file=sys.stderr, flush=True)
    return sections


def main():
    """Prints the samples. Raises SystemExit(2) with a message for what a person can mend."""
    try:
        if samples < 1 or tokens < 1 or not 0 <= seed < 2**63:
            raise ValueError(f"samples is {samples}, tokens {tokens}, seed {seed}; wanted 1 or more, and 0 to 2**63")
        folder = folder_of(out_dir, checkpoint)
        model, identity = load(folder, preflight.pick_device(device))
        tokenizer = load_tokenizer(identity, model.config.vocab_size, os.path.join(folder, "tokenizer.json"))
        ids = tokenizer.encode(prompt) or [tokenizer.eot]
        if ids == [-1]:
            raise ValueError("this model has no tokenizer; give token ids as the prompt: --prompt='12 7 300'")
        print(f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters", file=sys.stderr)
        for number in range(samples):
            generator = torch.Generator().manual_seed(seed + number)
            text = printable(tokenizer.decode(generate(model, ids, tokens, temperature, top_k, generator)))
            print(f"---- {number + 1}\n{prompt}{text}", flush=True)
    except (ValueError, hub.HubError) as error:
        print(f"sample.py: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
