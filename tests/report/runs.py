"""Run directories as a run leaves them, without a run."""

import json
import math
from pathlib import Path

HOSTILE = '</script><script>alert(1)</script><!--<b> & {{DATA}} \u2028 "'
CONFIG = {
    "run_dir": "runs/a",
    "train": {"num_steps": 1000, "batch_sequences": 16},
    "data": {"sequence_length": 128},
    "model": {"width": 64},
    "mesh": {"replica": None, "fsdp": 2, "expert": 4},
}
PLAN = {
    "topology": "emulated",
    "settings": {"mesh.expert": 4},
    "predicted": {"seconds": 0.5, "terms": {"experts": 0.3, "waiting for dispatch": 0.2}},
}
TRAFFIC = [
    {
        "class": "dispatch",
        "kind": "all_to_all",
        "axes": ["expert"],
        "between_nodes": True,
        "calls": 16,
        "bytes": 3 << 20,
    }
]
STARTED = {
    "devices": 8, "device": "cpu", "parameters": 2_345_678, "jax": "0.12.0", "traffic": TRAFFIC,
}  # fmt: skip


def line(event: str, step: int, **values) -> dict:
    """A line of `metrics.jsonl`, a second a step."""
    return {"time": 1.7e9 + step, "event": event, "step": step, **values}


def report_line(step: int, loss: float, **values) -> dict:
    """What a run reports of a step."""
    known = {
        "loss": loss,
        "tokens_per_second": 4000.0 + 10 * math.sin(step),
        "share_of_peak": 0.4,
        "balance": 1.1,
        "busiest_expert": 1.5,
        "dropped": [0, 1],
        "rounds": [2, 0],
        "gradient_norm": 1.0 + 1.0 / (1 + step),
        "learning_rate": 1e-3,
        "skipped": 0,
    }
    return line("step", step, **known | values)


def events_of_start(begin: float, first: int, last: int, **end) -> list[dict]:
    """What a process writes in one start: a second a step, told every fifty, a save with each."""
    known = [{"time": begin, "event": "begin", "step": 0}]
    for stage, seconds in (("start", 2), ("compile", 8)):
        begin += seconds
        known.append(
            {"time": begin, "event": "stage", "step": 0, "stage": stage, "seconds": seconds}
        )
    for step in range(first, last, 50):
        begin += 50
        told = {"first": step, "step": step + 49, "step_s": 49, "input_s": 0.5}
        known.append({"time": begin, "event": "steps", **told})
        saved = {"step": step + 49, "stage": "save", "seconds": 0.5}
        known.append({"time": begin, "event": "stage", **saved})
    return known + ([{"time": begin + 1, "step": last, **end}] if end else [])


def write_events(folder: Path, *processes: list[dict]) -> Path:
    """Writes the log of each process."""
    (folder / "events").mkdir(parents=True, exist_ok=True)
    for number, events in enumerate(processes):
        _write_lines(folder / "events" / f"{number}.jsonl", events)
    return folder


def write_run(
    folder: Path, lines: list[dict], *, loads: list[dict] | None = None, plan: bool = False
) -> Path:
    """Writes a run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / "metrics.jsonl", lines)
    if loads is not None:
        _write_lines(folder / "experts.jsonl", loads)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if plan:
        (folder / "plan.json").write_text(json.dumps(PLAN))
        (folder / "plan.html").write_text("<p>the planner's page</p>")
    return folder


def _write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


def usual_run(folder: Path, *, steps: int = 500, every: int = 10) -> Path:
    """Writes a run that was stopped once and resumed with another setting, on a plan.

    Process 1 is killed then, and process 0 names it.
    """
    half = steps // 2
    changed = CONFIG | {"model": {"width": 32}}
    first = [
        line("start", 0, config=changed, **STARTED),
        line("note", 0, text=f"warning: {HOSTILE}"),
        line("plan", 0, seconds=0.5),
        line("first_step", 1, loss=5.0),
    ]
    again_lines = [
        line("stopped", half),
        line("start", half, config=CONFIG, **STARTED),
        line("first_step", half + 1, loss=2.0),
    ]
    lines, loads = list(first), []
    for step in range(every, steps + 1, every):
        if step - every < half <= step:
            lines += again_lines
        lines.append(report_line(step, 5 / (1 + step / 100) + 0.1 * math.sin(step)))
        lines.append(line("predicted", step, ratio=1.1))
        if step % (10 * every) == 0:
            lines.append(line("eval", step, nats_per_token=2.0 + 50 / step, bits_per_byte=3.0))
            lines.append(line("saved", step))
        if step % (5 * every) == 0:
            busy = [[10 + (step + e) % 7 for e in range(16)] for _ in range(4)]
            loads.append(line("load", step, load=busy))
    lines.append(line("final_eval", steps, nats_per_token=2.0, bits_per_byte=2.9))
    hang = {"event": "hang", "text": f"process 1 is behind: it is in {HOSTILE}."}
    begin, again = 1.7e9, 1.7e9 + half + 60
    told, killed = events_of_start(begin, 1, half, **hang), events_of_start(begin, 1, half)
    second = events_of_start(again, half - 99, steps, event="end")
    write_events(folder, told + second, killed + second)
    # The second start does a hundred steps again, of which metrics here do not tell.
    late, resumed = again + 10 + 100 - begin - half, lines.index(again_lines[1])
    lines[resumed:] = [one | {"time": one["time"] + late} for one in lines[resumed:]]
    return write_run(folder, lines, loads=loads, plan=True)
