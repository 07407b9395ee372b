# 1B parameters at context 4,096 on 8 H200 (or B200) that may be taken away.
#   parameters   1,071,209,491: embedding 32,768 x 2,048 = 67,108,864 (tied); 20 blocks of 50,200,576 =
#                attention 16,777,216 + SwiGLU 3 x 2,048 x 5,440 = 33,423,360; norms, gains, value mixes 89,107
#   a step       1,048,576 tokens = 256 windows of 4,096 = 64 micro-batches of 4; 8 ranks do 8 each, 7 ranks 9 or 10
#   the run      120,000 steps x 1,048,576 = 125,829,120,000 tokens, 117 a parameter; it decays from step 96,000 on
#   a checkpoint 8.8 GB: weights, Muon's one average per matrix, AdamW's two for the rest
# The horizon may still be moved before step 96,000 (and before the new horizon's decay): --max_steps=80000.
# Launch: torchrun --standalone --nproc_per_node=8 train.py config/1b_8xh200.py
# Expected: not measured here.
out_dir = "out/1b"
data_dir = "data/web_32k"  # prepared with a tokenizer of 32,768 ids
vocab_size = 32768

block_size = 4096
n_layer = 20
n_embd = 2048
n_head = 16
norm = "rmsnorm"
norm_eps = 1e-6
position = "rope"
rope_theta = 500000.0
mlp = "swiglu"
mlp_ratio = 2.667
bias = False
qk_norm = True
value_residual = True

batch_size = 4
batch_tokens = 1_048_576
loss_chunk_tokens = 8192  # 1 GB of float32 logits at a time
max_steps = 120_000

optimizer = "muon"
muon_learning_rate = 0.02
learning_rate = 6e-4
weight_decay = 0.1
schedule = "wsd"
warmup_steps = 2000
decay_ratio = 0.2
min_lr_ratio = 0.1  # to a tenth

eval_interval = 1000
eval_tokens = 8_388_608
sample_interval = 2000
checkpoint_interval = 400
milestone_interval = 5000
log_interval = 10
