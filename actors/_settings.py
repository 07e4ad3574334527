"""What a run and everything below it share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from treewarden.protocols import RunEvent

from ._definitions import ToolCallback
from ._limits import CallTimes, Funding
from ._retry import Retrying

if TYPE_CHECKING:
    from treewarden.ledgers import Breakers

    from ._open_tree import OpenTree


@attrs.frozen(kw_only=True)
class RunSettings:
    """What a run and everything below it share."""

    tree: OpenTree
    deps: Any
    approve: ToolCallback | None
    funding: Funding
    times: CallTimes
    # None: a failed call is not made again.
    retrying: Retrying | None = None
    # When somebody who goes round in circles is told and stopped, or None: never.
    breakers: Breakers | None = None
    # Where events go, or None: nobody listens.
    tell: Callable[[RunEvent], None] | None = None
