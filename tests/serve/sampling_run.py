"""A run that samples from itself, as a program of several processes or of one.

Each process writes what it got to `PROCESS.json` in the run directory.
"""

import json
import sys
from pathlib import Path

import moejax


def main() -> None:
    """Trains by the config that the command line names."""
    seen = []

    def look(run):
        engine = run.engine()
        rule = moejax.Sampling(temperature=1.0, seed=run.step)
        drawn = engine.sample(["doc", [7, 8, 9]], tokens=4, sampling=rule, n=2, routing=True)
        seen.append(
            {
                "step": run.step,
                "ids": [one.ids for one in drawn],
                "experts": [one.expert_TLK.tolist() for one in drawn],
                "logprobs": [one.logprobs for one in drawn],
                "score": engine.score([[7, 8, 9]])[0].tolist(),
                "logits": engine.logits([7, 8, 9]).tolist(),
            }
        )

    _, path, *overrides = sys.argv[1:]  # --config PATH
    overrides = [word.removeprefix("--config.") for word in overrides]
    run = moejax.run_training(path, overrides, quiet=True, on_step=look, every=2)
    read = moejax.Engine(run.run_dir, processes=run.processes)
    engines = {"after": moejax.Engine(run), "read": read}
    seen.append({name: engine.logits([7, 8, 9]).tolist() for name, engine in engines.items()})
    (Path(run.run_dir) / f"{run.processes.index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
