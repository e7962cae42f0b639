#!/usr/bin/env bash
# Prints the path of the newest Python that moejax is tested on and that really runs here.
#
# usage: launch/find_python.sh [MINOR ...]      default: 13 12 11 14
#
# 14 comes last: `make install`, `make train` and `make test` pass on it, and no other target has run.
#
# A name on the PATH proves nothing: pyenv puts a `python3.13` there that fails unless that version
# is selected. So each candidate must start, have the version it claims, and be able to make a
# virtual environment.
set -u

works() { # works PYTHON LOWEST_MINOR HIGHEST_MINOR
    "$1" -c "
import ensurepip, ssl, sys, venv
sys.exit(not (3, $2) <= sys.version_info[:2] <= (3, $3))" >/dev/null 2>&1
}

candidates() { # candidates MINOR
    type -aP "python3.$1"
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$1".*/bin/python | sort --version-sort --reverse
}

minors=("$@")
[ "$#" -gt 0 ] || minors=(13 12 11 14)
for minor in "${minors[@]}"; do
    while IFS= read -r python; do
        if works "$python" "$minor" "$minor"; then
            echo "$python"
            exit 0
        fi
    done < <(candidates "$minor")
done
if [ "$#" -eq 0 ] && works python3 11 99; then
    command -v python3
    exit 0
fi
echo "moejax needs Python 3.${minors[*]// / or 3.} with venv and ssl; none found on the PATH or under" \
    "${PYENV_ROOT:-$HOME/.pyenv}/versions. Install one (on Debian: python3 python3-venv)." >&2
exit 1
