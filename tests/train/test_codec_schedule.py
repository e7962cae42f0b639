from types import SimpleNamespace

import numpy as np
import pytest

from moejax.config.compression import build_compression
from moejax.config.schema import CompressionConfig
from moejax.runtime.watch import Watch
from moejax.train.codec_schedule import CodecSchedule


@pytest.mark.parametrize("every", [1, 3])
def test_a_strength_is_read_after_the_step_that_measured_it(every):
    """Step s leaves the strength s % 2; only steps that measure are asked, and waited for."""
    cfg = CompressionConfig(expert_gradient="adaptive:0.9:int8|int4", adapt_every=every)
    policy = build_compression(cfg)
    train_step = SimpleNamespace(
        spec=SimpleNamespace(compression=policy),
        at=lambda codecs: SimpleNamespace(step=codecs, abstract=None, abstract_batch=lambda: None),
    )
    compiled = []
    processes = SimpleNamespace(compile=lambda step, *_: compiled.append(step))
    schedule = CodecSchedule(train_step, processes, Watch())
    strength = 0
    for step in range(8):
        levels = np.array([0, (step - 1) % 2])  # left by the step before
        state = SimpleNamespace(reduction=SimpleNamespace(levels=levels))
        chosen, _ = schedule.step_for(step, state)
        if step == 0 or (step - 1) % every == 0:
            strength = int(levels[1])
        assert chosen == policy.at(step, (0, strength))
        assert chosen.expert_gradient.measures == (step % every == 0)
    assert len(compiled) == len(set(compiled)) == (2 if every == 1 else 4)
