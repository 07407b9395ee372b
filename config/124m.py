# GPT-2 124M on 10B tokens of FineWeb-Edu.
#   parameters   124,475,904: tables 50,304 x 768 (50,257 ids, padded) + 1,024 x 768; 12 blocks and a norm 85,056,000
#   a step       524,288 tokens = 512 windows of 1,024 = 32 micro-batches of 16; 8 ranks do 4 each, 1 rank does 32
#   the run      19,073 steps x 524,288 = 9,999,745,024 tokens, 80 tokens per parameter
# Data: python data/prepare.py import edu_fineweb_*.bin --out data/fineweb_edu     (GPT-2 shards, linked in place)
# Expected, from what others published for this shape, not measured here: validation loss about 3.28 on FineWeb at 10B
# tokens (llm.c, modded-nanogpt record 1); FineWeb-Edu text is easier.
out_dir = "out/124m"
data_dir = "data/fineweb_edu"

batch_size = 16  # windows in a forward; 64 fits 80 GB, 4 with activation_checkpointing fits 8 GB
batch_tokens = 524288
max_tokens = 10_000_000_000

optimizer = "adamw"
learning_rate = 6e-4
weight_decay = 0.1
schedule = "cosine"
warmup_steps = 715  # 375M tokens
min_lr_ratio = 0.1  # to a tenth

eval_interval = 250
eval_tokens = 10_485_760  # 20 steps' worth
sample_interval = 1000
checkpoint_interval = 500
milestone_interval = 5000
log_interval = 10
