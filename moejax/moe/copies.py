"""Copies of hot experts on other devices, planned from the experts' load.

Each device that owns experts has `moe.slots` further places. Slot j of a device holds a copy of one
expert of one other device, always the same: its weights come by one fixed permutation of devices,
and their gradients return by its inverse and are added to the owner's. Which of that device's
experts it is, and how many of its tokens go to the copy, are arrays: nothing recompiles. Any such
arrays give the same outputs, but for the order of sums.

Router, balance and drops count experts. Only the exchange sees places: e + r of each device, its
own experts first.

Letters: N tokens, K choices a token, E experts, P devices that own experts (in mesh order), e
experts of each, r slots of each; R rings of M devices, G candidates.
"""

import dataclasses
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Int
from moejax.comm import wire
from moejax.config.schema import MoEConfig
from moejax.kernels.experts.expert_weights import ExpertWeights
from moejax.kernels.kept import PLACES
from moejax.layout.layout import Axes, Layout
from moejax.moe.router import count_load

SHARES = 256  # a copy takes a number of 256 tokens
CANDIDATES = 32  # target loads that are tried for a ring
STRIDE = 157  # odd, about 0.61 of 256: neighbouring tokens take shares far apart

Way = tuple[Axes, int]  # along which mesh axes, and how many devices on


class Copies(NamedTuple):
    """Which expert of each device has a copy in slot j of the device after it in ring j.

    Integers, the same on every device of an exchange.
    """

    expert_Pr: Any  # its number on device p, below e
    quota_Pr: Any  # how many of SHARES of its tokens go to the copy; 0: none


def rings(layout: Layout, slots: int) -> list[np.ndarray]:
    """Returns the rings of each slot, [R, M]: a device sends to the next, the last to the first.

    Offsets inside a node and across nodes take turns, as long as there are any.
    """
    axes = layout.expert_owner_axes
    between = layout.between_nodes(axes)
    device_SF = np.arange(layout.size(axes)).reshape(layout.size(between), -1)
    return [
        _cycles(np.roll(device_SF, -step, int(along != between)).reshape(-1))
        for along, step in offsets(layout, slots)
    ]


def offsets(layout: Layout, slots: int) -> list[Way]:
    """Returns along which mesh axes each slot's weights travel, and how many devices on.

    Raises:
      ValueError: if there are fewer than slots.
    """
    axes = layout.expert_owner_axes
    both = layout.inside_node(axes), layout.between_nodes(axes)
    steps = range(1, layout.size(axes))
    found = [(along, step) for step in steps for along in both if step < layout.size(along)]
    if slots > len(found):
        raise ValueError(f"{slots} slots for {len(found)} offsets: checks refuse it")
    return found[:slots]


def _cycles(next_P: np.ndarray) -> np.ndarray:
    """Returns the cycles of a permutation whose cycles have one length."""
    found, seen = [], set()
    for first in range(len(next_P)):
        cycle, device = [], first
        while device not in seen:
            seen.add(device)
            cycle.append(device)
            device = int(next_P[device])
        found += [cycle] if cycle else []
    return np.array(found)


def plan_copies(
    load_E: Any, rings_r: list[np.ndarray], xp: ModuleType = jnp, expert_Pr: Any = None
) -> Copies:
    """Plans slot after slot: the hottest expert of each device, and how much of it moves on.

    Integers alone, so that all devices plan the same.

    Args:
      load_E: int32, at most 2**22 in all: see `scaled`.
      xp: `jax.numpy` in a program, `numpy` beside it.
      expert_Pr: experts that have copies already; None: the hottest are chosen.
    """
    P = rings_r[0].size
    load_Pe = load_E.reshape(P, -1)
    rest_Pe, total_P, plan = load_Pe, xp.sum(load_Pe, axis=1, dtype=xp.int32), []
    for left, ring_RM in zip(range(len(rings_r), 0, -1), rings_r, strict=True):
        hot_P = xp.argmax(rest_Pe, axis=1) if expert_Pr is None else expert_Pr[:, len(plan)]
        is_hot_Pe = hot_P[:, None] == xp.arange(load_Pe.shape[1])
        whole_P, room_P = (
            xp.sum(xp.where(is_hot_Pe, x, 0), axis=1, dtype=xp.int32) for x in (load_Pe, rest_Pe)
        )
        if left > 1:  # later slots take their share of a busy device
            room_P = xp.minimum(room_P, total_P // (left + 1) + 1)
        back_P = np.argsort(ring_RM.reshape(-1))
        wanted_P = _flows(total_P[ring_RM], room_P[ring_RM], xp).reshape(-1)[back_P]
        quota_P = wanted_P * SHARES // xp.maximum(1, whole_P)
        sent_P = whole_P * quota_P // SHARES
        before_P = np.roll(ring_RM, 1, axis=1).reshape(-1)[back_P]
        total_P = total_P - sent_P + sent_P[before_P]
        rest_Pe = rest_Pe - xp.where(is_hot_Pe, sent_P[:, None], 0)
        plan.append((hot_P, quota_P))
    return Copies(*(xp.stack(x, axis=1).astype(xp.int32) for x in zip(*plan, strict=True)))


def _flows(load_RM: Any, room_RM: Any, xp: ModuleType) -> Any:
    """Returns how much each device of a ring sends to the next, so that the fullest has least.

    For a target load T a device sends what it has and gets above T, at most its room:
    max(0, load - T + what it gets), which around a ring is a difference of sums and their minimum.
    """
    M = load_RM.shape[1]
    mean_R, top_R = xp.sum(load_RM, axis=1) // M + 1, xp.max(load_RM, axis=1)
    step_R = -(-xp.maximum(0, top_R - mean_R) // (CANDIDATES - 1))
    target_GR = mean_R + step_R * xp.arange(CANDIDATES)[:, None]
    above_GRM = load_RM - target_GR[:, :, None]
    sums = xp.cumsum(xp.concatenate([above_GRM, above_GRM], axis=2), axis=2)
    least = np.minimum.accumulate(sums, 2) if xp is np else jax.lax.cummin(sums, axis=2)
    flow_GRM = xp.minimum((sums - xp.minimum(0, least))[:, :, M:], room_RM)
    fullest_GR = xp.max(load_RM - flow_GRM + xp.roll(flow_GRM, 1, axis=2), axis=2)
    best_R = xp.argmin(fullest_GR, axis=0)
    return xp.take_along_axis(flow_GRM, best_R[None, :, None], axis=0)[0]


def scaled(load_E: Any, xp: ModuleType = jnp) -> Any:
    """Returns a load for `plan_copies`, which keeps proportions."""
    return load_E // (xp.sum(load_E, dtype=xp.int32) // 2**22 + 1)


def place_shares(share_E: np.ndarray, copies: Copies, rings_r: list[np.ndarray]) -> np.ndarray:
    """Returns the share of choices that each place gets, [P * (e + r)]; NumPy."""
    P, r = copies.quota_Pr.shape
    places = np.concatenate([share_E.reshape(P, -1), np.zeros((P, r))], axis=1)
    for j, ring_RM in enumerate(rings_r):
        device_P, next_P = ring_RM.reshape(-1), np.roll(ring_RM, -1, axis=1).reshape(-1)
        expert_P = copies.expert_Pr[device_P, j]
        sent_P = share_E.reshape(P, -1)[device_P, expert_P] * copies.quota_Pr[device_P, j] / SHARES
        places[device_P, expert_P] -= sent_P
        places[next_P, places.shape[1] - r + j] += sent_P
    return places.reshape(-1)


def copy_hot(
    load_E: Int[Array, " E"], weights: ExpertWeights, moe: MoEConfig, layout: Layout
) -> tuple[Copies, ExpertWeights]:
    """Plans copies for a load. Returns the plan, and the weights of all places of this device.

    Wire: a permutation of one expert's weights for each slot.

    Args:
      weights: of this device's experts, gathered.
    """
    plan = plan_copies(scaled(load_E), rings(layout, moe.slots))
    copies = Copies(*(checkpoint_name(x, PLACES) for x in plan))
    here_r = copies.expert_Pr[wire.index(layout.expert_owner_axes)]
    ways = tuple(offsets(layout, moe.slots))
    return copies, jax.tree.map(lambda x_e: _with_copies(x_e, here_r, ways), weights)


def shared_anew(copies: Copies, load_E: Int[Array, " E"], moe: MoEConfig, layout: Layout) -> Copies:
    """Returns copies of the same experts, with quotas for another load."""
    return plan_copies(scaled(load_E), rings(layout, moe.slots), expert_Pr=copies.expert_Pr)


def load_of(expert_NK: Int[Array, "N K"], num_experts: int, layout: Layout) -> Int[Array, " E"]:
    """Returns the load of the devices that exchange with this one. Wire: the load, summed."""
    axes = layout.expert + layout.tensor
    return wire.all_reduce(count_load(expert_NK, num_experts), axes, tag=None)


def spread(
    expert_NK: Int[Array, "N K"], copies: Copies, moe: MoEConfig, layout: Layout
) -> tuple[Int[Array, "N K"], MoEConfig]:
    """Returns the places of choices, and a config that has places for experts.

    Args:
      expert_NK: choices; `moe.num_experts`: dropped.
    """
    places = num_places(moe, layout)
    placement = placement_of(copies, rings(layout, moe.slots), moe.num_experts)
    place_NK = place_of(expert_NK, placement, places=places)
    return place_NK, of_places(moe, places)


def of_places(moe: MoEConfig, places: int) -> MoEConfig:
    """Returns a config that has places for experts.

    A capacity stays an expert's: each place may get as many rows, and buckets hold all places.
    """
    capacity = moe.capacity_factor
    if capacity is not None:
        capacity *= places / moe.num_experts
    return dataclasses.replace(moe, num_experts=places, capacity_factor=capacity)


def num_places(moe: MoEConfig, layout: Layout) -> int:
    """Returns the number of places of all devices."""
    return moe.num_experts + layout.size(layout.expert_owner_axes) * moe.slots


def by_table(
    expert_NK: Int[Array, "N K"], table_2EC: Int[Array, "2 E C"], moe: MoEConfig, layout: Layout
) -> tuple[Int[Array, "N K"], MoEConfig]:
    """Returns the places of choices by any table, and the config that counts places. Per device.

    Devices begin with other shares, so that a token on each, as in decoding, goes to every place.

    Args:
      expert_NK: choices; `moe.num_experts`: dropped.
      table_2EC: a `Placement`.
    """
    places, first = num_places(moe, layout), SHARES // layout.size(layout.expert)
    share_N = wire.index(layout.expert) * first + jnp.arange(len(expert_NK)) * STRIDE
    options = {"places": places, "share_N": share_N % SHARES}
    place_NK = place_of(expert_NK, Placement(*table_2EC), **options)
    return place_NK, dataclasses.replace(moe, num_experts=places)


class Placement(NamedTuple):
    """The places of each expert's weights, C of them; arrays."""

    place_EC: Any
    upto_EC: Any  # of SHARES tokens those from the previous number up to this one go there


def placement_of(copies: Copies, rings_r: list[np.ndarray], num_experts: int) -> Placement:
    """Returns where choices go by a plan: to copies by quota, in order of slots; the rest home."""
    P, r = copies.quota_Pr.shape
    e = num_experts // P
    owner_E, own_E = np.divmod(np.arange(num_experts), e)
    places, upto = [], [jnp.zeros((num_experts,), jnp.int32)]
    for j, ring_RM in enumerate(rings_r):
        next_P = np.roll(ring_RM, -1, axis=1).reshape(-1)[np.argsort(ring_RM.reshape(-1))]
        has_copy_E = copies.expert_Pr[owner_E, j] == own_E
        upto.append(upto[-1] + jnp.where(has_copy_E, copies.quota_Pr[owner_E, j], 0))
        places.append(next_P[owner_E] * (e + r) + e + j)
    place_EC = np.stack([*places, owner_E * (e + r) + own_E], axis=1).astype(np.int32)
    return Placement(place_EC, jnp.stack([*upto[1:], jnp.full_like(upto[0], SHARES)], axis=1))


def place_of(
    expert_NK: Int[Array, "N K"],
    placement: Placement,
    *,
    places: int,
    share_N: Int[Array, " N"] | None = None,
) -> Int[Array, "N K"]:
    """Returns the place of each choice; `places` for dropped choices.

    Args:
      share_N: share of each token, below SHARES; None: by its number.
    """
    place_EC, upto_EC = map(jnp.asarray, placement)
    share_N = jnp.arange(len(expert_NK)) * STRIDE % SHARES if share_N is None else share_N
    share_N11 = share_N[:, None, None]
    is_dropped_NK = expert_NK >= len(place_EC)
    expert_NK = jnp.where(is_dropped_NK, 0, expert_NK)
    number_NK1 = jnp.sum(share_N11 >= upto_EC[expert_NK, :-1], axis=2, keepdims=True)
    place_NK = jnp.take_along_axis(place_EC[expert_NK], number_NK1, axis=2)[..., 0]
    return jnp.where(is_dropped_NK, places, place_NK)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _with_copies(x_e: jax.Array, here_r: jax.Array, ways: tuple[Way, ...]) -> jax.Array:
    """Appends to this device's arrays those that others send it; gradients go back to them."""
    sent = [_passed(x_e[here_r[j]], along, step) for j, (along, step) in enumerate(ways)]
    # Where remat keeps weights it keeps these alone, and puts them beside the others again.
    return jnp.concatenate([x_e, checkpoint_name(jnp.stack(sent), wire.WEIGHT_WIRE)])


def _passed(x: jax.Array, along: Axes, step: int) -> jax.Array:
    n = wire.size(along)
    return wire.ppermute(x, along, [(device, (device + step) % n) for device in range(n)])


def _with_copies_forward(x_e, here_r, ways):  # type: ignore[no-untyped-def]
    return _with_copies(x_e, here_r, ways), here_r


def _with_copies_backward(ways, here_r, dy):  # type: ignore[no-untyped-def]
    dx_e, copied_r = jnp.split(dy, [len(dy) - len(ways)])
    for j, (along, step) in enumerate(ways):
        dx_e = dx_e.at[here_r[j]].add(_passed(copied_r[j], along, -step))
    return dx_e, None


_with_copies.defvjp(_with_copies_forward, _with_copies_backward)
