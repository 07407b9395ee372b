# The first run: a small GPT on Python's own library sources, byte by byte, on 2 CPU cores, with no download.
out_dir = "out/quickstart"
data_dir = "data/stdlib"
prepare = "stdlib"  # builds data_dir at the first launch
prompts_file = "data/prompts_python.txt"

block_size = 128
n_layer = 4
n_head = 4
n_embd = 128
norm = "rmsnorm"
position = "rope"
mlp = "swiglu"
mlp_ratio = 2.667
bias = False
qk_norm = True

batch_size = 32
batch_tokens = 4096
max_steps = 1000
optimizer = "muon"
learning_rate = 4e-3
muon_learning_rate = 0.02
weight_decay = 0.05
schedule = "wsd"
warmup_steps = 50
decay_ratio = 0.5
min_lr_ratio = 0.0

eval_interval = 250
eval_tokens = 65536
sample_interval = 500
sample_tokens = 200
checkpoint_interval = 250
log_interval = 20
