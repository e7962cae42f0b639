"""Any one host may vanish, and what the others hold is still the whole state."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moejax.train.memory.placement import Piece, neighbours, offsets_of, place


@st.composite
def clusters(draw):
    """Who holds which piece of some arrays, and the host of each process."""
    count = draw(st.integers(1, 6))
    hosts = [f"host-{draw(st.integers(0, 3))}" for _ in range(count)]
    holders, shapes = {}, {}
    for number in range(draw(st.integers(1, 4))):
        cuts = draw(st.lists(st.integers(1, 3), min_size=0, max_size=2))
        shard = tuple(draw(st.integers(1, 3)) for _ in cuts)
        shapes[f"{number}"] = tuple(a * b for a, b in zip(cuts, shard, strict=True))
        for at in product(*(range(cut) for cut in cuts)):
            start = tuple(a * b for a, b in zip(at, shard, strict=True))
            holding = draw(st.sets(st.integers(0, count - 1), min_size=1))
            holders[Piece(f"{number}", start, shard, "float32")] = frozenset(holding)
    return holders, shapes, hosts


def covered(pieces, shapes):
    """Whether pieces cover arrays, each number of each."""
    masks = {key: np.zeros(shape, bool) for key, shape in shapes.items()}
    for piece in pieces:
        cut = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
        masks[piece.key][cut] = True
    return all(mask.all() for mask in masks.values())


@given(clusters())
def test_any_host_may_vanish(cluster):
    holders, shapes, hosts = cluster
    shares, targets = place(holders, hosts), neighbours(hosts)
    held = {host: set() for host in hosts}
    for process, share in enumerate(shares):
        held[hosts[process]] |= set(share.pieces)
        if targets[process] is not None:
            held[hosts[targets[process]]] |= set(share.sent)
    assert covered(set().union(*held.values()), shapes)
    for gone in held if len(held) > 1 else ():
        left = set().union(*(pieces for host, pieces in held.items() if host != gone))
        assert covered(left, shapes), gone


@given(clusters())
def test_a_host_keeps_what_its_devices_hold_once_and_sends_what_no_other_has(cluster):
    holders, _, hosts = cluster
    shares, targets = place(holders, hosts), neighbours(hosts)
    for host in set(hosts):
        here = [n for n, name in enumerate(hosts) if name == host]
        kept = [piece for process in here for piece in shares[process].pieces]
        assert sorted(kept) == sorted(p for p, who in holders.items() if who & set(here))
        for process in here:
            for piece in shares[process].pieces:
                assert process in holders[piece]
                alone = {hosts[n] for n in holders[piece]} == {host} and len(set(hosts)) > 1
                assert (piece in shares[process].sent) == alone
        assert all(targets[n] is None or hosts[targets[n]] != host for n in here)


def test_processes_of_a_host_share_its_copies_evenly():
    everyone = frozenset(range(4))
    small = [Piece("w", (n,), (1,), "float32") for n in range(8)]
    shares = place(dict.fromkeys(small, everyone), ["a", "a", "b", "b"])
    assert [len(share.kept) for share in shares] == [4, 4, 4, 4]
    assert [share.sent for share in shares] == [()] * 4
    # Bytes are shared, not pieces: one piece of 32 bytes is as much as eight of 4.
    large = Piece("a", (0,), (8,), "float32")
    shares = place(dict.fromkeys([*small, large], frozenset({0, 1})), ["a", "a"])
    assert [list(share.kept) for share in shares] == [[large], small]


def test_processes_of_a_host_spread_over_those_of_the_next():
    assert neighbours(["a", "a", "b", "b", "c"]) == [2, 3, 4, 4, 0]
    assert neighbours(["a", "a"]) == [None, None]


def test_pieces_begin_at_multiples_of_64_bytes():
    pieces = [Piece("a", (), (), "int32"), Piece("b", (0,), (17,), "float32")]
    assert offsets_of(pieces) == ([0, 64], 192)
