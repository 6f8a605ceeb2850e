"""The demo model's corpus: an endless stream of generated documents about a small world.

A document is a plain story or a conversation. The model is trained to predict its stories and
answers, but not the words of a user. A random seed determines all documents. No text is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from demo import story, tasks
from demo.words import KINDS, MOODS, with_article

END = "<|end|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (END, SYSTEM, USER, ASSISTANT)

# Jinja template for the text that `exchange` and `conversation` write. The model was not trained on
# tools, so a tool's result is formatted like a message of the user.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}<|system|>{{ message.content }}"
    "{% elif message.role in ('user', 'tool') %}<|user|>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% else %}{{ raise_exception('role must be system, user, assistant or tool') }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SHORT_EPISODES = (1, 1, 2, 2, 3)
LONG_EPISODES = (4, 6, 8, 10, 12)
MAX_TURNS = 4
MAX_LONG_TURNS = 12
SYSTEM_SHARE = 0.05

_ABOUT_ME = "I am a very small model. I can tell stories, add, subtract, count, sort and reverse."
_SMALL_TALK = (
    (("Hello!", "Hi!", "Hello", "Hi there!", "Good morning!"), "Hello! What shall we do?"),
    (("Who are you?", "What are you?", "What can you do?", "Help!"), _ABOUT_ME),
    (("Thank you!", "Thanks!", "Thank you very much."), "You are welcome! 😊"),
    (("Goodbye!", "Bye!", "See you!"), "Goodbye! 👋"),
    (("How are you?", "Are you well?"), "I am well – thank you for asking!"),
)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "Answer the question.",
    "Be kind and brief.",
)


class Part(NamedTuple):
    """A part of a document; if `learned` is False, the model is not trained to predict it."""

    text: str
    learned: bool


Document = tuple[Part, ...]


def plain_story(rng: Random, episodes: tuple[int, ...]) -> Document:
    """Return a story without a question, so that a prompt like "Once upon a time" is continued."""
    return (Part(story.tell(rng, rng.choice(episodes)) + END, True),)


def exchange(rng: Random, episodes: tuple[int, ...], story_share: float) -> Document:
    """Return one question and its answer: a story, a task or small talk."""
    if rng.random() < story_share:
        question, answer = _story_exchange(rng, episodes)
    elif rng.random() < 0.06:
        questions, answer = rng.choice(_SMALL_TALK)
        question = rng.choice(questions)
    else:
        question, answer, _ = tasks.draw(rng)
    return Part(f"{USER}{question}{ASSISTANT}", False), Part(f"{answer}{END}", True)


def _story_exchange(rng: Random, episodes: tuple[int, ...]) -> tuple[str, str]:
    length = rng.choice(episodes)
    if rng.random() < 0.1:
        return rng.choice(["Tell me a story.", "A story, please!"]), story.tell(rng, length)
    kind = rng.choice(KINDS)
    animal = with_article(rng.choice(["", "", f"{rng.choice(MOODS)} "]) + kind.word)
    size = "a long" if length > max(SHORT_EPISODES) else "a"
    asked = rng.choice(
        [
            f"Tell me {size} story about {animal}.",
            f"Can you tell me {size} story about {animal}?",
            f"Write {size} story about {animal}.",
            f"I would like {size} story about {animal}, please.",
        ]
    )
    return asked, story.tell(rng, length, kind)


def conversation(rng: Random, *, long: bool) -> Document:
    """Return several exchanges, sometimes after a system message."""
    parts: list[Part] = []
    if rng.random() < SYSTEM_SHARE:
        parts.append(Part(f"{SYSTEM}{rng.choice(_SYSTEMS)}", False))
    turns = rng.randint(2, MAX_LONG_TURNS) if long else rng.choice((1, 1, 2, MAX_TURNS))
    for _ in range(turns):
        parts += exchange(rng, SHORT_EPISODES, story_share=0.12)
    return tuple(parts)


def document(rng: Random, *, long: bool) -> Document:
    """Return one document; `long` ones fill training windows as long as the model's context."""
    draw = rng.random()
    if long and draw < 0.3:
        return plain_story(rng, LONG_EPISODES)
    if long and draw < 0.5:
        return exchange(rng, LONG_EPISODES, story_share=1.0)
    if not long and draw < 0.14:
        return plain_story(rng, SHORT_EPISODES)
    return conversation(rng, long=long)


def documents(seed: int, *, long: bool = False) -> Iterator[Document]:
    """Yield documents without end; the same seed gives the same documents."""
    rng = Random(f"{seed}/{long}")
    while True:
        yield document(rng, long=long)


def text(parts: Document) -> str:
    """Return a document as one string, special tokens included."""
    return "".join(part.text for part in parts)
