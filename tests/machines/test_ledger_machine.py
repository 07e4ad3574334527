from hypothesis import settings
from .ledger_machine import UsdMachine, TokenMachine
TestUsd = UsdMachine.TestCase
TestUsd.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestTokens = TokenMachine.TestCase
TestTokens.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
