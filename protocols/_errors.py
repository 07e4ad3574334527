"""Every error that leaves Treewarden, as a tree.

    TreewardenError                      has a ``code``, spelled as in the contract
    ├── UsageError (ValueError)          a definition or option cannot be used; nothing began
    ├── RefusedError                     the ledger refused; nothing but a counter changed
    ├── ProtocolError                    bytes of a foreign protocol make no sense
    ├── ProviderError                    a provider answered with an error
    │   ├── ProviderInterrupted          … after it had begun to answer
    │   ├── RetryBudgetSpent             … and what retries may cost is spent
    │   └── CredentialsError             … because of the key, or there is none
    ├── ActorStopped                     a message to an actor that has ended
    ├── MailboxFull                      a message to an actor that does not read its own
    ├── ToolFailed                       a tool call ended without a result
    │   └── ToolUnavailable              … because what it needs is not there just now
    ├── RunError                         a run failed after it had started; has a receipt
    │   ├── RunStopped                   … was stopped by a limit, where the caller wants an error
    │   └── RunCancelled                 … was cancelled
    ├── ServiceFailed                    a supervised service failed too often, or was killed
    ├── TreeCrashed                      the runtime's own code failed; the tree was ended
    ├── SupervisorCancelled              a task was killed from outside before its first step
    └── LedgerError                      the ledger was used wrongly: a bug in the caller

Each class takes values, keeps them as fields and builds its own text: what was asked, what is
so, what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ._messages import Usage
    from ._receipts import Receipt


# What a request that is sent again may get past (RFC 9110, section 15; 425 is RFC 8470's, 529
# Anthropic's, 520 to 524 are Cloudflare's).
_OVERLOAD_STATUSES = frozenset({429, 503, 529})
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 500, 502, 504, 520, 522, 524}) | _OVERLOAD_STATUSES

# Said with a status of its own for "too many requests", but waiting does not help.
_USED_UP_KINDS = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_error"})


class TreewardenError(Exception):
    """The root of the tree. ``code`` names the kind in the contract's spelling."""

    code: str = "cave_agent_run_failed"


class UsageError(TreewardenError, ValueError):
    """A definition or an option that cannot be used. Nothing was started and nothing was spent."""

    def __init__(self, message: str, *, code: str = "cave_agent_definition_invalid") -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class RefusedError(TreewardenError):
    """The ledger refused. Nothing but the refusal's own counter changed.

    ``node`` asked, ``at`` (itself or an ancestor) said no. ``asked`` and ``left`` are in the unit
    of ``dimension``; ``held_by`` names who holds the rest.
    """

    def __init__(
        self,
        code: str,
        *,
        node: str,
        at: str,
        dimension: str,
        asked: str,
        left: str,
        held_by: tuple[str, ...] = (),
        advice: str,
    ) -> None:
        holders = f" (held by {', '.join(held_by)})" if held_by else ""
        super().__init__(
            f"{code}: {node} asked for {asked} of {dimension}; "
            f"{at} has {left} left{holders}. {advice}"
        )
        self.code = code
        self.node, self.at, self.dimension = node, at, dimension
        self.asked, self.left, self.held_by, self.advice = asked, left, held_by, advice


class ProtocolError(TreewardenError):
    """Bytes that are not what their protocol says they are."""

    code = "cave_provider_usage_incomplete"


class ProviderError(TreewardenError):
    """A provider answered with an error, or could not be reached.

    ``status`` is the HTTP status (None: no answer), ``kind`` the provider's own name for the
    error. ``usage`` is what the error itself reported. ``retry_after_seconds`` is the provider's
    wish. ``was_sent`` says whether the request had left: only then can it cost anything.
    """

    code = "cave_provider_terminal_error"
    _is_final: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        provider: str,
        status: int | None = None,
        kind: str | None = None,
        usage: Usage | None = None,
        retry_after_seconds: float | None = None,
        was_sent: bool = True,
    ) -> None:
        what = " ".join(str(x) for x in (status, kind) if x is not None)
        said = f"{provider} answered {what or 'nothing'}" if was_sent else f"{provider} not asked"
        super().__init__(f"{self.code}: {said}: {message}")
        self.message, self.provider, self.status, self.kind = message, provider, status, kind
        self.usage, self.retry_after_seconds = usage, retry_after_seconds
        self.was_sent = was_sent

    @property
    def is_retryable(self) -> bool:
        """Whether the same request, sent again, may well be answered."""
        if self._is_final or self.kind in _USED_UP_KINDS:
            return False
        if self.status is None:
            return self.kind == "transport"
        return self.status in _RETRYABLE_STATUSES or self.is_overload

    @property
    def is_overload(self) -> bool:
        """Whether the provider asks everybody to wait, not this one request alone."""
        return self.status in _OVERLOAD_STATUSES or (
            self.retry_after_seconds is not None and self.status in _RETRYABLE_STATUSES
        )


class ProviderInterrupted(ProviderError):
    """The answer broke off after it had begun. What had arrived is kept and charged."""

    code = "provider-interrupted"
    _is_final = True  # its beginning was read


class RetryBudgetSpent(ProviderError):
    """A call failed, and what its retries may cost is spent.

    ``status``, ``kind`` and the text are those of the last failure, which is the ``__cause__``.
    """

    code = "retry-budget"
    _is_final = True

    def __init__(self, last: ProviderError, why: str) -> None:
        super().__init__(
            f"{last.message}; no retry is paid for any more: {why}",
            provider=last.provider,
            status=last.status,
            kind=last.kind,
            was_sent=last.was_sent,
        )


class CredentialsError(ProviderError):
    """The provider refused the key, or there is none."""

    code = "cave_provider_credentials"


class ActorStopped(TreewardenError):
    """A message was sent to an actor that has ended. It was not handled and never will be."""

    code = "cave_actor_stopped"

    def __init__(self, actor: str) -> None:
        super().__init__(
            f"{self.code}: {actor} has ended, or is on its last call, and takes no messages. "
            "Start a new run."
        )
        self.actor = actor


class MailboxFull(TreewardenError):
    """An actor has as many unread messages as its mailbox holds. This one was not taken."""

    code = "cave_mailbox_full"

    def __init__(self, actor: str, capacity: int) -> None:
        super().__init__(
            f"{self.code}: {actor} has {capacity} unread messages and takes no more of them. "
            "Send again when it has read some."
        )
        self.actor, self.capacity = actor, capacity


class ToolFailed(TreewardenError):
    """A tool call that ended without a result of its own: refused, timed out, cancelled."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class ToolUnavailable(ToolFailed):
    """What a tool needs is not there just now, and the same call is worth asking again.

    The model reads the message. Breakers do not take it for a loop of the model's: with them on,
    the tool is left alone for ``retry_after_seconds``, or a little longer each time.
    """

    code = "cave_tool_unavailable"

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(self.code, message)
        wish: Any = retry_after_seconds
        if wish is not None and not (type(wish) in (int, float) and 0 <= wish < float("inf")):
            raise UsageError(
                f"retry_after_seconds is {wish!r}. Give a number of seconds, or None.",
                code="cave_option_invalid",
            )
        self.retry_after_seconds = retry_after_seconds


class RunError(TreewardenError):
    """A run failed after it had started. Everything it held was released before this was raised.

    ``receipt`` says what was spent until then; ``text`` is what the agent had written last.
    """

    def __init__(self, code: str, message: str, receipt: Receipt, *, text: str = "") -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.receipt = receipt
        self.text = text


class RunStopped(RunError):
    """A limit stopped the run before it was complete, and the caller asked for an error."""


class RunCancelled(RunError):
    """The run was cancelled. ``reason`` is what the one who cancelled gave."""

    def __init__(self, reason: str, receipt: Receipt, *, text: str = "") -> None:
        super().__init__("cave_run_aborted", reason, receipt, text=text)
        self.reason = reason


class SupervisorCancelled(TreewardenError):
    """A task was cancelled natively before its first step, so its supervisor could not go on.

    Everything below the supervisor was cancelled and charged first.
    """

    code = "cave_run_aborted"

    def __init__(self, supervisor: str, never_started: tuple[str, ...]) -> None:
        names = ", ".join(never_started)
        super().__init__(
            f"supervisor {supervisor!r} ended: {names} was cancelled from outside before its "
            "first step. Cancel through run.cancel(reason) or a cancel scope instead of "
            "task.cancel()."
        )
        self.supervisor, self.never_started = supervisor, never_started


class ServiceFailed(TreewardenError):
    """A supervised service failed, and nobody was left to start it again.

    ``service`` is its path. ``__cause__`` is the error it failed with, where there is one.
    """

    code = "cave_service_failed"

    def __init__(self, service: str, why: str, cause: BaseException | None = None) -> None:
        self.message = f"{service} failed: {why}"
        super().__init__(f"{self.code}: {self.message}")
        self.service, self.why = service, why
        self.__cause__ = cause


class TreeCrashed(TreewardenError):
    """The runtime's own code failed, so the tree was ended: all in it was cancelled and charged.

    This is a bug of ours. ``__cause__`` is what happened.
    """

    code = "cave_agent_run_failed"

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{self.code}: the tree was ended by a bug in the runtime: {cause!r}")
        self.__cause__ = cause


class JournalFailed(TreewardenError):
    """A journal could not be written, so its tree ended: all in it was cancelled and charged.

    ``__cause__`` is what the journal raised.
    """

    code = "cave_journal_failed"

    def __init__(self, cause: BaseException) -> None:
        self.message = (
            f"the journal cannot be written ({type(cause).__name__}: {cause}), so the tree ends "
            "here: nothing may happen that is not written down"
        )
        super().__init__(f"{self.code}: {self.message}")
        self.__cause__ = cause


class LedgerError(TreewardenError):
    """The ledger was used in a way that only a bug can explain. Its state is as before."""

    def __init__(
        self, message: str, *, code: str = "cave_budget_reservation_double_settle"
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
