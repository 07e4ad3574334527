"""``treewarden receipt``: check a receipt and show it."""

from __future__ import annotations

import json as json_
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from treewarden.protocols import Receipt, UsageError

from ._errors import CommandError, Exit
from ._options import AsJson, Flag
from ._tables import console, show_receipt


def receipt(
    file: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    json: AsJson = False,
    contract: Flag = False,
    debug: Flag = False,
) -> int:
    """Check a receipt's sums and show it as a table.

    Takes what `treewarden run` wrote with --receipt or --json. A receipt whose sums do not add up
    is refused with exit code 1.

    Args:
        file: The receipt's file, or - for stdin.
        json: Print it in its normal form as JSON.
        contract: Print it as JSON in the public schema caveman.agent.run-receipt.v1.
        debug: Show tracebacks.
    """
    if json and contract:
        raise CommandError("--json and --contract exclude each other; both print JSON.")
    name = "stdin" if file == "-" else file
    read = _receipt_of(_parsed(_read(file), name), name)
    if json or contract:
        print(json_.dumps(read.to_contract_json() if contract else read.to_json(), indent=2))
        return Exit.OK
    show_receipt(console(), read)
    return Exit.OK


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror or error}") from None


def _parsed(raw: bytes, file: str) -> Any:
    try:
        return json_.loads(raw)
    except RecursionError:
        raise _broken(file, "it is nested too deeply") from None
    except ValueError as error:
        raise _broken(file, f"it is not JSON: {error}") from None


def _receipt_of(value: Any, file: str) -> Receipt:
    is_wrapped = isinstance(value, dict) and "receipt" in value
    try:
        return Receipt.from_json(value["receipt"] if is_wrapped else value)
    except UsageError as error:
        raise CommandError(f"{file}: {error}", code=Exit.FAILED) from None
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise _broken(file, f"{type(error).__name__}: {error}") from None


def _broken(file: str, why: str) -> CommandError:
    return CommandError(f"{file} is no receipt: {why}", code=Exit.FAILED)
