# The first run: a small GPT on the Python standard library's own sources, byte by byte, on 2 CPU cores.
#   parameters   836,736: embedding and head 320 x 128 each (257 ids, padded); 4 blocks of 188,416; norms 1,152
#   a step       4,096 tokens = 32 windows of 128 = 2 micro-batches of 16, so that 2 ranks can share it
#   the run      900 steps x 4,096 = 3,686,400 tokens, 0.32 passes; it decays from step 450 on
# Expected: about 1.22 nats per byte after 4 minutes; README.md has the figures of bench/quickstart.py.
# Layer norm rather than RMSNorm: PyTorch has one fused kernel for it on CPU, and none for the other.
out_dir = "out/quickstart"
data_dir = "data/stdlib"
prepare = "stdlib"  # builds data_dir at the first launch
prompts_file = "data/prompts_python.txt"
probes_file = "data/probes_python.jsonl"

block_size = 128
n_layer = 4
n_head = 4
n_embd = 128
position = "rope"
mlp = "swiglu"
mlp_ratio = 2.667
bias = False
tie_embeddings = False

batch_size = 16
batch_tokens = 4096
max_steps = 900
optimizer = "muon"
learning_rate = 4e-3
muon_learning_rate = 0.02
weight_decay = 0.05
schedule = "wsd"
warmup_steps = 50
decay_ratio = 0.5
min_lr_ratio = 0.0

eval_interval = 300
eval_tokens = 65536
sample_interval = 300
sample_tokens = 200
checkpoint_interval = 150
log_interval = 20
