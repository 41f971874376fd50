"""Whether minivllm/ is as git has it: answers belong into labs/, and are checked with what stands in minivllm/."""

import ast
import subprocess

from labs.kit.regions import ROOT

ENGINE = "minivllm"
BACK = f"`git diff {ENGINE}` shows what was changed, `git checkout {ENGINE}` takes it back"


def edited() -> list[str] | None:
    """Files of the engine that are not as in git's last commit. None where git does not know."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", ENGINE]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if found.returncode:
        return None
    # Two letters and a blank; of one that was renamed both names.
    return [line[3:].rpartition(" -> ")[2].strip('"') for line in found.stdout.splitlines()]


def unreadable(files: list[str]) -> str | None:
    """A sentence about the first that Python cannot read."""
    for name in files:
        try:
            ast.parse((ROOT / name).read_text(encoding="utf-8"))
        except SyntaxError as error:
            return (
                f"{name}:{error.lineno}: {error.msg}. It is our code, which answers are checked with: {BACK}"
            )
        except (OSError, ValueError) as error:
            return f"{name} cannot be read: {error}. It is our code, which answers are checked with: {BACK}"
    return None


def complaint(files: list[str]) -> str | None:
    """A sentence about files that were edited, above all where Python cannot read one."""
    if not files:
        return None
    which = f"{files[0]} is" if len(files) == 1 else f"{files[0]} and {len(files) - 1} more are"
    changed = f"{which} not as in git. Answers belong into labs/, and are checked with this code: {BACK}"
    return unreadable(files) or changed
