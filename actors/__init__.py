"""The living tree: the only part that runs tasks."""

from typing import TYPE_CHECKING

from ._actor import Actor as Actor
from ._actor import StopAsked as StopAsked
from ._actor import StopKind as StopKind
from ._actor import current_actor as current_actor
from ._agent import Result as Result
from ._clock import Clock as Clock
from ._clock import LoopClock as LoopClock
from ._clock import running_backend as running_backend
from ._conversation import Conversation as Conversation
from ._definitions import Agent as Agent
from ._definitions import Context as Context
from ._definitions import Output as Output
from ._definitions import Subagent as Subagent
from ._definitions import Tool as Tool
from ._definitions import agent as agent
from ._definitions import output as output
from ._definitions import subagent as subagent
from ._definitions import tool as tool
from ._lifecycle import TRANSITIONS as TRANSITIONS
from ._lifecycle import Moment as Moment
from ._lifecycle import State as State
from ._limits import Budget as Budget
from ._limits import Limits as Limits
from ._mailbox import Letter as Letter
from ._mailbox import Mailbox as Mailbox
from ._models import DEFAULT_OUTPUT_TOKENS as DEFAULT_OUTPUT_TOKENS
from ._models import Auto as Auto
from ._models import Brief as Brief
from ._models import HttpModel as HttpModel
from ._models import Model as Model
from ._models import ModelSession as ModelSession
from ._models import Sink as Sink
from ._models import auto as auto
from ._models import model as model
from ._models import price_book as price_book
from ._retry import Retry as Retry
from ._root import RootSupervisor as RootSupervisor
from ._root import tree_observer as tree_observer
from ._run import Tree as Tree
from ._run import open_tree as open_tree
from ._run import run as run
from ._run import run_sync as run_sync
from ._run import stream as stream
from ._sinks import JsonLinesJournal as JsonLinesJournal
from ._sinks import SQLiteJournal as SQLiteJournal
from ._sinks import read_journal as read_journal
from ._stream import RunStream as RunStream

if TYPE_CHECKING:
    from ._service import Service as Service
    from ._supervision import Intensity as Intensity
    from ._supervision import Plan as Plan
    from ._supervision import Restart as Restart
    from ._supervision import Strategy as Strategy
    from ._supervision import plan_after_end as plan_after_end
    from ._supervisor import ChildSpec as ChildSpec
    from ._supervisor import Supervisor as Supervisor
else:
    from ._lazily import __getattr__ as __getattr__
