"""The SQLite ledger against models of what a ledger is, in random sequences of calls."""

from tests.ledger.sqlite.object_machine import ObjectMachine
from tests.ledger.sqlite.stream_machine import SETTINGS, StreamMachine

TestStreams = StreamMachine.TestCase
TestStreams.settings = SETTINGS
TestObjects = ObjectMachine.TestCase
TestObjects.settings = SETTINGS
