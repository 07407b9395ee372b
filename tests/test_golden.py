"""Losses of tiny runs against stored ones: a change that is to leave training alone leaves these alone.

Tolerances are for other machines and versions of torch; on one machine the losses are the same to the last bit.
"""

import functools
import shutil

import pytest
import torch

from driver import rows, session, words_of

BLOCK = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False, "qk_norm": True,
         "value_residual": True, "n_kv_head": 1, "tie_embeddings": False, "dropout": 0.1}
GOLDEN = {
    "gpt2-adamw": ({}, [5.75458, 5.71931, 5.62113, 5.53198, 5.44358, 5.3641, 5.28453, 5.20352, 5.11489, 5.02063,
                        4.93527, 4.8364]),
    "modern-muon": (BLOCK | {"optimizer": "muon"}, [5.77297, 5.73809, 5.69763, 5.60951, 5.51852, 5.43477, 5.3583,
                                                    5.28606, 5.20655, 5.13669, 5.06197, 4.97894]),
}


@pytest.fixture
def losses(tmp_path, data):
    """Runs and returns the loss of each step."""
    def run(name, **settings):
        code, text = session(words_of(tmp_path / name, data, eval_interval=0, **settings))
        assert code == 0, text
        return [row["loss"] for row in rows(tmp_path / name / "metrics.jsonl")]
    return run


@pytest.mark.parametrize("name", GOLDEN)
def test_losses_are_the_golden_ones(losses, name):
    settings, golden = GOLDEN[name]
    assert losses(name, **settings) == pytest.approx(golden, abs=1e-4)


def test_bfloat16_and_float16_follow_float32(losses):
    exact = losses("float32")
    for dtype in ("bfloat16", "float16"):
        assert losses(dtype, dtype=dtype) == pytest.approx(exact, abs=0.03)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="compiling needs a C++ compiler")
def test_a_compiled_run_has_the_losses_of_an_eager_one(losses, request):
    request.addfinalizer(torch.compiler.reset)  # what it has learnt of this model is not for other tests
    run = functools.partial(losses, max_steps=4, **BLOCK | {"dropout": 0.0})
    assert run("compiled", compile="on") == pytest.approx(run("eager"), abs=1e-4)
