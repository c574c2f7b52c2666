"""How does one talk to a model in the terminal? `tokamak chat`: a conversation, or one answer with `--ask`.

The model runs in this process. Ctrl-C ends the answer that is being written, not the program; without a
terminal every line of stdin is a message and stdout holds the answers alone.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

import tokamak
from tokamak.checkpoint.fetch import resolve_model
from tokamak.cli.flags import Parser, add_options, asked_options, read_options
from tokamak.config.options import EngineOptions
from tokamak.core.generation import GenerationEvent
from tokamak.core.request import FinishReason, SamplingParams
from tokamak.errors import RequestError
from tokamak.server.parsers.answer import (
    AnswerDelta,
    AnswerReader,
    answer_reader,
    reads_special_tokens,
)
from tokamak.telemetry.log import set_up_logging

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  # gives input() its history and arrow keys where the system has it

if TYPE_CHECKING:
    from tokamak.llm import LLM

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message and forget the conversation
/help           this text
/quit           leave (Ctrl-D too); Ctrl-C ends an answer"""

CHAT_TEMPERATURE = 0.2
"""Small models wander at 1 and repeat themselves at 0."""


def run(arguments: list[str]) -> int:
    """Chat, or answer once; see `run --help`."""
    parsed = _parser().parse(arguments)
    options = read_options(parsed, EngineOptions)
    set_up_logging("warning")
    params = SamplingParams(
        temperature=_temperature(parsed), top_p=parsed.top_p, max_tokens=parsed.max_tokens
    )
    console = Console(stderr=True, highlight=False)
    # Fetched first, with a bar of its own; loading afterwards has none.
    resolve_model(options.model, progress=console.is_terminal, revision=options.revision)
    loading = console.status(f"loading {options.model}") if console.is_terminal else None
    with loading or contextlib.nullcontext():
        llm = tokamak.LLM(options.model, **asked_options(options))
    with llm:
        conversation = Conversation(llm, params, parsed.system, aside=console)
        if parsed.ask is not None:
            conversation.say(parsed.ask)
            return 0
        _converse(conversation, options.model, console)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="tokamak chat",
        usage="tokamak chat [MODEL] [--ask TEXT] [options]",
        description="Talk to a model in the terminal. Inside: /help.",
    )
    parser.add_argument("--ask", metavar="TEXT", help="answer this once and exit")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: what fits)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help=f"0 is the most likely answer (default: 0 with --ask, else {CHAT_TEMPERATURE})",
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="nucleus sampling (default: 1, off)"
    )
    add_options(parser, EngineOptions)
    return parser


def _temperature(parsed: argparse.Namespace) -> float:
    if parsed.temperature is not None:
        return parsed.temperature
    return 0.0 if parsed.ask is not None else CHAT_TEMPERATURE


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the model that answers them."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    aside: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))
    """Where reasoning is shown, so that stdout has the answers alone."""
    _reasons: bool = False
    """What was shown last is reasoning."""

    def say(self, text: str) -> GenerationEvent | None:
        """Send a message and print the answer as it comes; returns its last event.

        The exchange is remembered once the answer has ended or was interrupted.
        """
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = {"role": "user", "content": text}
        answer: list[str] = []
        last: GenerationEvent | None = None
        messages = [*opening, *self.messages, asked]
        reader, params = self._reading(messages)
        events = self.llm.stream_chat(messages, params)
        with contextlib.closing(events), interrupted() as stop:
            for event in events:
                last = event
                answer.append(self._show(reader.feed(event.text)))
                if stop:
                    break
        answer.append(self._show(reader.finish(cut=True)))
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.messages += [asked, {"role": "assistant", "content": "".join(answer)}]
        return last

    def _reading(self, messages: list[dict[str, str]]) -> tuple[AnswerReader, SamplingParams]:
        """What reads the answer, and the parameters that let it see all it must."""
        self._reasons = False
        form = self.llm.chat_template
        if form is None or form.reasoning_format is None:
            return AnswerReader(), self.params
        skips = not reads_special_tokens(self.llm.tokenizer, form.reasoning_format)
        params = msgspec.structs.replace(self.params, skip_special_tokens=skips)
        return answer_reader(form.render(messages), form.reasoning_format), params

    def _show(self, news: AnswerDelta) -> str:
        """Print reasoning aside and the answer to stdout; returns the answer's text."""
        if news.reasoning:
            self.aside.print(news.reasoning, style="dim", end="", markup=False, soft_wrap=True)
            self._reasons = True
        if news.content and self._reasons:
            self.aside.print()
            self._reasons = False
        sys.stdout.write(news.content)
        sys.stdout.flush()
        return news.content

    def reset(self, system: str | None) -> None:
        """Forget all messages; `system` is the system message from now on."""
        self.system = system
        self.messages = []


@contextlib.contextmanager
def interrupted() -> Iterator[list[bool]]:
    """Collect Ctrl-C instead of raising: the list becomes true, and a running step is never cut in two."""
    pressed: list[bool] = []

    def press(_signal: int, _frame: FrameType | None) -> None:
        pressed.append(True)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _converse(conversation: Conversation, name: str, console: Console) -> None:
    """Read messages and commands until the end of stdin or /quit."""
    terminal = sys.stdin.isatty()
    if terminal:
        console.print(f"[bold]{name}[/bold], ready. /help lists the commands.")
    for text in _lines("> " if terminal else ""):
        command, _, rest = text.partition(" ")
        match command:
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/help":
                console.print(HELP, markup=False)
            case "/reset":
                conversation.reset(conversation.system)
                console.print("The conversation is forgotten.")
            case "/system":
                conversation.reset(rest.strip() or None)
                console.print("The system message is set; the conversation is forgotten.")
            case _ if command.startswith("/"):
                console.print(f"There is no command {command}.\n{HELP}", markup=False)
            case _:
                _exchange(conversation, text, console, figures=terminal)


def _exchange(conversation: Conversation, text: str, console: Console, *, figures: bool) -> None:
    try:
        last = conversation.say(text)
    except RequestError as error:
        console.print(f"{error}\n/reset forgets the conversation.", markup=False, style="red")
        return
    if figures and last is not None:
        console.print(_figures(last), style="dim", markup=False)


def _figures(last: GenerationEvent) -> str:
    """Tokens and pace of an answer, in one line."""
    tokens, times = last.usage.completion_tokens, last.timings
    parts = [f"{tokens} tokens"]
    if times.first_token_s is not None and times.last_token_s is not None:
        parts.append(f"first after {times.first_token_s - times.arrived_s:.2f} s")
        if tokens > 1 and times.last_token_s > times.first_token_s:
            pace = (tokens - 1) / (times.last_token_s - times.first_token_s)
            parts.append(f"{pace:.0f} tokens/s")
    if last.finish_reason == FinishReason.LENGTH:
        parts.append("cut at the most tokens allowed")
    elif last.finish_reason is None:
        parts.append("stopped")
    return ", ".join(parts)


def _lines(prompt: str) -> Iterator[str]:
    """Lines of stdin without their ends; at a prompt, Ctrl-C starts the line anew."""
    while True:
        try:
            yield input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
