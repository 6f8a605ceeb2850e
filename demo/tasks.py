"""Questions with right answers: sums, counting, reversing, sorting, copying, who has what.

A hash of its operands decides whether a question is held out of the corpus; one in HELD_OUT_ONE_IN
is. `draw(..., held_out=True)` draws only these, for an evaluation with questions on which the model
was not trained.
"""

from __future__ import annotations

import string
import zlib
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from demo.words import COLOURS, NAMES, SPELLABLE, THINGS

HELD_OUT_ONE_IN = 20
MAX_OPERAND = 99
MAX_COUNT_TERMS = 10
MAX_LETTERS = 7
MAX_LIST = 5


class Task(NamedTuple):
    """A question, its full answer, and its result: the end of the answer that must be right."""

    question: str
    answer: str
    result: str


def is_held_out(*operands: object) -> bool:
    """Return True if questions with these operands are held out of the corpus, in every run."""
    return zlib.crc32(repr(operands).encode()) % HELD_OUT_ONE_IN == 0


def add(rng: Random) -> tuple[Task, bool]:
    a, b = rng.randint(1, MAX_OPERAND), rng.randint(1, MAX_OPERAND)
    asked = rng.choice(
        [f"What is {a} + {b}?", f"{a} + {b} = ?", f"Add {a} and {b}.", f"How much is {a} plus {b}?"]
    )
    result = f"{a} + {b} = {a + b}"
    return Task(asked, f"{_add_steps(a, b)} So {result}.", f"So {result}."), is_held_out("+", a, b)


def _add_steps(a: int, b: int) -> str:
    """Return text that adds the ones, then the tens with the carry."""
    ones = a % 10 + b % 10
    carry = " + 1" if ones > 9 else ""
    tens = a // 10 + b // 10 + ones // 10
    return f"{a % 10} + {b % 10} = {ones}, {a // 10} + {b // 10}{carry} = {tens}."


def subtract(rng: Random) -> tuple[Task, bool]:
    b, a = sorted((rng.randint(1, MAX_OPERAND), rng.randint(1, MAX_OPERAND)))
    asked = rng.choice(
        [
            f"What is {a} - {b}?",
            f"{a} - {b} = ?",
            f"Take {b} from {a}.",
            f"How much is {a} minus {b}?",
        ]
    )
    result = f"{a} - {b} = {a - b}"
    steps = _subtract_steps(a, b)
    return Task(asked, f"{steps} So {result}.", f"So {result}."), is_held_out("-", a, b)


def _subtract_steps(a: int, b: int) -> str:
    """Return text that subtracts the ones, with a borrow if needed, then the tens."""
    borrow = a % 10 < b % 10
    ones = a % 10 + 10 * borrow
    taken = " - 1" if borrow else ""
    tens = a // 10 - b // 10 - borrow
    return f"{ones} - {b % 10} = {ones - b % 10}, {a // 10} - {b // 10}{taken} = {tens}."


def count(rng: Random) -> tuple[Task, bool]:
    step = rng.choice((1, 1, 1, 1, 1, 1, 2, 5, 10))
    terms = rng.randint(3, MAX_COUNT_TERMS)
    first = rng.randint(1, rng.choice((9, 20, MAX_OPERAND)))
    last = first + step * (terms - 1)
    by = "" if step == 1 else f" by {step}s"
    if rng.random() < 0.2:
        first, last, step = last, first, -step
        asked = rng.choice(["Count down from {} to {}{}.", "Count backwards from {} to {}{}."])
    else:
        asked = rng.choice(
            [
                "Count from {} to {}{}.",
                "Can you count from {} to {}{}?",
                "Count up from {} to {}{}.",
            ]
        )
    answer = ", ".join(str(n) for n in range(first, last + step // abs(step), step)) + "."
    return Task(asked.format(first, last, by), answer, answer), is_held_out(first, last, step)


def reverse_letters(rng: Random) -> tuple[Task, bool]:
    letters = rng.choices(string.ascii_lowercase, k=rng.randint(3, MAX_LETTERS))
    asked = rng.choice(["Reverse the letters {}.", "Reverse: {}", "What is {} backwards?"])
    answer = " ".join(reversed(letters)) + "."
    return Task(asked.format(" ".join(letters)), answer, answer), is_held_out(*letters)


def reverse_word(rng: Random) -> tuple[Task, bool]:
    word = rng.choice(SPELLABLE)
    asked = rng.choice(
        ["Reverse the word {}.", "Spell {} backwards.", "What is the word {} in reverse?"]
    )
    backwards = " ".join(reversed(word))
    answer = f"The letters are {' '.join(word)}. Backwards that is {backwards}."
    return Task(asked.format(word), answer, f"Backwards that is {backwards}."), False


def reverse_list(rng: Random) -> tuple[Task, bool]:
    items = rng.sample(COLOURS + THINGS, rng.randint(2, MAX_LIST))
    asked = rng.choice(["Reverse this list: {}.", "Say these words in reverse order: {}."])
    answer = ", ".join(reversed(items)) + "."
    return Task(asked.format(", ".join(items)), answer, answer), is_held_out(*items)


def sort_numbers(rng: Random) -> tuple[Task, bool]:
    numbers = rng.sample(range(1, MAX_OPERAND + 1), rng.randint(2, MAX_LIST))
    asked = rng.choice(["Sort these numbers: {}.", "Put these numbers in order: {}."])
    answer = ", ".join(str(n) for n in sorted(numbers)) + "."
    return Task(asked.format(", ".join(map(str, numbers))), answer, answer), is_held_out(*numbers)


def repeat(rng: Random) -> tuple[Task, bool]:
    items = rng.sample(COLOURS + THINGS, rng.randint(2, MAX_LIST))
    asked = rng.choice(["Repeat after me: {}.", "Say this again: {}."])
    answer = ", ".join(items) + "."
    return Task(asked.format(", ".join(items)), answer, answer), is_held_out(*items)


def who_has(rng: Random) -> tuple[Task, bool]:
    people = [name.word for name in rng.sample(NAMES, 3)]
    colours, things = rng.sample(COLOURS, 2), rng.sample(THINGS, 2)
    thing, other = (f"{c} {t}" for c, t in zip(colours, things, strict=True))
    facts = [f"{people[0]} has the {thing}.", f"{people[1]} has the {other}."]
    rng.shuffle(facts)
    holder = people[0]
    if rng.random() < 0.6:
        holder = people[2]
        facts.append(f"{people[0]} gives the {thing} to {holder}.")
    answer = f"{holder} has the {thing}."
    question = f"{' '.join(facts)} Who has the {thing}?"
    return Task(question, answer, answer), is_held_out(*people, thing)


KINDS_OF_TASK: dict[str, Callable[[Random], tuple[Task, bool]]] = {
    "add": add,
    "subtract": subtract,
    "count": count,
    "reverse_letters": reverse_letters,
    "reverse_word": reverse_word,
    "reverse_list": reverse_list,
    "sort_numbers": sort_numbers,
    "repeat": repeat,
    "who_has": who_has,
}
# How often each kind is drawn, in the order above. Counting needs the most practice, because an
# answer shows only once where to stop. Sums come next, and who has what, which stories need, too.
_WEIGHTS = (4, 4, 7, 3, 2, 2, 1, 3, 4)


def draw(rng: Random, kind: str | None = None, *, held_out: bool = False) -> Task:
    """Return a task of `kind` (None: any kind), from the corpus or from the held-out questions.

    Words to reverse are too few to hold any out: all of them are in the corpus.
    """
    kind = kind or rng.choices(list(KINDS_OF_TASK), _WEIGHTS)[0]
    while True:
        task, kept_out = KINDS_OF_TASK[kind](rng)
        if kept_out == held_out or kind == "reverse_word":
            return task
