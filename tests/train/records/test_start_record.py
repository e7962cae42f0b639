import json

from moejax.train.records.start_record import highest_peak


def facts(device="cpu", dtype="float32"):
    config = {"model": {"dtype": dtype}}
    return {"device": device, "devices": 1, "processes": 1, "config": config}


def test_a_peak_is_the_highest_of_the_starts_on_the_same_devices(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert highest_peak(log, facts(), 5.0) == 5.0, "a first start"
    starts = [
        facts(),  # written before peaks were recorded
        {**facts(), "peak_flops_per_second": 7.0},
        {**facts(), "peak_flops_per_second": 6.0},
        {**facts("H100"), "peak_flops_per_second": 900.0},
        {**facts(dtype="bfloat16"), "peak_flops_per_second": 800.0},
    ]
    lines = [{"event": "start", "step": 0, **start} for start in starts]
    lines.insert(1, {"event": "step", "step": 1, "loss": 2.0})
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert highest_peak(log, facts(), 5.0) == 7.0
    assert highest_peak(log, facts(), 8.0) == 8.0
