"""The models of the papers, as settings of a config."""

from typing import Any

BFLOAT16: dict[str, Any] = {"model.dtype": "bfloat16", "train.gradient_dtype": "bfloat16"}
# Two experts beside attention of a 70 B model; as many of its 80 layers as 16 devices of 80 GB hold
# with float32 masters and moments.
TWO_70B = BFLOAT16 | {
    "model.vocab_size": 32768,
    "model.width": 8192,
    "model.num_layers": 16,
    "model.num_heads": 64,
    "model.num_kv_heads": 8,
    "model.head_width": 128,
    "moe.num_experts": 2,
    "moe.experts_per_token": 1,
    "moe.router.renormalize": False,  # else no loss reaches the router
    "moe.expert_hidden": 28672,
    "data.sequence_length": 8192,
    "train.batch_sequences": 16,
}
# Lina's Transformer-XL of 12 layers: the 302 M parameters between its 4 and its 16 experts make an
# expert of 2 x 512 x 2,048, here about 3 x 512 x 1,360; the rest is attention and few characters.
LINA: dict[str, Any] = {
    "model.vocab_size": 512,
    "model.width": 512,
    "model.num_layers": 12,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_width": 64,
    "moe.experts_per_token": 2,
    "moe.expert_hidden": 1360,
    "data.sequence_length": 512,
    "mesh.tensor": 1,
}
LINA_SEQUENCES = 10  # a device's: the all-to-alls of 16 devices then take what its Table 1 says
# Its Table 1 for 4 experts on 4 devices, under DeepSpeed: seconds of a step, and of the all-to-alls
# of 12 layers, two forward and two backward.
LINA_STEP, LINA_EXCHANGES = 0.706, 0.259
NEOX_20B = BFLOAT16 | {
    "model.vocab_size": 50432,
    "model.width": 6144,
    "model.num_layers": 44,
    "model.num_heads": 64,
    "model.num_kv_heads": 64,
    "model.head_width": 96,
    "model.moe_every": None,
    "model.mlp_hidden": 16384,  # three matrices in place of two of 24,576
    "model.tie_embeddings": False,
    "data.sequence_length": 2048,
    "train.batch_sequences": 384,
}
OLMOE = BFLOAT16 | {
    "model.vocab_size": 50304,
    "model.width": 2048,
    "model.num_layers": 16,
    "model.num_heads": 16,
    "model.num_kv_heads": 16,
    "model.head_width": 128,
    "moe.num_experts": 64,
    "moe.experts_per_token": 8,
    "moe.expert_hidden": 1024,
    "data.sequence_length": 4096,
    "train.batch_sequences": 512,
}
FEW_TOKENS = OLMOE | {"train.batch_sequences": 16}
