from types import SimpleNamespace

from moejax.config.compression import build_compression
from moejax.config.schema import CompressionConfig
from moejax.runtime.watch import Watch
from moejax.train.codec_schedule import CodecSchedule


def test_each_stretch_of_steps_has_one_program_with_its_codecs():
    policy = build_compression(CompressionConfig(expert_gradient="none,int8@2,int4@5"))
    train_step = SimpleNamespace(
        spec=SimpleNamespace(compression=policy),
        at=lambda codecs: SimpleNamespace(step=codecs, abstract=None, abstract_batch=lambda: None),
    )
    compiled = []
    processes = SimpleNamespace(compile=lambda step, *_: compiled.append(step))
    schedule = CodecSchedule(train_step, processes, Watch())
    found = [schedule.step_for(step) for step in range(7)]
    names = ["None"] * 2 + ["int8"] * 3 + ["int4"] * 2
    assert [str(codecs.expert_gradient) for codecs, _ in found] == names
    assert [found[step][1] for step in (1, 2, 5)] == [
        *("none", "expert_gradient int8", "expert_gradient int4")
    ]
    assert len(compiled) == 3
