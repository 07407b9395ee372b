"""Generate text from a checkpoint or a milestone.

    python sample.py --out_dir=out/quickstart
    python sample.py --out_dir=out/124m --prompt="The meaning of life is" --samples=5 --temperature=0.7
    python sample.py --out_dir=out/124m --checkpoint=milestones/step_00005000
    python sample.py --checkpoint=hf:owner/name@main      what a run has pushed to the Hugging Face Hub

Needs the weights, model.json and the tokenizer that it names; optimizer state is not read. Not here: a key/value cache,
batching. Each new token costs a forward pass over the context. A training run writes its samples and asks its probes by
the functions below.
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

import collections
import functools
import hashlib
import json
import os
import re
from pathlib import Path

import torch

import hub
import preflight
from checkpoint import pointer
from data.prepare import load_tokenizer
from model import generate, load

MOST_PROBES = 1000  # each is a forward pass for which training waits
SECTION = re.compile(r'^## ("(?:[^"\\\n]|\\.)*")\n\n```\n', re.MULTILINE)  # its start in a file of samples


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


# -- the samples of a training run

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
    folder = Path(out_dir, "samples")
    try:
        folder.mkdir(exist_ok=True)
        put(folder / f"step_{step:08d}.md", "\n".join(sections))
        put(folder / "reel.md", reel(folder, step))
    except OSError as error:  # a full disk costs the file, not the run
        print(f"samples of step {step} are not on disk: {error}", file=sys.stderr, flush=True)
    return sections


def put(path, text):
    """Writes a file in one instant. A push may copy the folder meanwhile; it leaves out names that begin with a dot."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def reel(folder, until):
    """Each prompt's samples up to step `until` one under the other; later ones are of steps that were taken back."""
    steps = sorted((int(found[1]), path) for path in folder.glob("step_*.md")
                   if (found := re.fullmatch(r"step_(\d{8,})", path.stem)) and int(found[1]) <= until)
    of_prompt = {}
    for step, path in steps:
        for key, text in sections_of(path, path.stat().st_mtime_ns):
            of_prompt.setdefault(key, []).append(f"### step {step:,}\n\n```\n{text}\n")
    parts = [f"## {prompt}\n\n" + "\n".join(texts) for (prompt, _), texts in of_prompt.items()]
    return "# Each prompt at every checkpoint\n\n" + "\n".join(parts)


@functools.lru_cache(4096)
def sections_of(path, written_ns):
    """[((prompt in JSON, 0 or which of the same), its text and closing fence), ...] of a file of samples, read once as
    it was `written_ns`. A heading inside a text belongs to it: there no prompt follows it."""
    text, seen, found = path.read_text(encoding="utf-8", errors="replace"), collections.Counter(), []
    heads = [head for head in SECTION.finditer(text)
             if (prompt := prompt_of(head[1])) is not None and text.startswith(prompt, head.end())]
    for head, after in zip(heads, [*(head.start() for head in heads[1:]), len(text)]):
        found.append(((head[1], seen[head[1]]), text[head.end():after].rstrip("\n")))
        seen[head[1]] += 1
    return found


def prompt_of(heading):
    """The prompt in a heading, None where it is no JSON: a model writes much."""
    try:
        return json.loads(heading, strict=False)
    except ValueError:
        return None


# -- probes: facts that a model knows or not

# Ids of a prompt with its right and with its wrong continuation; both go on after the first `start` of them; `cut`: how
# many the prompt has lost at its head.
Probe = collections.namedtuple("Probe", "prompt kind right wrong start cut")


def read_probes(path, tokenizer, block_size, say):
    """[Probe, ...] from a file of JSON lines; [] without a file, or without a tokenizer to read it by.

    Raises ValueError that names file and line where one cannot be used."""
    if not path or not tokenizer:
        return []
    probes, off = [], "probes_file='' turns probes off"
    try:
        lines = Path(preflight.or_shipped(path)).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"probes_file {path!r} cannot be read ({error}); {off}") from error
    for number, line in enumerate(lines, start=1):
        try:
            probes += [encoded(line, tokenizer, block_size)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"probes_file {path!r}, line {number}: {error}; {off}") from error
    if not 1 <= len(probes) <= MOST_PROBES:
        raise ValueError(f"probes_file {path!r} has {len(probes):,} probes; wanted are 1 to {MOST_PROBES:,}. {off}")
    if cut := sum(probe.cut > 0 for probe in probes):
        say(f"note   {cut} of {len(probes)} probes are too long for block_size {block_size:,}: they lose their heads")
    told = [probe for probe in probes if probe.right != probe.wrong]
    if len(told) < len(probes):
        say(f"note   {len(probes) - len(told)} of {len(probes)} probes are left out: right and wrong have the same ids "
            "in this vocabulary")
    return told


def encoded(line, tokenizer, block_size):
    """The Probe of a line {"prompt", "right", "wrong"} and perhaps "kind". Raises ValueError where it is none.

    Prompt and continuation are encoded as one text, as the model has read it in training; the continuation starts where
    the ids of the prompt alone, with the right and with the wrong one part, for a token may span the border. A token
    that both share there cancels in P(right) / (P(right) + P(wrong))."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from error
    texts = [found.get(name) if isinstance(found, dict) else None for name in ("prompt", "right", "wrong")]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"wanted a JSON object with texts 'prompt', 'right' and 'wrong', got {line.strip()[:100]}")
    prompt, right, wrong = texts
    if right == wrong:
        raise ValueError(f"right and wrong are both {right!r}")
    ids = [tokenizer.encode(text) for text in (prompt, prompt + right, prompt + wrong)]
    if not (start := len(os.path.commonprefix(ids))):  # nothing to go on from but the start of a document
        ids, start = [[tokenizer.eot, *part] for part in ids], 1
    cut = max(0, max(map(len, ids[1:])) - 1 - block_size)  # a last id is not read, only foretold
    if cut >= start:
        raise ValueError(f"the continuations of {prompt[:40]!r} take up to {max(map(len, ids[1:])) - start} tokens; "
                         f"block_size is {block_size}")
    return Probe(prompt, found.get("kind", ""), ids[1][cut:], ids[2][cut:], start - cut, cut)


@torch.no_grad()
def probe(model, probes, interrupt):
    """The fields of a `probe` event: P(right) / (P(right) + P(wrong)) of each probe and their mean; {} without probes
    and where a signal came. In float32, like a sample; no generator is moved. Ranks: rank 0."""
    values, was_training = [], model.training
    model.eval()
    for each in probes:
        if interrupt.name:
            break
        right, wrong = log_probabilities(model, each)
        values.append(torch.sigmoid(right - wrong).item())
    model.train(was_training)
    if not probes or interrupt.name:
        return {}
    return {"mean": preflight.finite(sum(values) / len(values)),
            "probes": [{"prompt": each.prompt, "value": preflight.finite(value), "kind": each.kind}
                       for each, value in zip(probes, values)]}


def log_probabilities(model, probe):
    """log P of the right and of the wrong continuation, float64: over its tokens, each after all true ones before."""
    rows = [torch.tensor(ids) for ids in (probe.right, probe.wrong)]
    idx_BT = torch.zeros(2, max(map(len, rows)) - 1, dtype=torch.long)  # what stands after a row's end is not looked at
    for row_T, ids_T in zip(idx_BT, rows):
        row_T[:len(ids_T) - 1] = ids_T[:-1]
    x_BTC, sums = model.hidden(idx_BT.to(model.wte.weight.device)), []
    for x_TC, ids_T in zip(x_BTC, rows):
        logits_TV = model.logits(x_TC[probe.start - 1:len(ids_T) - 1])[:, :model.config.vocab_size].cpu().double()
        sums.append(logits_TV.log_softmax(-1).gather(1, ids_T[probe.start:, None]).sum())
    return sums


def probe_line(step, found):
    """One line for a person."""
    sure = sum((each["value"] or 0) > 0.5 for each in found["probes"])
    mean = "not finite" if found["mean"] is None else f"{found['mean']:.3f}"
    return (f"probe  step {step:,}: mean P(right) / (P(right) + P(wrong)) {mean}, above 0.5 (no idea) in {sure} of "
            f"{len(found['probes'])}")


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
