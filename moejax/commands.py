"""The commands of `moejax`, in the order in which a user meets them."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command.

    Attributes:
      summary: one line for the list of commands.
      module: holds `main(argv)`, which returns the exit code; imported when the command is run.
      flags: the module that holds `parser()`, the parser of its flags; empty: the same.
    """

    summary: str
    module: str
    flags: str = ""

    @property
    def parser_module(self) -> str:
        """The module that holds `parser()`."""
        return self.flags or self.module


COMMANDS = {
    "train": Command("train a model", "moejax.train.__main__"),
    "report": Command("show the results of runs as a page", "moejax.report.command"),
    "goodput": Command("tell how a run spent its time", "moejax.report.goodput"),
    "prepare": Command(
        "turn text into token files", "moejax.data.prepare.command", "moejax.data.prepare.flags"
    ),
    "eval": Command("score held-out text with a checkpoint", "moejax.evaluate.command"),
    "generate": Command("continue texts with a checkpoint", "moejax.serve.command"),
    "serve": Command(
        "serve a checkpoint over HTTP (OpenAI-compatible API)", "moejax.serve.endpoint.command"
    ),
    "hf": Command(
        "import weights of Hugging Face's layout, and export them", "moejax.convert.command"
    ),
    "upcycle": Command("turn a dense model into experts", "moejax.convert.upcycle_command"),
    "plan": Command(
        "choose mesh, route and codecs; plan probe: measure links",
        "moejax.plan.__main__",
        "moejax.plan.command",
    ),
    "doctor": Command(
        "say which kernels run here, and why; --smoke, --mesh: checks",
        "moejax.doctor.command",
    ),
    "sites": Command("let runs at several sites average their weights", "moejax.train.sites.hub"),
    "aot": Command("compile the train step for a cluster that is not here", "moejax.aot.command"),
}
