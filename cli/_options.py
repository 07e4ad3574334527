"""Options that several commands have, with the same name and the same help everywhere."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from cyclopts import Parameter

Backend: TypeAlias = Literal["asyncio", "trio"]

AsJson: TypeAlias = Annotated[bool, Parameter(name="--json", negative=(), show_default=False)]
Flag: TypeAlias = Annotated[bool, Parameter(negative=(), show_default=False)]
