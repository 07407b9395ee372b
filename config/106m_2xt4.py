# 106M parameters on 1B tokens on the two T4s of a free notebook, 30 GPU hours a week: several sessions, one run.
#   parameters   106,194,240: embedding 49,152 x 576 = 28,311,552 (tied); 22 blocks of 3,540,096 =
#                attention 884,736 + SwiGLU 2,654,208 + norms 1,152; final norm 576
#   a step       262,144 tokens = 256 windows of 1,024 = 32 micro-batches of 8; each T4 does 16
#   the run      3,814 steps x 262,144 = 999,817,216 tokens, 9.4 tokens per parameter; it decays from step 3,051 on
#   time         at the 12,977 tokens/s published for such a run: 21.4 hours of both cards
# float16 with loss scaling, because a T4 only emulates bfloat16 (dtype = 'auto' would pick the same).
# Launch, on an empty disk each time: torchrun --standalone --nproc_per_node=2 train.py config/106m_2xt4.py \
#   --session_minutes=690 --hub_repo=owner/name
# Expected: not measured here. A tokenizer of 49,152 ids makes losses that other vocabularies cannot be compared with;
# compare bits per byte.
out_dir = "out/106m_2xt4"
data_dir = "data/web_49k"  # prepared with a tokenizer of 49,152 ids
vocab_size = 49152

n_layer = 22
n_embd = 576
n_head = 9
n_kv_head = 3
mlp = "swiglu"
mlp_hidden = 1536
norm = "rmsnorm"
position = "rope"
bias = False
tie_embeddings = True

dtype = "float16"
batch_size = 8
batch_tokens = 262144
loss_chunk_tokens = 2048  # 400 MB of float32 logits at a time, not 1.6 GB
max_steps = 3814

optimizer = "adamw"
learning_rate = 6e-4
weight_decay = 0.1
schedule = "wsd"
warmup_steps = 100
decay_ratio = 0.2
min_lr_ratio = 0.0  # to zero

eval_interval = 127
eval_tokens = 1_048_576
sample_interval = 381
checkpoint_interval = 127  # 30 saves, about 43 minutes apart
log_interval = 10
