"""The recorder: what belongs on a lease's receipt, gathered while the lease is alive.

It holds no sums. A receipt's totals are derived from its lines, so they cannot disagree.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

import attrs

from treewarden.protocols import (
    BreakerRow,
    CompactionRow,
    Line,
    Receipt,
    Refusal,
    ToolRow,
    TrancheRow,
)

from ._charges import Charge
from ._money import Money, to_decimal
from ._state import Tranche
from ._wallet import Unit, Wallet


@attrs.define(slots=True, eq=False)
class Recorder:
    """Lines, tools and children's receipts of one lease, in the order they came."""

    lines: list[Line] = attrs.field(factory=list[Line])
    # calls and errors by tool name, in first-use order.
    tools: dict[str, list[int]] = attrs.field(factory=dict[str, list[int]])
    subagents: list[Receipt] = attrs.field(factory=list[Receipt])
    refusals: list[Refusal] = attrs.field(factory=list[Refusal])
    breakers: list[BreakerRow] = attrs.field(factory=list[BreakerRow])
    compactions: list[CompactionRow] = attrs.field(factory=list[CompactionRow])
    faults: list[str] = attrs.field(factory=list[str])

    def count_tool(self, name: str, *, is_error: bool) -> None:
        row = self.tools.setdefault(name, [0, 0])
        row[0] += 1
        row[1] += is_error

    def count_tool_error(self, name: str) -> None:
        """A call that was counted before came to an error."""
        self.tools[name][1] += 1

    def receipt(
        self,
        *,
        run_id: str,
        path: str,
        agent_id: str,
        stop_reason: str,
        reason: str,
        error_code: str | None,
        unit: Unit,
        wallet: Wallet | None,
        tranches: list[Tranche],
        spent: int,
        started_ns: int,
        ended_ns: int,
        is_detached: bool = False,
    ) -> Receipt:
        """The receipt of a lease that has ended.

        Args:
            wallet: The wallet that bounded this run alone, or None: it drew on another's.
            spent: What this run and all below it cost, in ``unit``.
        """
        most = released = None
        if wallet is not None and wallet.is_bounded:
            most = amount_of(unit, wallet.max)
            released = most if wallet.released == wallet.max else amount_of(unit, wallet.released)
        denomination: Literal["usd", "tokens", "none"] = unit
        return Receipt(
            run_id=run_id,
            path=path,
            agent_id=agent_id,
            stop_reason=stop_reason,
            reason=reason,
            error_code=error_code,
            denomination=denomination,
            max=most,
            released=released,
            spent=amount_of(unit, spent),
            carried=amount_of(unit, wallet.carried_in) if wallet else Decimal(0),
            overspent=amount_of(unit, wallet.overspent) if wallet else Decimal(0),
            cap_breached=(wallet is not None and wallet.is_breached)
            or any(child.cap_breached for child in self.subagents),
            lines=tuple(self.lines),
            tools=tuple(
                ToolRow(name=name, calls=calls, errors=errors)
                for name, (calls, errors) in self.tools.items()
            ),
            subagents=tuple(self.subagents),
            tranches=tuple(
                TrancheRow(amount=amount_of(unit, t.amount), reason=t.reason, at_call=t.at_call)
                for t in tranches
            ),
            refusals=tuple(self.refusals),
            breakers=tuple(self.breakers),
            compactions=tuple(self.compactions),
            faults=tuple(self.faults),
            is_detached=is_detached,
            started_ns=started_ns,
            ended_ns=ended_ns,
        )


def amount_of(unit: Unit, amount: int) -> Decimal:
    """A ledger amount as people read it: dollars or tokens."""
    return to_decimal(Money(amount)) if unit == "usd" else Decimal(amount)


def line_for(
    charge: Charge,
    *,
    purpose: str,
    provider: str,
    model: str,
    asked_model: str | None,
    output_limit: int,
    clamped_from: int | None,
    note: str | None,
) -> Line:
    """The receipt line of a charge."""
    usage = charge.usage
    usd = to_decimal(charge.usd)
    # Of a measured charge, which most are, the bounds are the amount itself.
    low_usd = usd if charge.low_usd == charge.usd else to_decimal(charge.low_usd)
    high_usd = usd if charge.high_usd == charge.usd else to_decimal(charge.high_usd)
    return Line(
        purpose=purpose,
        provider=provider,
        model=model,
        asked_model=asked_model,
        input_tokens=usage.input,
        cache_read_tokens=usage.cache_read,
        cache_write_tokens=usage.cache_write,
        output_tokens=usage.output,
        reasoning_tokens=usage.reasoning,
        tokens=charge.tokens,
        usd=usd,
        basis=charge.basis,
        low_usd=low_usd,
        high_usd=high_usd,
        low_tokens=charge.low_tokens,
        high_tokens=charge.high_tokens,
        is_unpriced=charge.is_unpriced,
        is_upper_bound=charge.is_upper_bound,
        output_limit=output_limit,
        clamped_from=clamped_from,
        note=note,
    )
