"""What does an engine process do while it has no requests?"""

import gc

from tests.support.scripted_engine import ScriptedCore
from tokamak.engine.engine_process import EngineLoop
from tokamak.engine.messages import Shutdown


class Channel:
    """Says when messages are looked for and waited for; the first wait brings the end."""

    def __init__(self):
        self.noted = []

    def receive(self):
        if "wait" in self.noted:
            return [Shutdown()]
        self.noted.append("receive")
        return []

    def send(self, message):
        pass

    def wait(self, seconds):
        self.noted.append("wait")


def test_it_works_ahead_piece_by_piece_and_sleeps_when_nothing_is_left():
    core, channel = ScriptedCore(), Channel()
    core.pieces_left = 3

    EngineLoop(core, channel).run()

    assert core.pieces_left == 0
    assert channel.noted[:4] == ["receive", "receive", "receive", "wait"]


def test_what_was_recorded_is_kept_from_the_collector_once_nothing_is_left(monkeypatch):
    core, channel, frozen = ScriptedCore(), Channel(), []
    core.pieces_left = 2
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(core.pieces_left))

    EngineLoop(core, channel).run()

    assert frozen == [0]
