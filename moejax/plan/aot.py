"""The former name `python -m moejax.plan.aot` of `python -m moejax.aot`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("moejax.aot", run_name="__main__")
