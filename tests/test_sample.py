"""sample.py: text from a checkpoint or a milestone, and the samples that training writes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkpoint
import configurator
import sample
from data import prepare
from model import GPT, GPTConfig
from train import Interrupt

ROOT = Path(sample.__file__).resolve().parent
CONFIG = {"vocab_size": 257, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
DEFAULTS = configurator.settings(vars(sample))


# -- helpers

def tiny(seed, **changes):
    """A model whose logits are far apart, so that other weights or other draws make other text."""
    model = GPT(GPTConfig(**CONFIG | changes), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return model


def write(out_dir, step, model, kind="checkpoints", **changes):
    files = {"model.safetensors": {name: p.detach() for name, p in model.named_parameters()},
             "model.json": {"format": 1, "model": vars(model.config), "tokenizer": prepare.BYTES} | changes}
    if kind == "checkpoints":
        files["trainer.json"] = {"run": "run-a", "lineage": [["n1", 0]], "step": step, "windows": step * 4,
                                 "tokens": step * 64, "settings": {"batch_tokens": 64, "block_size": 16}}
    return checkpoint.write(out_dir, step, files, "run-a", kind)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with two checkpoints, the newer one pointed at, and a milestone; all of other weights."""
    out_dir = tmp_path_factory.mktemp("run")
    write(out_dir, 10, tiny(1))
    checkpoint.point(out_dir, write(out_dir, 20, tiny(2)), "n1")
    write(out_dir, 5, tiny(3), "milestones")
    return out_dir


@pytest.fixture
def say(monkeypatch, capsys):
    """Runs sample.py's main under words; returns what it prints on stdout and stderr."""
    def run(*words):
        for name, value in configurator.configure(dict(DEFAULTS), list(words)).items():
            monkeypatch.setattr(sample, name, value)
        sample.main()
        return capsys.readouterr()
    return run


@pytest.fixture
def refusal(say, capsys):
    """What is said by a run that exits with 2 and prints no sample."""
    def run(*words):
        with pytest.raises(SystemExit) as stop:
            say(*words)
        said = capsys.readouterr()
        assert stop.value.code == 2 and not said.out
        assert "Traceback" not in said.err and re.search("^sample.py: ", said.err, re.MULTILINE)
        return said.err
    return run


def texts(out):
    """The samples on stdout, without their headings."""
    return re.split(r"^---- \d+\n", out, flags=re.MULTILINE)[1:]


def command(*words, cwd):
    """sample.py as a person types it."""
    return subprocess.run([sys.executable, str(ROOT / "sample.py"), *words], cwd=cwd, capture_output=True,
                          encoding="utf-8", env=os.environ | {"PYTHONIOENCODING": "utf-8"}, timeout=120)


# -- the command

def test_the_command_prints_samples_of_the_pointed_checkpoint(run_folder, tmp_path):
    found = command(f"--out_dir={run_folder}", "--tokens=12", "--samples=2", "--device=cpu", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert re.findall(r"^---- (\d+)$", found.stdout, re.MULTILINE) == ["1", "2"]
    count = sum(p.numel() for p in tiny(2).parameters())
    assert found.stderr == f"{run_folder / 'checkpoints' / 'step_00000020'}: {count:,} parameters\n"
    assert not list(tmp_path.iterdir()), "it writes nothing"


def test_the_command_refuses_a_wrong_word_and_exits_with_2(tmp_path):
    found = command("--temprature=0.5", cwd=tmp_path)
    assert found.returncode == 2 and "did you mean 'temperature'?" in found.stderr and not found.stdout


def test_the_same_seed_gives_the_same_text_and_another_seed_another(run_folder, say):
    words = [f"--out_dir={run_folder}", "--tokens=24"]
    first, again, other = say(*words).out, say(*words).out, say(*words, "--seed=7").out
    assert first == again != other
    assert len(texts(first)) == 3 == len(set(texts(first))), "each sample has draws of its own"


def test_a_sample_does_not_depend_on_how_many_there_are(run_folder, say):
    words = [f"--out_dir={run_folder}", "--tokens=24"]
    assert texts(say(*words, "--samples=1").out)[0] == texts(say(*words).out)[0]


def test_the_prompt_is_printed_and_continued(run_folder, say):
    words = [f"--out_dir={run_folder}", "--tokens=24", "--samples=2"]
    with_prompt = texts(say(*words, "--prompt=def f(x):\n").out)
    assert all(text.startswith("def f(x):\n") and len(text) > len("def f(x):\n") for text in with_prompt)
    continued = [text.removeprefix("def f(x):\n") for text in with_prompt]
    assert continued != texts(say(*words).out), "the continuation follows from the prompt"


def test_a_prompt_may_be_longer_than_the_context_and_not_ascii(run_folder, say):
    prompt = "\N{GREEK SMALL LETTER ALPHA}bc " * 20
    [text] = texts(say(f"--out_dir={run_folder}", "--tokens=4", "--samples=1", f"--prompt={prompt}").out)
    assert text.startswith(prompt)


def test_without_a_prompt_a_document_begins(run_folder, say):
    """The first token then follows the end-of-text id."""
    [text] = texts(say(f"--out_dir={run_folder}", "--tokens=1", "--samples=1", "--temperature=0").out)
    likeliest = tiny(2)(torch.tensor([[prepare.BYTES["eot"]]]))[0, -1].argmax().item()
    assert text == sample.printable(prepare.byte_tokenizer().decode([likeliest])) + "\n"


def test_control_characters_are_replaced(run_folder, say, tmp_path):
    """A terminal would obey them."""
    assert sample.printable("a\x1b[2J\r\x00b\tc\n\N{GREEK SMALL LETTER ALPHA}") == (
        "a\ufffd[2J\ufffd\ufffdb\tc\n\N{GREEK SMALL LETTER ALPHA}")
    printed = say(f"--out_dir={run_folder}", "--tokens=99", "--samples=1", "--top_k=0").out
    for text in (printed, *written(tiny(1), tmp_path)):
        assert "\ufffd" in text and all(c.isprintable() or c in "\n\t" for c in text)


def test_temperature_0_is_the_likeliest_text_whatever_the_seed(run_folder, say):
    words = [f"--out_dir={run_folder}", "--tokens=24", "--temperature=0"]
    first, other = texts(say(*words).out), texts(say(*words, "--seed=7").out)
    assert len(set(first)) == 1 and first == other
    assert texts(say(*words[:2], "--top_k=1").out) == first, "and so is the likeliest of one"


def test_a_milestone_or_an_older_checkpoint_can_be_named(run_folder, say):
    words, found = [f"--out_dir={run_folder}", "--tokens=24"], {}
    for folder in ("", "checkpoints/step_00000010", "checkpoints/step_00000020", "milestones/step_00000005"):
        said = say(*words, f"--checkpoint={folder}")
        found[folder] = said.out
        assert (folder or "step_00000020") in said.err
    assert found[""] == found["checkpoints/step_00000020"] and len(set(found.values())) == 3


def test_optimizer_state_is_not_needed(run_folder):
    assert not list(run_folder.glob("*/*/optimizer*"))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path, refusal):
    assert f"{tmp_path} has no latest.json" in refusal(f"--out_dir={tmp_path}")
    assert "--checkpoint=" in refusal(f"--out_dir={tmp_path / 'absent'}")
    assert not (tmp_path / "absent").exists()


def test_a_checkpoint_that_is_not_there_is_refused(run_folder, refusal):
    said = refusal(f"--out_dir={run_folder}", "--checkpoint=milestones/step_00000099")
    assert "milestones/step_00000099 holds no model that can be read" in said


def test_weights_that_do_not_fit_their_model_json_are_refused(tmp_path, refusal):
    model = tiny(1)
    folder = write(tmp_path, 10, model)
    (folder / "model.json").write_text(json.dumps({"format": 1, "tokenizer": prepare.BYTES,
                                                   "model": vars(model.config) | {"n_layer": 3}}))
    assert "does not fit" in refusal(f"--out_dir={tmp_path}", "--checkpoint=checkpoints/step_00000010")


def test_a_damaged_pointer_is_refused(tmp_path, refusal):
    checkpoint.point(tmp_path, write(tmp_path, 10, tiny(1)), "n1")
    (tmp_path / "latest.json").write_text('{"format": 1}')
    assert "latest.json" in refusal(f"--out_dir={tmp_path}")


def test_a_tokenizer_that_is_not_the_recorded_one_is_refused(tmp_path, refusal):
    write(tmp_path, 10, tiny(1), tokenizer=prepare.BYTES | {"sha256": "0" * 64})
    assert "sha256" in refusal(f"--out_dir={tmp_path}", "--checkpoint=checkpoints/step_00000010")


@pytest.mark.parametrize("word,said", [("--temperature=-1", "temperature"), ("--top_k=-1", "top_k"),
                                       ("--device=tpu", "device")])
def test_values_that_cannot_work_are_refused(run_folder, refusal, word, said):
    assert said in refusal(f"--out_dir={run_folder}", "--samples=1", word)


# -- the samples of a training run

PROMPTS = ["import ", "def f(", ""]


def written(model, out_dir, step=20, interrupt=None, prompts=PROMPTS, seed=1337):
    return sample.write_samples(model, prepare.byte_tokenizer(), prompts, 12, seed, str(out_dir), step,
                                interrupt or Interrupt())


def test_samples_are_written_into_a_file_named_after_the_step(tmp_path):
    sections = written(tiny(1), tmp_path)
    assert (tmp_path / "samples" / "step_00000020.md").read_text("utf-8") == "\n".join(sections)
    assert [section.splitlines()[0] for section in sections] == [f"## {json.dumps(text)}" for text in PROMPTS]
    assert all(f"```\n{text}" in section for text, section in zip(PROMPTS, sections))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["reel.md", "step_00000020.md"]


def test_a_prompt_has_the_same_draws_at_every_step_so_that_only_the_model_changes(tmp_path):
    first, later = written(tiny(1), tmp_path, 20), written(tiny(1), tmp_path, 40)
    assert first == later
    assert written(tiny(2), tmp_path, 60) != first, "other weights, other text"
    assert written(tiny(1), tmp_path, 80, seed=7) != first, "another seed, other text"
    assert len(list((tmp_path / "samples").glob("step_*.md"))) == 4


def test_each_prompt_has_draws_of_its_own(tmp_path):
    twice = written(tiny(1), tmp_path, prompts=["def ", "def "])
    assert twice[0] != twice[1]
    assert written(tiny(1), tmp_path, prompts=["def "]) == twice[:1], "whatever prompts follow"


class Delivered(Interrupt):
    """Stands for a signal that arrives after so many looks at it."""

    def __init__(self, looks):
        self.looks = looks

    @property
    def name(self):
        self.looks -= 1
        return "SIGTERM" if self.looks < 0 else ""


@pytest.mark.parametrize("looks", [0, 1, 12, 13, 20, 26])
def test_samples_are_cut_short_by_a_signal_within_a_token(tmp_path, looks):
    sections = written(tiny(1), tmp_path, interrupt=Delivered(looks))
    whole = looks // 13  # a look before each of 12 tokens and one after them
    assert sections == written(tiny(1), tmp_path)[:whole]


def test_samples_are_cut_short_by_a_real_signal(tmp_path):
    interrupt, model = Interrupt(), tiny(1)
    before = signal.signal(signal.SIGUSR1, interrupt.arrived)
    try:
        hook = model.wte.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
        sections = written(model, tmp_path, interrupt=interrupt)
        hook.remove()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert interrupt.name == "SIGUSR1" and sections == []
    assert not (tmp_path / "samples").exists()


@pytest.mark.parametrize("training", [True, False])
def test_samples_move_neither_the_global_generator_nor_the_training_mode(tmp_path, training):
    model = tiny(1, dropout=0.5).train(training)
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    before = torch.get_rng_state()
    first = written(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training is training for module in model.modules())
    assert all(torch.equal(weights[name], parameter) and parameter.grad is None
               for name, parameter in model.named_parameters())
    torch.manual_seed(99)
    assert written(model, tmp_path) == first, "and do not depend on it; dropout is off"


# -- the reel

def sections_of_reel(out_dir):
    """{prompt in JSON: [(step, text), ...]} of samples/reel.md, in its order."""
    _, *parts = re.split(r"^## ", (out_dir / "samples" / "reel.md").read_text("utf-8"), flags=re.MULTILINE)
    sample_of = re.compile(r"^### step ([\d,]+)\n\n```\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
    return {part.partition("\n")[0]: sample_of.findall(part) for part in parts}


def test_the_reel_shows_each_prompt_at_every_step_one_under_the_other(tmp_path):
    wanted = {json.dumps(prompt): [] for prompt in PROMPTS}
    for step in (0, 20, 1040):
        for prompt, section in zip(wanted, written(tiny(step + 1), tmp_path, step)):
            wanted[prompt].append((f"{step:,}", section.partition("```\n")[2].removesuffix("\n```\n")))
    assert sections_of_reel(tmp_path) == wanted
    assert not [path for path in (tmp_path / "samples").iterdir() if path.name.startswith(".")]


def test_a_step_done_again_takes_its_place_in_the_reel_and_later_ones_leave_it(tmp_path):
    for step in (0, 20, 40, 60):
        written(tiny(step + 1), tmp_path, step)
    before = sections_of_reel(tmp_path)
    written(tiny(99), tmp_path, 20)  # a run that went back to a checkpoint before
    found = sections_of_reel(tmp_path)
    for prompt in found:
        assert [step for step, _ in found[prompt]] == ["0", "20"] and found[prompt][0] == before[prompt][0]
        assert found[prompt][1] != before[prompt][1]


def test_the_reel_is_made_anew_from_the_files_of_samples_that_a_pull_has_brought(tmp_path):
    written(tiny(1), tmp_path, 0)
    written(tiny(2), tmp_path, 20)
    wanted = sections_of_reel(tmp_path)
    (tmp_path / "samples" / "reel.md").unlink()
    written(tiny(2), tmp_path, 20)
    assert sections_of_reel(tmp_path) == wanted


def test_the_reel_keeps_other_prompts_twice_the_same_one_and_headings_inside_texts(tmp_path):
    (tmp_path / "samples").mkdir()
    texts = ["a\n```\n\n## \"b\"\n\n```\nno", "b", "a again"]
    sections = [f"## {json.dumps(text[:1])}\n\n```\n{text}\n```\n" for text in texts]
    hostile = "## \"\\q\"\n\n```\n"  # no JSON
    (tmp_path / "samples/step_00000000.md").write_text("\n".join([*sections[:2], hostile, sections[2]]))
    written(tiny(1), tmp_path, prompts=["b"])
    found = (tmp_path / "samples/reel.md").read_text()
    assert re.findall("^##+ .*", found, re.MULTILINE) == [
        '## "a"', "### step 0", '## "b"', '## "b"', "### step 0", '## "\\q"', "### step 20", '## "a"', "### step 0"]
    assert sum(found.count(text) for text in texts[::2]) == 2 and "a again\n```" in found


def test_the_reel_reads_each_file_once(tmp_path, monkeypatch):
    for step in range(0, 400, 20):
        written(tiny(1), tmp_path, step, prompts=["a"])
    reads, read_text = [], Path.read_text
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda path, **how: reads.append(path.name) or read_text(path, **how))
        written(tiny(1), tmp_path, 400, prompts=["a"])
    assert reads == ["step_00000400.md"]
    assert [step for step, _ in sections_of_reel(tmp_path)['"a"']] == [str(step) for step in range(0, 401, 20)]
