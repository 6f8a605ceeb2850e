"""Measure a demo checkpoint on questions it never saw: `python -m demo.evaluate DIR`.

Questions are those that `demo.tasks` holds out of the corpus, except for words to reverse, which
are too few to hold any out. Answers are decoded greedily by the code that serves models. A story is
judged by whether it ends, is about the right animal, and says correctly who holds what.
"""

from __future__ import annotations

import argparse
import re
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

from tokenizers import Tokenizer

from demo.corpus import ASSISTANT, END, USER
from demo.tasks import KINDS_OF_TASK, draw
from demo.words import KINDS, MOODS, with_article
from tailrace.origin.checkpoint.tokenizer_file import TOKENIZER_FILE
from tailrace.origin.models.load import load_model
from tailrace.origin.models.model import Model, Piece, context_pages, prefill

QUESTIONS_PER_KIND = 40
MAX_ANSWER_TOKENS = 120
MAX_STORY_TOKENS = 900
STORIES = 20

_CLAIMS = (
    re.compile(r"In the end (?P<who>\w+) had the (?P<thing>\w+ \w+)"),
    re.compile(r"the (?P<thing>\w+ \w+) was with (?P<who>\w+)"),
)
_EVENTS = (
    re.compile(r"(?P<who>\w+) had an? (?P<thing>\w+ \w+) and loved"),
    re.compile(r"found an? (?P<thing>\w+ \w+)"),
    re.compile(r"gave the (?P<thing>\w+ \w+) to (?P<who>\w+)"),
    re.compile(r"(?:Now|and) (?P<who>\w+) had the (?P<thing>\w+ \w+)"),
)
_HERO = re.compile(r"(?:named|name was) (\w+)")


class Answer(NamedTuple):
    """Generated text without its end token. `ended` is True if the model generated that token."""

    text: str
    ended: bool
    tokens: int


def answer(model: Model, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> Answer:
    """Decode greedily after `prompt`, which contains its special tokens as text, up to END."""
    end = tokenizer.token_to_id(END)
    ids, pages = tokenizer.encode(prompt).ids, range(context_pages(model.config))
    row, generated = prefill(model, ids, pages)[-1:], list[int]()
    for position in range(len(ids), min(len(ids) + max_tokens, model.config.context)):
        token = int(model.logits(row).argmax())
        if token == end:
            return Answer(tokenizer.decode(generated), True, len(generated))
        generated.append(token)
        row = model.forward([Piece([token], position, pages, prefill=False)])
    return Answer(tokenizer.decode(generated), False, len(generated))


def chat(question: str) -> str:
    """Return the prompt of a single question."""
    return f"{USER}{question}{ASSISTANT}"


def share_right(model: Model, tokenizer: Tokenizer, kind: str, questions: int) -> float:
    """Return the share of questions of `kind` that are answered rightly, with an end token."""
    rng, right = Random(f"evaluate/{kind}"), 0
    for _ in range(questions):
        task = draw(rng, kind, held_out=True)
        given = answer(model, tokenizer, chat(task.question), MAX_ANSWER_TOKENS)
        right += given.ended and given.text.endswith(task.result)
    return right / questions


def false_claims(story: str) -> tuple[int, int]:
    """Count a story's statements about who holds what; return how many are false, and all."""
    hero = _HERO.search(story)
    holder: dict[str, str] = {}
    false = total = 0
    for sentence in re.split(r"(?<=[.!?])\s", story):
        for pattern in _CLAIMS:
            for claim in pattern.finditer(sentence):
                total += 1
                false += holder.get(claim["thing"]) != claim["who"]
        for pattern in _EVENTS:
            for event in pattern.finditer(sentence):
                found = event.groupdict().get("who") or (hero[1] if hero else "")
                if not sentence.startswith("In the end"):
                    holder[event["thing"]] = found
    return false, total


class StoryScore(NamedTuple):
    """Results for a number of stories, as counts."""

    stories: int
    ended: int
    about_the_right_animal: int
    false: int
    claims: int
    tokens: int


def judge_stories(model: Model, tokenizer: Tokenizer, stories: int) -> StoryScore:
    """Ask the model for stories about various animals, and judge each story."""
    subjects = list(product(MOODS, KINDS))
    Random("evaluate/stories").shuffle(subjects)
    ended = fitting = false = claims = tokens = 0
    for mood, kind in subjects[:stories]:
        animal = with_article(f"{mood} {kind.word}")
        prompt = chat(f"Tell me a story about {animal}.")
        told = answer(model, tokenizer, prompt, MAX_STORY_TOKENS)
        ended += told.ended and "The end." in told.text
        fitting += kind.word in told.text.split("\n")[0]
        wrong, all_claims = false_claims(told.text)
        false, claims, tokens = false + wrong, claims + all_claims, tokens + told.tokens
    return StoryScore(stories, ended, fitting, false, claims, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a demo checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--questions", type=int, default=QUESTIONS_PER_KIND)
    asked = parser.parse_args()
    model = load_model(asked.directory)
    tokenizer = Tokenizer.from_file(str(asked.directory / TOKENIZER_FILE))
    for kind in KINDS_OF_TASK:
        share = share_right(model, tokenizer, kind, asked.questions)
        print(f"{kind:16} {share:6.1%} of {asked.questions} right", flush=True)
    print(judge_stories(model, tokenizer, STORIES))
    prompt = chat("Tell me a long story about a fox.")
    print(answer(model, tokenizer, prompt, MAX_STORY_TOKENS).text)


if __name__ == "__main__":
    main()
