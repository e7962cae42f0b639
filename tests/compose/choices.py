"""Experts that tokens get whatever their scores: recorded ones, and those in turn.

Both are arrays [B, T, L, K] for the oracle, which takes them in place of a choice. A step gets the
recorded ones alone: it forces the others by itself.

Letters: B sequences, T positions, L expert layers, K experts of a token, C devices that share
sequences, R devices (or groups of C) with rows of their own.
"""

import numpy as np

from moejax.config.schema import Config, MeshConfig
from moejax.moe.router import choose_in_turn
from moejax.step.state import Batch


def recorded(cfg: Config, batch: Batch) -> Batch:
    """Returns the batch with any experts for two thirds of its tokens; the others choose."""
    rng, E = np.random.default_rng(1), cfg.moe.num_experts
    shape = (*batch.token_BT.shape, cfg.model.expert_layers, E)
    order = rng.permuted(np.broadcast_to(np.arange(E, dtype=np.int32), shape), axis=-1)
    expert_BTLK = order[..., : cfg.moe.experts_per_token].copy()
    expert_BTLK[rng.random(batch.token_BT.shape) < 1 / 3] = -1
    return batch._replace(expert_BTLK=expert_BTLK)


def in_turn(cfg: Config, batch: Batch, *, replicated: bool) -> Batch:
    """Returns the batch with the experts of `moe.router.forced`, of the module ahead too.

    Args:
      replicated: whether each tensor rank routes the tokens of all of them.
    """
    mlps, stages = cfg.model.mlps, cfg.mesh.stage
    leading = cfg.model.first_dense_layers + cfg.model.layers_before_stages
    whole = token_numbers(cfg, replicated=replicated)
    of_slices = token_numbers(cfg, replicated=replicated, slices=cfg.mesh.stage_slices)
    layers = [whole if n < leading else of_slices for n, m in enumerate(mlps) if m == "experts"]
    if cfg.model.predict_ahead:
        layers.append(token_numbers(cfg, replicated=replicated, shares=stages))
    number_BTL, moe = np.stack(layers, axis=2), cfg.moe
    E, K = moe.num_experts, moe.experts_per_token
    experts = choose_in_turn(0, number_BTL.max() + 1, E, moe.router, k=K)
    return batch._replace(expert_BTLK=np.asarray(experts)[number_BTL])


def token_numbers(cfg: Config, *, replicated: bool, slices: int = 1, shares: int = 1) -> np.ndarray:
    """Returns the number of each token among those that a layer routes at a time, [B, T].

    It goes on over devices, tensor ranks innermost.

    Args:
      slices: parts of a sequence that are routed one after the other.
      shares: stages that each route a share of a sequence.
    """
    mesh, T = cfg.mesh, cfg.data.sequence_length
    number_BT = np.full((cfg.train.batch_sequences, T), -1)
    C, ranks = mesh.context, 1 if replicated else mesh.tensor
    for rows_RB in micro_batch_rows(cfg).reshape(cfg.train.micro_batches, row_ranks(mesh), -1):
        for rank, row_B in enumerate(rows_RB):
            for c in range(C):
                for part in _parts(_positions(mesh, c, T), mesh, slices, shares):
                    for place, position_T in enumerate(np.split(part, ranks)):
                        count = len(row_B) * len(position_T)
                        first = ((rank * C + c) * ranks + place) * count
                        own = np.arange(first, first + count).reshape(len(row_B), -1)
                        number_BT[np.ix_(row_B, position_T)] = own
    return number_BT


def _positions(mesh: MeshConfig, device: int, length: int) -> np.ndarray:
    """Positions of one of the devices that share a sequence: of 2 C stripes two, from both ends."""
    if mesh.context == 1:
        return np.arange(length)
    stripes = np.arange(length).reshape(-1, 2 * mesh.context, mesh.context_stripe)
    return stripes[:, [device, 2 * mesh.context - 1 - device]].reshape(-1)


def _parts(position_T: np.ndarray, mesh: MeshConfig, slices: int, shares: int) -> list[np.ndarray]:
    """The positions that are routed at a time."""
    if shares == 1:
        return np.split(position_T, slices)
    parts = mesh.tensor if mesh.activations == "sequence" else 1
    by_share = position_T.reshape(parts, shares, -1)
    return [by_share[:, share].reshape(-1) for share in range(shares)]


def row_ranks(mesh: MeshConfig) -> int:
    """Number of devices with rows of their own inside a stage."""
    return (mesh.replica or 1) * mesh.fsdp * mesh.expert // mesh.context


def micro_batch_rows(cfg: Config) -> np.ndarray:
    """Returns the rows of the batch that each micro-batch has, [micro-batches, rows].

    Devices have equal parts of the batch, stages outermost. A micro-batch takes as many rows of
    each device; a stage feeds its own, one after the other.
    """
    mesh, count = cfg.mesh, cfg.train.micro_batches
    rows = np.arange(cfg.train.batch_sequences)
    by_device = rows.reshape(mesh.stage, row_ranks(mesh), count // mesh.stage, -1)
    return by_device.swapaxes(1, 2).reshape(count, -1)
