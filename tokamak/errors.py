"""What can go wrong, as one tree of exceptions.

    TokamakError
    ├── OptionError            a setting, or two settings together, cannot be met
    ├── ModelError
    │   ├── ModelNotFoundError     no such file, folder, hub id or built-in name
    │   ├── UnsupportedModelError  an architecture, field or format we do not implement
    │   └── CheckpointError        a file is missing, truncated or does not match its config
    ├── NoBackendError         an op cannot run on this machine as asked
    ├── RequestError           one request is wrong; the client's mistake (HTTP 400)
    │   ├── ContextLengthError     prompt and output do not fit the model's context
    │   ├── GrammarError           a schema, regex or grammar that cannot be compiled
    │   └── TemplateError          the chat template refused the messages
    ├── NotFoundError          a model or route the server does not have (HTTP 404)
    ├── OverloadedError        the queue is full; try again later (HTTP 503, Retry-After)
    └── EngineError            our own failure while running (HTTP 500)
        ├── EngineDeadError        the engine process is gone
        ├── StepError              one step failed; names its requests and its shape
        └── FatalError             nobody of the group may go on: peers are inside a collective, or graphs are unsound
            ├── GroupError             ranks disagree: StepDesync, ConfigMismatch, ExchangeTimeout
            ├── ShapeInvariant         a settled shape contradicts itself
            ├── GraphError             recording or replay: RegionMismatch, UnjoinedSideStream, LateBuffer,
            │                          BucketNotRecorded, NestedRecording, PoisonedGraph, PoolOverrun,
            │                          HandoffShape, HostReadInRecording, GraphMismatch
            └── ContextError           the step context: ContextNested, NoContext, StatusTooEarly, StatusTakenTwice,
                                       FillSite, ArenaOverflow, TailOverflow, WalkPlanOverflow

Every message names the thing, its value and what was expected; `hint` says what to do.
"""


class TokamakError(Exception):
    """Base of every error this package raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} (hint: {self.hint})"


class OptionError(TokamakError):
    """A setting, or a combination of settings, that cannot be met."""


class ModelError(TokamakError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError):
    """Nothing to load under that name or path."""


class UnsupportedModelError(ModelError):
    """The checkpoint is sound, but of a kind we do not implement."""


class CheckpointError(ModelError):
    """A checkpoint that is incomplete, truncated or contradicts its config."""


class NoBackendError(TokamakError):
    """An op has no backend for this machine."""


class RequestError(TokamakError):
    """One request is wrong. `field` names the offending field, as a client wrote it."""

    def __init__(self, message: str, *, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.field = field


class ContextLengthError(RequestError):
    """Prompt and requested output do not fit in the model's context."""


class GrammarError(RequestError):
    """A JSON schema, regex or grammar that cannot be compiled."""


class TemplateError(RequestError):
    """The chat template refused the messages."""


class NotFoundError(TokamakError):
    """The named model or resource does not exist here."""


class OverloadedError(TokamakError):
    """The waiting queue is full; `retry_after_s` says when to try again."""

    def __init__(self, message: str, *, retry_after_s: float, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class EngineError(TokamakError):
    """The engine failed."""


class EngineDeadError(EngineError):
    """The engine process is gone; nothing more can be served."""


class StepError(EngineError):
    """One step failed; its requests end with this error and the engine goes on."""


class FatalError(EngineError):
    """Nobody of the group may go on; the engine ends with this message."""


class GroupError(FatalError):
    """Data-parallel ranks disagree, or one of them is gone."""


class StepDesync(GroupError):
    """Ranks are at different steps; the message names the step of each."""


class ConfigMismatch(GroupError):
    """Ranks were started with different ladders or switches."""


class ExchangeTimeout(GroupError):
    """A rank did not answer in the step's exchange; the message lists those that did."""


class ShapeInvariant(FatalError):
    """A settled shape contradicts itself; the message names the field and its value."""


class GraphError(FatalError):
    """A recording cannot be made, or cannot be trusted."""


class RegionMismatch(GraphError):
    """A forward met other eager regions than its model declares."""


class UnjoinedSideStream(GraphError):
    """A side stream is still open where a recorded segment ends."""


class LateBuffer(GraphError):
    """A buffer that must outlive recordings was asked for while one was made."""


class BucketNotRecorded(GraphError):
    """A replay was asked of a size nobody recorded."""


class NestedRecording(GraphError):
    """A recording was started inside another."""


class PoisonedGraph(GraphError):
    """A recorded run failed before; what its buffers hold cannot be trusted."""


class PoolOverrun(GraphError):
    """Recordings take more memory than was set aside for them."""


class HandoffShape(GraphError):
    """A region was given, or gave back, a tensor of the wrong shape."""


class HostReadInRecording(GraphError):
    """A recorded segment read a number from the device to the host, where a replay cannot follow."""


class GraphMismatch(GraphError):
    """A replay gave other numbers than the eager forward."""


class ContextError(FatalError):
    """The step context was used out of order."""


class ContextNested(ContextError):
    """A step context was installed while another is."""


class NoContext(ContextError):
    """The body of an eager region ran outside of a step."""


class StatusTooEarly(ContextError):
    """The previous step's status was read before the inputs of this one were launched."""


class StatusTakenTwice(ContextError):
    """The previous step's status was taken twice in a step."""


class FillSite(ContextError):
    """A derived table was read both inside a recorded segment and in an eager region."""


class ArenaOverflow(ContextError):
    """A plan is larger than the input buffers were made for."""


class TailOverflow(ContextError):
    """More rows were meant for late layers than their buffers, or the bucket, hold."""


class WalkPlanOverflow(ContextError):
    """More rows of index queries were to be walked than there are programs for."""
