"""Where `python -m moejax.plan.aot` was; it is `python -m moejax.aot` now."""

import runpy

if __name__ == "__main__":
    runpy.run_module("moejax.aot", run_name="__main__")
