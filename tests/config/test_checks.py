"""Rules between settings: what fits together, what contradicts, what would have no effect."""

import subprocess
import sys

import pytest

from moejax.config.checks import check
from moejax.config.load import from_dict
from moejax.config.schema import Config
from moejax.errors import InputError
from tests.config.files import (
    assert_refused,
    assert_without_effect,
    cases,
    message_of,
    settings,
)

LATENT = "model.attention=latent model.kv_latent=16 model.rope_width=8"
SPARSE = f"{LATENT} model.attention=sparse model.q_latent=16"
YARN = "model.rope.scaling=yarn model.rope.factor=2"
FULL = "model.sliding_window=4 model.full_attention_every=2"
DELTA = "model.linear.form=gated_delta model.full_attention_every=2"
ALONE = "model.linear.form=mamba2 model.layer_attention=linear,none,full,none \
model.layer_mlps=none,experts,none,dense"
KIMI = "model.linear.form=kimi_delta model.full_attention_every=2 model.linear.value_heads=2"
# Large enough for a tensor axis of eight.
LARGE = (
    "model.width=64 model.num_heads=8 model.num_kv_heads=8 model.vocab_size=512 "
    "moe.expert_hidden=64 data.sequence_length=64 train.batch_sequences=64"
)


def test_the_defaults_pass():
    check(Config())


ACCEPTED = f"""
mesh.expert=4 mesh.tensor=2 mesh.simulated_devices=8
{DELTA} mesh.expert=2 mesh.tensor=2
{SPARSE} mesh.expert=2 mesh.tensor=2 model.indexer.keys=8 train.indexer_loss=1
{SPARSE} mesh.stage=2 train.micro_batches=2
{SPARSE} mesh.fsdp=2 mesh.context=2 mesh.context_stripe=8 train.indexer_loss=1
{ALONE} mesh.fsdp=2 mesh.context=2 mesh.context_stripe=4
{KIMI} mesh.expert=2 mesh.tensor=2 model.positions=none
{ALONE} mesh.expert=2 mesh.tensor=2 model.positions=none model.activation=relu2 moe.latent=32
{ALONE} model.linear.convolution_bias=true model.linear.least_step=0.01
model.layer_attention=full,none,full,none model.layer_mlps=none,dense,none,dense \
model.moe_every=none
mesh.replica=none mesh.expert=2 mesh.simulated_devices=8
mesh.expert=2 mesh.tensor=2 mesh.expert_weights=folded
mesh.tensor=2 mesh.activations=replicated
model.moe_every=none model.mlp_hidden=64 mesh.fsdp=4 mesh.tensor=2
model.moe_every=2 model.mlp_hidden=64
model.first_dense_layers=3 model.mlp_hidden=64
moe.router.num_groups=8 moe.router.groups_per_token=2
moe.router.num_groups=4 moe.router.score=sigmoid
moe.router.bias_update_rate=0.001 moe.router.balance_over=sequence
moe.router.quantile_bins=1000 moe.router.score=sigmoid
moe.router.forced=balanced moe.router.num_groups=4 moe.router.bias_update_rate=0.001
model.activation=clamped_swiglu model.activation_limit=5
model.block_norm=both moe.num_shared_experts=1 moe.own_norms=true moe.expert_scale=true
{FULL} model.full_attention.num_kv_heads=4 model.full_attention.turned_channels=8
{FULL} model.positions=window model.rope.theta=5
{FULL} model.attention_sinks=true model.full_attention.sinks=false model.value_width=16
model.rope.query_growth=0.1 model.rope.trained_length=64
moe.shared_gate=true moe.num_shared_experts=1
model.predict_ahead=1 train.predict_ahead_loss=0.1
model.rope.scaling=linear model.rope.factor=2
model.rope.scaling=llama3 model.rope.factor=2 model.rope.trained_length=64
{YARN} model.rope.beta_fast=16
{YARN} model.rope.truncate=false model.rope.attention_factor=1.1
optimizer.name=muon optimizer.muon_momentum=0.9
data.source=tokens data.train_files=a.bin model.vocab_size=100
data.source=array_record data.train_files=a data.eval_files=b
optimizer.warmup_steps=200
optimizer.warmup_steps=0.5 train.num_steps=3
profile.start_step=198 profile.num_steps=3
train.seed=4294967295
train.micro_batches=4 mesh.fsdp=8
train.micro_batches=4 mesh.stage=4 mesh.schedule=combined_1f1b
{LATENT}
{LATENT} model.q_latent=24 model.value_width=48 model.num_heads=3
{LATENT} model.sliding_window=4 model.full_attention_every=4
{LATENT} {YARN} model.rope.mscale=1 model.rope.mscale_all_dim=0
model.rope_width=8 model.head_width=33
model.rope_width=32
model.attention_sinks=true model.attention_output_bias=true
lora.rank=8 lora.alpha=16 lora.targets=attention.*
plan.mode=auto route_chunks=4
plan.mode=auto route_chunks_backward=2
plan.mode=auto route_trim=true
plan.mode=auto mesh.gather_dense=step
plan.mode=auto mesh.expert_weights=folded
plan.mode=auto mesh.stage_keeps=input
plan.mode=auto mesh.stage=2
data.source=tokens data.train_files=a train.eval_every=none
mesh.expert=2 plan.seconds=none
moe.experts_per_token=1 moe.router.renormalize=false
moe.experts_per_token=1 lora.rank=2
moe.num_experts=1 moe.experts_per_token=1 moe.router.renormalize=false moe.router.score=sigmoid
moe.experts_per_token=1 lora.rank=2 lora.targets=attention.*,moe.w_in
model.sliding_window=1 model.attention_sinks=true
model.sliding_window=2 data.sequence_length=2
mesh.stage=2 train.micro_batches=4
mesh.replica=2 outer.every=16 outer.codec=int8+feedback compression.block=64
plan.mode=auto plan.sites=true outer.every=8
plan.mode=auto plan.sites=true outer.rate=0.5
plan.mode=auto mesh.replica=2 outer.every=8
plan.mode=hand outer.every=1 outer.codec=none outer.momentum=0
plan.mode=hand outer.every=1 outer.hub=[::1]:8470 outer.site=1 outer.sites=2
"""


@pytest.mark.parametrize("words", ACCEPTED.strip().splitlines())
def test_settings_that_fit_together_pass(words):
    """A setting may switch off what is off, and a plan may choose a setting that is not given."""
    check(settings(words))


SIGMOID = "moe.router.num_groups=8 moe.router.groups_per_token=2 moe.router.score=sigmoid"
SHARED = "mesh.expert_weights=folded moe.expert_hidden=60 moe.num_shared_experts=1"
REFUSED = f"""
model.num_heads=3 -> `model.num_heads` = 3 ... `model.num_kv_heads` = 2 ... Choose 1, 3
model.head_width=33 -> `model.head_width` = 33 is odd ... 32 or 34
model.first_dense_layers=4 -> `model.first_dense_layers` = 4 ... none of 4 ... moe_every=none
model.moe_every=5 -> `model.moe_every` = 5 ... at most ... = 4
model.moe_every=3 model.first_dense_layers=2 -> `model.moe_every` = 3 ... = 2
model.layer_mlps=dense,experts -> has 2 entries for 4 layers
model.layer_mlps=dense,dense,dense,dense -> names no block with experts
model.layer_mlps=dense,experts,dense,experts model.moe_every=none -> `model.moe_every` is none
model.layer_attention=full,full,full,full model.sliding_window=9 -> leaves no block its window
model.layer_attention=full,linear,full,linear model.sliding_window=9 -> has 2 blocks ... is none
model.linear.form=gated_delta model.layer_attention=full,window,full,window \
model.sliding_window=9 -> has 0 blocks
{DELTA} model.sliding_window=9 -> `model.sliding_window` = 9 is of no block
{DELTA} model.linear.key_heads=3 -> `model.linear.value_heads` = 4 ... Choose 1, 2, 4
{DELTA} mesh.tensor=4 model.num_kv_heads=4 -> `model.linear.key_heads` = 2 ... `mesh.tensor` = 4
{DELTA} model.linear.convolution=9 mesh.fsdp=2 mesh.context=2 mesh.context_stripe=4 -> \
sees 8 positions back, and `mesh.context_stripe` is 4 ... at least 8
{DELTA} mesh.stage=2 train.micro_batches=2 mesh.stage_slices=2 -> from slice to slice
model.layer_attention=full,none,full,none model.layer_mlps=none,dense,none,dense \
model.moe_every=none mesh.stage=2 train.micro_batches=2 mesh.stage_slices=2 -> has none, and
{ALONE} model.predict_ahead=1 -> `model.predict_ahead` has a block like the last one
{ALONE} model.predict_ahead=1 model.ahead_block=window,experts -> has a window, and `model.sl
model.ahead_block=dense,full -> `model.ahead_block` is dense,full. It is attention
model.ahead_block=full -> `model.ahead_block` is full. It is attention
model.predict_ahead=1 model.ahead_block=linear,experts -> `model.linear.form` is none
model.moe_every=none model.predict_ahead=1 model.ahead_block=full,experts -> and no layer has
{ALONE} moe.latent=33 mesh.expert=2 -> `moe.latent` = 33 ... 32 or 34
{DELTA} model.linear.least_step=0.1 -> has no effect: only `model.linear.form` mamba2
{ALONE} mesh.tensor=4 model.num_kv_heads=4 -> `model.linear.key_heads` = 2 ... `mesh.tensor` = 4
model.layer_attention=none,full,full,full model.layer_mlps=none,experts,dense,dense -> both have
model.layer_mlps=dense,none,dense,dense -> names no block with experts
model.linear.form=kimi_delta -> `model.linear.key_heads` = 2 and ... = 4 differ
{KIMI} model.linear.value_width=33 mesh.expert=2 -> `model.linear.value_width` = 33 ... 32 or 34
model.positions=none model.rope.theta=5 -> has no effect: `model.positions` is none
model.positions=none model.rope_width=4 -> `model.rope_width` = 4 has no effect ... nothing rotates
model.linear.form=gated_delta mesh.stage=2 train.micro_batches=2 model.predict_ahead=1 -> \
has a block of linear attention
{FULL} model.full_attention.num_kv_heads=3 -> \
is not a multiple of `model.full_attention.num_kv_heads` = 3. Choose 1, 2, 4
{FULL} model.full_attention.num_kv_heads=2 mesh.tensor=4 model.num_kv_heads=4 -> \
`model.full_attention.num_kv_heads` = 2 ... `mesh.tensor` = 4
{FULL} model.full_attention.head_width=15 -> `model.head_width` = 15 is odd
{FULL} model.full_attention.turned_channels=34 -> turned_channels` = 34 ... at most the 32
{FULL} model.full_attention.keys_are_values=true model.value_width=16 -> \
`model.value_width` = 16 is not the 32 channels of a key
{FULL} model.full_attention.turned_channels=7 -> turned_channels` = 7 must be even
{FULL} model.full_attention.turned_channels=8 model.rope_width=8 -> rotate as a whole
moe.own_norms=true moe.num_shared_experts=1 -> `moe.own_norms` is for shared experts
moe.own_norms=true model.block_norm=both -> `moe.own_norms` is for shared experts
model.zero_centered_norms=true model.qk_norm=full -> `model.zero_centered_norms` is true
model.linear.key_heads=4 -> `model.linear.key_heads` = 4 has no effect
model.rope.scaling=llama3 model.rope.factor=2 model.rope.low_frequency_factor=4 -> \
low_frequency_factor` = 4.0 must be below ... high_frequency_factor` = 4.0
{YARN} model.rope.beta_slow=40 -> `model.rope.beta_slow` = 40.0 must not be above ... = 32.0
{YARN} model.rope.theta=1 -> `model.rope.theta` = 1.0 ... must be above 1
{YARN} model.rope.mscale=1 -> `model.rope.mscale_all_dim` is None ... Set both
{YARN} model.rope.mscale=1 model.rope.mscale_all_dim=1 model.rope.attention_factor=1.2 -> \
`model.rope.attention_factor` = 1.2 ... `model.rope.mscale` = 1.0
model.attention=latent -> `model.kv_latent` is none ... which needs it
{LATENT} model.rope_width=none -> `model.rope_width` is none ... is latent
{LATENT} model.rope_width=32 -> `model.rope_width` = 32 leaves none of `model.head_width` = 32
{LATENT} mesh.fsdp=3 model.width=129 train.batch_sequences=3 -> \
`model.kv_latent` = 16 ... = 3 x 1 = 3 ... 15 or 18 for model.kv_latent
{SPARSE} model.q_latent=none -> `model.q_latent` is none ... is sparse
{SPARSE} model.kv_latent=none -> `model.kv_latent` is none ... is sparse, which needs it
{SPARSE} model.sliding_window=8 -> `model.sliding_window` is 8 ... among all earlier keys
{SPARSE} model.indexer.width=6 -> `model.rope_width` = 8 is more than `model.indexer.width` = 6
{SPARSE} mesh.stage=2 train.micro_batches=2 mesh.stage_slices=2 -> `model.attention` is sparse, and
{SPARSE} mesh.stage=2 train.micro_batches=2 model.predict_ahead=1 -> a block of sparse attention
{SPARSE} mesh.stage=2 train.micro_batches=2 train.indexer_loss=1 -> do not add the indexers' loss
model.rope_width=7 -> `model.rope_width` = 7 is odd ... 6 or 8
model.rope_width=34 -> `model.rope_width` = 34 ... `model.head_width` = 32
model.sliding_window=4 model.full_attention_every=5 -> \
`model.full_attention_every` = 5 ... each of 4 blocks
model.vocab_size=256 -> `model.vocab_size` = 256 ... 257
data.source=tokens -> `data.train_files` is empty ... `data.source` is tokens
run_dir= -> `run_dir` has '' ... not empty
run_dir=a\0b -> `run_dir` has 'a\\x00b' ... null byte
checkpoint.init_from= -> `checkpoint.init_from` has ''
data.source=tokens data.train_files=a, -> `data.train_files` has ''
optimizer.warmup_steps=201 -> `optimizer.warmup_steps` = 201 ... `train.num_steps` = 200
optimizer.warmup_steps=1.5 -> `optimizer.warmup_steps` = 1.5 is neither whole nor below 1
profile.start_step=199 profile.num_steps=3 -> `profile.start_step` = 199 ... end after
optimizer.beta2=1 -> `optimizer.beta2` = 1.0 must be below 1
optimizer.name=muon optimizer.muon_momentum=1 -> must be below 1
train.seed=4294967296 -> `train.seed` = 4294967296 ... 32 bits
moe.experts_per_token=9 -> `moe.experts_per_token` = 9 ... `moe.num_experts` = 8
moe.router.quantile_bins=100 moe.router.bias_update_rate=0.1 -> \
`moe.router.quantile_bins` = 100 and `moe.router.bias_update_rate` = 0.1 both set
moe.router.quantile_bins=100 moe.router.num_groups=4 -> `moe.router.num_groups` is 4
moe.router.quantile_bins=100 moe.experts_per_token=8 -> every token visits all 8 experts
moe.router.num_groups=3 -> = 8 is not a multiple ... = 3 ... 1, 2, 4, 8 groups
moe.router.num_groups=2 moe.router.groups_per_token=3 -> \
`moe.router.groups_per_token` = 3 ... `moe.router.num_groups` = 2
moe.router.num_groups=4 moe.experts_per_token=3 -> = 3 ... the 2 experts that a token can reach
{SIGMOID} -> one expert in a group ... at most 4 groups
moe.num_experts=6 mesh.expert=8 -> \
6 experts on an expert axis of 8: choose 1, 2, 3, 6 or change moe.num_experts
mesh.expert=8 mesh.tensor=2 mesh.expert_weights=folded -> \
8 experts on an expert x tensor axis (folded) of 16: choose 1, 2, 4, 8
route=duplicate mesh.expert=2 -> `route` = duplicate ... `mesh.tensor` is 1 ... Choose split
route=duplicate mesh.tensor=2 mesh.expert_weights=whole -> `mesh.expert_weights` is whole
moe.experts_per_token=1 -> `moe.experts_per_token` = 1 ... router no gradient
moe.experts_per_token=1 model.first_dense_layers=1 lora.rank=2 lora.targets=groups.1.* -> \
`moe.experts_per_token` = 1 ... renormalize=false
moe.num_experts=1 moe.experts_per_token=1 moe.router.renormalize=false -> \
`moe.num_experts` = 1 makes ... moe_every=none
model.sliding_window=1 -> `model.sliding_window` = 1 ... itself alone
data.sequence_length=1 -> `data.sequence_length` = 1 ... itself alone
route=two_level_merge mesh.expert=4 moe.experts_per_token=1 -> is 1 ... Choose two_level.
mesh.tensor=3 -> `model.num_heads` = 4 ... `mesh.tensor` = 3 ... 3 or 6 here
{LARGE} model.num_kv_heads=2 mesh.tensor=4 -> `model.num_kv_heads` = 2 ... axis of 1, 2,
{LARGE} model.vocab_size=511 mesh.tensor=8 -> `model.vocab_size` = 511
{LARGE} data.sequence_length=60 mesh.tensor=8 -> `data.sequence_length` = 60
{LARGE} moe.expert_hidden=60 mesh.tensor=8 -> `moe.expert_hidden` = 60
{LARGE} model.moe_every=2 model.mlp_hidden=60 mesh.tensor=8 -> `model.mlp_hidden` = 60
{LARGE} {SHARED} mesh.tensor=8 -> moe.num_shared_experts x moe.expert_hidden` = 60
model.width=100 mesh.fsdp=4 mesh.expert=2 -> `model.width` = 100 ... = 4 x 2 = 8 ... 96 or 104
train.batch_sequences=12 mesh.replica=2 mesh.fsdp=2 mesh.expert=2 -> \
`train.batch_sequences` = 12 ... not divisible by 8 ... 8 or 16
train.batch_sequences=12 mesh.replica=none train.micro_batches=5 -> micro_batches 5 ... 10 or 15
train.batch_sequences=2 train.micro_batches=4 -> `train.batch_sequences` = 2 ... Choose 4.
mesh.expert=4 mesh.tensor=4 {LARGE} mesh.simulated_devices=8 -> \
mesh replica=1 x fsdp=1 x expert=4 x tensor=4 needs 16 devices, found 8 (cpu) ... \
1, 2, 4, 8 ... mesh.simulated_devices=16
mesh.replica=none mesh.simulated_devices=8 train.batch_sequences=12 -> by 8 = mesh.replica 8
memory.experts=host model.scan_layers=false -> `model.scan_layers` is false ... scan_layers=true
memory.experts=host mesh.fsdp=2 mesh.gather_across=step -> `mesh.gather_across` is step
memory.experts=host mesh.fsdp=2 mesh.nodes=2 compression=hybrid compression.start_layer=1 -> \
`compression.start_layer` is 1, which cuts their layers
memory.experts=host model.moe_every=none -> has no effect ... no block has experts
memory.residuals=host -> `model.remat` is none ... token_collectives, attention, experts
memory.residuals=host model.remat=dots -> `model.remat` is dots
lora.rank=4 optimizer.name=muon -> `optimizer.name` is muon ... `lora.rank` is 4
"""


@pytest.mark.parametrize(("words", "said"), cases(REFUSED))
def test_settings_that_contradict_each_other_are_refused(words, said):
    assert_refused(words, said)


STAGES = "mesh.stage=2 train.micro_batches=4"
NOT_SHARED = """
mesh.stage=8 -> `mesh.stage` = 8 does not divide the last 4 equal layers ... 1, 2
model.moe_every=2 mesh.stage=4 -> does not divide the last 2 equal layers of 2 blocks
train.micro_batches=1 -> `train.micro_batches` = 1 ... `mesh.stage` = 2 ... Choose 2
data.sequence_length=129 -> `data.sequence_length` = 129 ... mesh.stage = 2
compression.preset=hybrid compression.start_layer=1 -> \
`compression.start_layer` is 1, and `mesh.stage` is 2
model.num_layers=7 mesh.stage=4 train.micro_batches=8 -> \
Choose 1, 7, or set model.layers_before_stages=3
model.layers_before_stages=1 model.moe_every=2 -> does not fit 4 layers ... a multiple of 2
model.layers_before_stages=4 -> `model.layers_before_stages` = 4 does not fit
model.stage_chunks=3 -> `model.stage_chunks` = 3 does not divide the last 4 ... 1, 2
model.stage_chunks=4 -> the last 1 equal layers of each of 4 chunks (`model.stage_chunks`)
model.stage_chunks=2 mesh.schedule=combined_1f1b -> \
`model.stage_chunks` is 2 and `mesh.schedule` is combined_1f1b
mesh.stage_slices=3 -> = 256 ... mesh.stage x mesh.stage_slices = 6
mesh.stage_slices=2 mesh.schedule=combined_1f1b -> combined_1f1b, and `mesh.stage_slices` is 2
mesh.stage_slices=2 mesh.stage_keeps=input -> is input, and `mesh.stage_slices` is 2
mesh.stage_slices=2 model.stage_chunks=2 -> is 2, and `mesh.stage_slices` is 2
mesh.stage_slices=2 moe.router.balance_over=sequence -> sequence, and `mesh.stage_slices` is 2
memory.experts=host -> `mesh.stage` is 2, and stages gather ... memory.experts=device
memory.residuals=host mesh.stage_keeps=input -> is host, and `mesh.stage_keeps` is input
mesh.stage_slices=2 model.predict_ahead=1 -> `model.predict_ahead` is 1, and `mesh.stage_slices`
model.width=130 mesh.fsdp=4 -> `model.width` = 130 ... 2 x 4 x 1 = 8
"""


@pytest.mark.parametrize(("words", "said"), cases(NOT_SHARED))
def test_what_stages_cannot_share_is_refused(words, said):
    assert_refused(f"{STAGES} {words}", said)


SHARED = "mesh.expert=4 mesh.context=4 mesh.context_stripe=16"
NOT_CUT = f"""
mesh.context=8 -> `mesh.context` = 8 does not divide mesh.fsdp x mesh.expert = 4 ... 1, 2, 4
mesh.context=2 mesh.simulated_devices=4 -> `mesh.context` = 2 is no product ... one of 1, 4
mesh.context_stripe=20 -> `data.sequence_length` = 256 ... mesh.context_stripe = 160 ... 160
{LARGE} mesh.context_stripe=8 mesh.tensor=8 mesh.stage=4 train.micro_batches=4 -> \
`mesh.context` = 4 leaves 16 of 64 positions ... mesh.tensor x mesh.stage = 32
train.batch_sequences=7 mesh.fsdp=2 -> 7 is not divisible by 2 = ... / mesh.context 4 x
{STAGES} mesh.stage_slices=2 -> `mesh.stage_slices` is 2 and `mesh.context` is 4
{STAGES} model.predict_ahead=1 -> `model.predict_ahead` with `mesh.stage` = 2
{LATENT} mesh.context_exchange=ring -> `mesh.context_exchange` is ring ... latent
"""


@pytest.mark.parametrize(("words", "said"), cases(NOT_CUT))
def test_what_devices_cannot_share_is_refused(words, said):
    assert_refused(f"{SHARED} {words}", said)


APART = """
mesh.stage=2 train.micro_batches=2 -> `mesh.stage` is 2, and `outer.every` is 4 ... mesh.stage=1
lora.rank=8 -> `lora.rank` is 8, and `outer.every` is 4 ... lora.rank=none
memory.optimizer=host -> `memory.optimizer` is host, and `outer.every` is 4
memory.experts=host -> `memory.experts` is host, and `outer.every` is 4
outer.codec=loco -> `outer.codec` is `loco` ... none or one of bfloat16, int8
outer.codec=int4+stochastic -> `outer.codec` is `int4+stochastic` ... may have +feedback
outer.hub=somewhere -> `outer.hub` is somewhere ... must be HOST:PORT
outer.hub=here:70000 -> `outer.hub` is here:70000 ... must be HOST:PORT
outer.hub=here:1 outer.site=2 outer.sites=2 -> `outer.site` = 2, and `outer.sites` is 2
outer.hub=here:1 outer.order=all -> `outer.order` is all, and `outer.hub` is set
"""


@pytest.mark.parametrize(("words", "said"), cases(APART))
def test_what_sites_cannot_have_is_refused(words, said):
    assert_refused(f"mesh.replica=2 outer.every=4 {words}", said)


def test_a_planner_chooses_sites_only_where_it_is_asked_to():
    said = "the planner would choose the number of sites ... plan.sites=true"
    assert_refused("plan.mode=auto outer.every=4", said)
    assert_refused("plan.mode=auto plan.sites=true outer.codec=loco", "`outer.codec` is `loco`")


TWO_STAGES = "mesh.stage=2 mesh.fsdp=2 train.micro_batches=2"
WITHOUT_EFFECT = f"""
model.moe_every=none moe.num_experts=4 -> moe.num_experts: `model.moe_every` is none
model.moe_every=none moe.router.z_loss=0.1 -> moe.router.z_loss: no block has experts
model.moe_every=none moe.expert_bias=true -> moe.expert_bias: no block has experts
model.moe_every=none mesh.expert=2 -> mesh.expert: is none
model.moe_every=none mesh.expert_weights=folded mesh.tensor=2 -> mesh.expert_weights: is none
model.moe_every=none model.first_dense_layers=1 -> model.first_dense_layers: is none
model.moe_every=none route=merge -> route: no block has experts
model.mlp_hidden=64 -> model.mlp_hidden: every block has experts
mesh.expert_weights=folded -> mesh.expert_weights: `mesh.tensor` is 1
mesh.activations=replicated -> mesh.activations: `mesh.tensor` is 1
route_chunks=2 -> route_chunks: nothing is exchanged
route_chunks_backward=2 -> route_chunks_backward: nothing is exchanged
route_trim=true -> route_trim: nothing is exchanged
compression.block=64 -> compression.block: `compression` is none
compression.start_layer=1 -> compression.start_layer: `compression` is none
plan.mode=hand plan.topology=h200:2 -> plan.topology: the planner is off
plan.mode=hand plan.routing=zipf:1 -> plan.routing: the planner is off
plan.mode=hand plan.documents=0.5 -> plan.documents: the planner is off
plan.mode=hand plan.codecs=hybrid -> plan.codecs: the planner is off
plan.mode=hand plan.traces=3 -> plan.traces: the planner is off
plan.mode=hand plan.seconds=3 -> plan.seconds: the planner is off
plan.mode=hand plan.replan=true -> plan.replan: the planner is off
plan.mode=hand plan.sites=true -> plan.sites: the planner is off
moe.router.groups_per_token=2 -> moe.router.groups_per_token: `moe.router.num_groups` is 1
moe.router.forced=balanced plan.mode=auto plan.routing=zipf:1 -> \
plan.routing: `moe.router.forced` is balanced
model.activation_limit=5 -> model.activation_limit: clamped_swiglu
moe.shared_gate=true -> moe.shared_gate: `moe.num_shared_experts` is 0
moe.shared_hidden=7 -> moe.shared_hidden: `moe.num_shared_experts` is 0
model.layer_mlps=dense,experts,dense,experts model.first_dense_layers=1 -> \
model.first_dense_layers: `model.layer_mlps`
model.layer_attention=window,full,window,full -> model.layer_attention: `model.sliding_window`
model.full_attention.theta=5 -> model.full_attention.theta: no block has a window
model.full_attention.head_width=16 model.sliding_window=3 -> \
model.full_attention.head_width: or all have
model.positions=window -> model.positions: no block has a window, or all have
{LATENT} {FULL} model.positions=window -> model.positions: `model.attention` is latent
{FULL} model.positions=window model.full_attention.theta=5 -> \
model.full_attention.theta: `model.positions` is window
model.full_attention_every=2 -> model.full_attention_every: `model.sliding_window` is none
model.predict_ahead=1 data.sequence_length=1 -> model.predict_ahead: `data.sequence_length` is 1
train.predict_ahead_loss=0.1 -> train.predict_ahead_loss: predict_ahead` is 0
train.indexer_loss=0.1 -> train.indexer_loss: `model.attention` is not sparse
{LATENT} model.indexer.keys=8 -> model.indexer.keys: `model.attention` is not sparse
model.rope.factor=2 -> model.rope.factor: linear or llama3 or yarn
model.rope.scaling=yarn -> model.rope.scaling: `model.rope.factor` is 1
model.rope.scaling=linear model.rope.factor=2 model.rope.trained_length=2 -> \
model.rope.trained_length: only `model.rope.scaling` llama3 or yarn and `model.rope.query_growth`
{YARN} model.rope.low_frequency_factor=2 -> model.rope.low_frequency_factor: only
{YARN} model.rope.high_frequency_factor=2 -> model.rope.high_frequency_factor: only
model.rope.beta_fast=2 -> model.rope.beta_fast: only `model.rope.scaling` yarn
model.rope.beta_slow=2 -> model.rope.beta_slow: only `model.rope.scaling` yarn
model.rope.truncate=false -> model.rope.truncate: only `model.rope.scaling` yarn
model.rope.attention_factor=2 -> model.rope.attention_factor: only `model.rope.scaling` yarn
model.rope.mscale=2 -> model.rope.mscale: only `model.rope.scaling` yarn
model.rope.mscale_all_dim=2 -> model.rope.mscale_all_dim: only `model.rope.scaling` yarn
model.kv_latent=16 -> model.kv_latent: `model.attention` is not latent
model.q_latent=16 -> model.q_latent: is not latent
model.full_attention.sinks=false model.sliding_window=3 model.full_attention_every=2 -> \
model.full_attention.sinks: `model.attention_sinks` is false
{LATENT} model.num_kv_heads=4 -> model.num_kv_heads: `model.attention` is latent
{LATENT} model.value_norm=true -> model.value_norm: `model.attention` is latent
{LATENT} model.qk_norm=head -> model.qk_norm: `model.attention` is latent
{LATENT} model.attention_bias=true -> model.attention_bias: `model.attention` is latent
{LATENT} model.attention_output_bias=true -> model.attention_output_bias: is latent
{LATENT} model.attention_sinks=true -> model.attention_sinks: `model.attention` is latent
optimizer.muon_momentum=0.9 -> optimizer.muon_momentum: is not muon
optimizer.muon_learning_rate=1 -> optimizer.muon_learning_rate: is not muon
optimizer.schedule=constant optimizer.final_fraction=0.2 -> optimizer.final_fraction: constant
train.rollbacks=3 train.max_skipped=none -> train.rollbacks: so no run goes back
train.on_spike=roll_back train.spike_threshold=none -> train.on_spike: threshold` is none
train.on_spike=roll_back train.rollbacks=0 -> train.on_spike: or `train.rollbacks` is 0
train.sample_tokens=0 train.sample_prompt=x -> train.sample_prompt: `train.sample_tokens` is 0
data.train_files=a -> data.train_files: `data.source` is stdlib
data.eval_files=a -> data.eval_files: `data.source` is stdlib
data.source=tokens data.train_files=a train.eval_batches=2 -> \
train.eval_batches: `data.eval_files` is empty
mesh.schedule=combined_1f1b -> mesh.schedule: `mesh.stage` is 1
mesh.context_stripe=8 -> mesh.context_stripe: `mesh.context` is 1
mesh.context_exchange=ring -> mesh.context_exchange: `mesh.context` is 1
{TWO_STAGES} mesh.gather_dense=step -> mesh.gather_dense: all weights are gathered once a step
{TWO_STAGES} mesh.gather_across=step -> mesh.gather_across: weights are gathered once a step
mesh.fsdp=8 mesh.gather_across=passes model.remat=collectives -> \
mesh.gather_across: keeps gathered weights
mesh.platform=gpu mesh.simulated_devices=8 -> mesh.simulated_devices: only CPU devices
lora.alpha=8 -> lora.alpha: `lora.rank` is none
lora.targets=moe.w_in -> lora.targets: `lora.rank` is none
lora.base_dtype=bfloat16 -> lora.base_dtype: `lora.rank` is none
lora.rank=4 mesh.nodes=2 compression.dense_gradient=int8 -> \
compression.dense_gradient: gradients of adapters are not compressed
lora.rank=4 compression=hybrid compression.start_layer=1 -> compression.start_layer: of adapters
mesh.replica=2 outer.codec=none -> outer.codec: `outer.every` is none
mesh.replica=2 outer.rate=1 -> outer.rate: `outer.every` is none
mesh.replica=2 outer.hub=here:1 -> outer.hub: `outer.every` is none
mesh.replica=2 outer.every=4 outer.sites=2 -> outer.sites: `outer.hub` is none
mesh.replica=2 outer.every=4 outer.codec=none compression.block=64 -> \
compression.block: so is the codec of an outer loop
"""


@pytest.mark.parametrize(("words", "said"), cases(WITHOUT_EFFECT))
def test_a_setting_without_effect_is_refused(words, said):
    assert_without_effect(words, said)


def test_a_name_to_keep_that_no_plan_chooses_is_refused():
    with pytest.raises(InputError, match=r"`plan.keep` has `model.width`, which no plan chooses"):
        check(settings("plan=auto plan.keep=model.width"))


def test_reading_and_checking_a_config_does_not_import_jax():
    code = (
        "import sys; from moejax.config.checks import check;"
        "from moejax.config.load import from_dict;"
        "check(from_dict({})); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("words", ["moe.experts_per_token=1", "data.sequence_length=1"])
def test_weights_that_are_not_trained_need_no_gradient(words):
    """Imported and saved models are evaluated, and compute the same as before."""
    check(settings(words), trained=False)


def test_blanks_are_no_path():
    assert "`run_dir` has ' '" in message_of(check, from_dict({"run_dir": " "}))
