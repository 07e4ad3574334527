"""Who may spend what: pure, synchronous, told the time and handed its inputs."""

from typing import TYPE_CHECKING

from ._admissions import Caps as Caps
from ._admissions import Counters as Counters
from ._admissions import Kind as Kind
from ._admissions import Node as Node
from ._admissions import Outcome as Outcome
from ._carried import Carried as Carried
from ._carried import carried_from as carried_from
from ._charges import Ask as Ask
from ._charges import Charge as Charge
from ._charges import Ending as Ending
from ._charges import Progress as Progress
from ._charges import charge_for as charge_for
from ._event_json import event_from_json as event_from_json
from ._event_json import event_to_json as event_to_json
from ._events import Admitted as Admitted
from ._events import Dispatched as Dispatched
from ._events import Ended as Ended
from ._events import Event as Event
from ._events import Held as Held
from ._events import HoldReleased as HoldReleased
from ._events import Opened as Opened
from ._events import Settled as Settled
from ._grant_order import GrantOrder as GrantOrder
from ._journal import Journal as Journal
from ._journal import fold as fold
from ._leases import Entry as Entry
from ._leases import Hold as Hold
from ._leases import Lease as Lease
from ._leases import LeaseRequest as LeaseRequest
from ._leases import Stop as Stop
from ._leases import Ticket as Ticket
from ._money import Money as Money
from ._money import format_usd as format_usd
from ._money import to_decimal as to_decimal
from ._money import usd as usd
from ._price_book import ModelCard as ModelCard
from ._price_book import PriceBook as PriceBook
from ._price_book import Snapshot as Snapshot
from ._price_book import UnknownModel as UnknownModel
from ._prices import Cost as Cost
from ._prices import PerMillion as PerMillion
from ._prices import Price as Price
from ._prices import PriceOf as PriceOf
from ._prices import Rates as Rates
from ._prices import Tier as Tier
from ._prices import UnpricedModel as UnpricedModel
from ._prices import largest_output as largest_output
from ._prices import measured_cost as measured_cost
from ._prices import worst_case as worst_case
from ._purse import Purse as Purse
from ._receipts import Recorder as Recorder
from ._receipts import amount_of as amount_of
from ._state import TreeState as TreeState
from ._tree import TreeLedger as TreeLedger
from ._tree import refusal_row as refusal_row
from ._wallet import UNBOUNDED as UNBOUNDED
from ._wallet import Unit as Unit
from ._wallet import Wallet as Wallet

if TYPE_CHECKING:
    from ._breakers import Breakers as Breakers
    from ._breakers import Judge as Judge
    from ._breakers import Seen as Seen
    from ._breakers import Verdict as Verdict
else:
    from ._lazily import __getattr__ as __getattr__
