"""Sites that are programs of their own, beside the outer loop inside one program."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax.train.sites.programs import Programs
from tests.cases import place, step_for
from tests.step.test_outer import batches, outer_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked_annotations")]


class Sites:
    """Sites of one mesh, with what they send handed over in place of a hub."""

    def __init__(self, cfg, count):
        self.steps, self.tokens, self.number = [], [[] for _ in range(count)], 0
        rows = cfg.train.batch_sequences // count
        train = dataclasses.replace(cfg.train, batch_sequences=rows)
        mesh = dataclasses.replace(cfg.mesh, replica=1)
        for site in range(count):
            outer = dataclasses.replace(cfg.outer, hub="127.0.0.1:1", site=site, sites=count)
            own = dataclasses.replace(cfg, outer=outer, train=train, mesh=mesh)
            self.steps.append(step_for(own))
        self.programs = [Programs(step) for step in self.steps]
        self.states = [step.init() for step in self.steps]

    def round(self, batches, absent=(), spoil=None):
        """Each site's steps are its batches; absent ones do none. `spoil` is what a site sends."""
        every, part = self.programs[0].every, self.number % self.programs[0].every
        started = [
            p.start(s, np.int32(part)) for p, s in zip(self.programs, self.states, strict=True)
        ]
        here = [site for site in range(len(self.steps)) if site not in absent]
        sums = {tuple(np.asarray(total)) for _, total, _ in started}
        assert len(sums) == 1, "copies of outer weights differ"
        rows = [p.to_send(x) for p, (x, _, _) in zip(self.programs, started, strict=True)]
        if spoil is not None:
            rows[spoil] = {row: np.full_like(x, 255) for row, x in rows[spoil].items()}
        weights = {site: sum(self.tokens[site][-every:]) for site in here}
        for site, (step, own) in enumerate(zip(self.steps, batches, strict=True)):
            for batch in own if site in here else ():
                self.states[site], _ = step.step(self.states[site], place(step, batch))
            self.tokens[site].append(len(own) if site in here else 0)
        arrived = {row: np.stack([rows[site][row] for site in here]) for row in rows[0]}
        for site, (_, _, pending) in enumerate(started):
            found = self.programs[site].finish(self.states[site], pending, arrived, weights, part)
            self.states[site] = found
        self.number += 1

    def outer(self, site):
        state = self.states[site]
        return jax.tree.leaves((state.params, state.router_bias, state.momentum))


def shared_out(batch, count):
    rows = len(batch.token_BT) // count
    return [
        [jax.tree.map(lambda x, at=site * rows: x[at : at + rows], batch)] for site in range(count)
    ]


def assert_equal(one, other):
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("mesh", [(2, 1, 1, 1), (2, 2, 2, 1)], ids=str)
def test_two_programs_come_to_the_bits_of_one(mesh):
    cfg = outer_config(mesh, every=3, codec="int4+feedback")
    sites, data = Sites(cfg, 2), batches(cfg, 7)
    whole = step_for(cfg)
    state = whole.init()
    for batch in data:
        state, _ = whole.step(state, place(whole, batch))
        sites.round(shared_out(batch, 2))
    for site in range(2):
        wanted = (state.params, state.router_bias, state.momentum)
        assert_equal(sites.outer(site), jax.tree.leaves(wanted))
        own = jax.tree.map(lambda x, site=site: x[site], state.sites)
        got = jax.tree.map(lambda x: x[0], sites.states[site].sites)
        assert_equal(jax.tree.leaves(got), jax.tree.leaves(own))
