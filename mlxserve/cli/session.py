"""A conversation under way: everything that commands can change."""

from dataclasses import dataclass, field

from mlxserve.cli.answer_view import Style
from mlxserve.cli.chat_backend import ChatBackend, Message, ModelFacts
from mlxserve.cli.parameters import ChatParameters
from mlxserve.core.generation import Usage


@dataclass(slots=True)
class Session:
    model: str
    """Its name as the user wrote it."""
    backend: ChatBackend
    """Loaded."""
    facts: ModelFacts
    parameters: ChatParameters = field(default_factory=ChatParameters)
    system: str | None = None
    """None: the model's own, if it has one."""
    style: Style = field(default_factory=Style)
    verbose: bool = False
    load_seconds: float = 0.0
    """Time the model took to load, until an answer's statistics have told it."""
    messages: list[Message] = field(default_factory=list)
    attachments: list[str] = field(default_factory=list)
    """Files that go before the next message."""
    num_tokens: int = 0
    """Tokens of the conversation so far."""

    def question(self, text: str) -> Message:
        return {"role": "user", "content": "\n\n".join([*self.attachments, text])}

    def prompt(self, question: Message) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages, question]

    def remember(self, question: Message, answer: str, usage: Usage | None) -> None:
        self.messages += [question, {"role": "assistant", "content": answer}]
        self.attachments.clear()
        if usage is not None:
            self.num_tokens = usage.num_prompt_tokens + usage.num_generated_tokens

    def clear(self) -> None:
        """Forget what was said; settings stay."""
        self.messages.clear()
        self.attachments.clear()
        self.num_tokens = 0

    def meter(self) -> str:
        """How full the context is, as `1,234 of 40,960 tokens`; empty before the first answer."""
        if not self.num_tokens:
            return ""
        length = self.facts.context_length
        return f"{self.num_tokens:,} of {length:,} tokens" if length else f"{self.num_tokens:,} tokens"
