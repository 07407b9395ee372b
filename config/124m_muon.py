# The 124M shape with the modern block, Muon and a WSD schedule: fewer tokens to the same loss, and a horizon that can
# still be moved before the decay begins.
#   parameters   123,588,875 (no position table, no biases; SwiGLU of 2,048 costs what GELU of 3,072 does)
#   a step       524,288 tokens = 512 windows of 1,024 = 32 micro-batches of 16
#   the run      9,536 steps x 524,288 = 4,999,610,368 tokens, 40 tokens per parameter; it decays from step 5,722 on
# Expected: not measured here at this size. The published record with Muon reaches 3.28 on FineWeb after 1.7B tokens
# with these tricks and more (modded-nanogpt, track 3).
out_dir = "out/124m_muon"
data_dir = "data/fineweb_edu"

norm = "rmsnorm"
position = "rope"
mlp = "swiglu"
mlp_ratio = 2.667  # hidden 2,048
bias = False
qk_norm = True
value_residual = True

batch_size = 16
batch_tokens = 524288
max_tokens = 5_000_000_000

optimizer = "muon"
learning_rate = 3e-3  # AdamW's share: embedding and vectors
muon_learning_rate = 0.02
weight_decay = 0.1
schedule = "wsd"
warmup_steps = 250
decay_ratio = 0.4
min_lr_ratio = 0.0

eval_interval = 250
eval_tokens = 10_485_760
sample_interval = 1000
checkpoint_interval = 500
milestone_interval = 5000
log_interval = 10
