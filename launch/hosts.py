"""The hosts that `launch/ssh` starts processes on: how they are named, reached and checked."""

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import relay

# A name, an IPv4 or an IPv6 address, maybe with the user before it. None begins with a dash.
HOST = re.compile(
    r"(?:[A-Za-z_][\w.-]*@)?(?:[A-Za-z0-9][A-Za-z0-9._-]*|[0-9A-Fa-f]*:[0-9A-Fa-f:]+)"
)
OPTION = re.compile(r"[A-Za-z]+=[^\n]+")
# Never ask for a password, and notice within a minute that a host is gone.
ALWAYS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=4")
CHECK_SECONDS = 60  # Python starts slowly from a busy shared file system
AT_ONCE = 32
NO_DIRECTORY, NO_PROGRAM, NO_PYTHON = 91, 92, 93  # exit codes of SCRIPT
# Becomes the host's Python, with what follows as its arguments: $3, which runs the command, if that
# is there, else the one on the PATH. $1 is the directory, $2 the command's program.
SCRIPT = f"""cd -- "$1" || exit {NO_DIRECTORY}
command -v -- "$2" >/dev/null || exit {NO_PROGRAM}
for python in "$3" python3 python; do
    command -v -- "$python" >/dev/null || continue
    shift 3
    exec "$python" "$@"
done
exit {NO_PYTHON}"""


class BadHostsError(Exception):
    """An error in the list of hosts, in one line."""


@dataclass(frozen=True)
class Reach:
    """How hosts are reached, and what runs there."""

    ssh: tuple[str, ...]  # the program and its options
    directory: str
    command: tuple[str, ...]

    def words(self, host: str) -> list[str]:
        """The words of `ssh` up to what the host's shell reads."""
        return [*self.ssh, "--", host]

    def python(self, *arguments: str) -> str:
        """Shell command that runs the guard in the command's directory."""
        own = python_of(self.command)
        script = ["sh", "-c", SCRIPT, "sh", self.directory, self.command[0], own]
        return shlex.join([*script, *arguments])


def names(listed: str | None, file: Path | None) -> list[str]:
    """Returns the hosts' names, in order.

    Raises:
      BadHostsError: there is none, one is no name of a host, or one stands there twice.
    """
    if (listed is None) == (file is None):
        raise BadHostsError(
            "no hosts. --hosts and --host_file are both given or both missing. There must be one "
            "of them. Name hosts as --hosts a,b or in a file, a line each."
        )
    if file is None:
        found = [name.strip() for name in (listed or "").split(",")]
    else:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadHostsError(
                f"--host_file is {file}, which cannot be read: {error}. It must be a text with a "
                f"host a line. Correct it."
            ) from error
        found = [text for line in lines if (text := line.partition("#")[0].strip())]
    for name in found or [""]:
        if not HOST.fullmatch(name):
            raise BadHostsError(
                f"host is `{name}`. It must be the name or address of a host, maybe with USER@ "
                f"before it. Correct it."
            )
        if found.count(name) > 1:
            raise BadHostsError(
                f"host `{name}` stands there twice. Each host must be named once. For more "
                f"processes a host give --processes_a_host."
            )
    return found


def reach(options: Sequence[str], port: int | None) -> tuple[str, ...]:
    """Returns `ssh` and its options. The first that sets something wins, so the user's come first.

    Raises:
      BadHostsError: an option is none.
    """
    for option in options:
        if not OPTION.fullmatch(option):
            raise BadHostsError(
                f"--ssh_option is `{option}`. It must be NAME=VALUE, as in ssh_config. Correct it."
            )
    ports = [] if port is None else ["-p", str(port)]
    return ("ssh", "-T", *ports, *(f"-o{option}" for option in (*options, *ALWAYS)))


def address(ssh: Sequence[str], host: str) -> str:
    """Returns the name or address that ssh would connect to: a Host of ssh_config is no name."""
    words = [*ssh, "-G", "--", host]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    found = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    if found is None:
        raise BadHostsError(
            f"ssh refuses host `{host}` or an option. It says: {one_line(done.stderr)}. Both must "
            f"be as ssh takes them. Correct it."
        )
    return found[1]


def python_of(command: Sequence[str]) -> str:
    """The Python that runs a command: its own word, or beside a program `moejax`; "" for none."""
    for word in command:
        path = PurePosixPath(word)
        if re.fullmatch(r"python[\d.]*", path.name):
            return word
        if path.name == "moejax" and "/" in word:
            return str(path.with_name("python"))
    return ""


def check(there: Reach, hosts: Sequence[str], coordinator: str) -> None:
    """Checks all hosts at once: each answers, has directory and program, and all have the same.

    Raises:
      BadHostsError: names the hosts that do not.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda host: _ask(there, host, coordinator), hosts))
    wrong = [f"{h}: {a}" for h, a in zip(hosts, answers, strict=True) if isinstance(a, str)]
    if wrong:
        raise BadHostsError(
            f"{len(wrong)} of {len(hosts)} hosts cannot run this. {'; '.join(wrong)}. Each must "
            f"answer ssh without a password, and have the directory and the program. Correct them."
        )
    for what in ("Python", "moejax", "JAX"):
        seen = [str(answer[what]) for answer in answers if isinstance(answer, dict)]
        if len(set(seen)) > 1:
            shown = ", ".join(f"{v} on {h}" for h, v in zip(hosts, seen, strict=True))
            raise BadHostsError(
                f"hosts differ. {what} is {shown}. It must be the same on all. Install the same."
            )


def _ask(there: Reach, host: str, coordinator: str) -> dict[str, str | None] | str:
    """Returns what a host says about itself, or what is wrong with it."""
    line = there.python("-c", relay.GUARD.read_text(), "check", coordinator)
    try:
        done = subprocess.run(
            [*there.words(host), line],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {CHECK_SECONDS} seconds"
    reasons = {
        NO_DIRECTORY: f"no directory {there.directory}",
        NO_PROGRAM: f"no program {there.command[0]}",
        NO_PYTHON: "no python3",
    }
    if done.returncode:
        return reasons.get(done.returncode) or f"ssh says: {one_line(done.stderr)}"
    said = done.stdout.splitlines()[-1:]  # a shell's start-up files may print, too
    try:
        answer = json.loads(said[0])
    except (IndexError, ValueError):
        return f"its Python says: {one_line(done.stdout)}"
    if answer["unknown"]:
        return f"does not know the coordinator's host {coordinator}: {answer['unknown']}"
    return answer


def one_line(text: str) -> str:
    """The last line that was said, without its full stop."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip().rstrip(".") if lines else "nothing"
