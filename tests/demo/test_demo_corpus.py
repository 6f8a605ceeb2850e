"""The corpus of the demo model: its documents, its tasks and its chat template."""

import re
from itertools import islice, pairwise
from random import Random

import jinja2
import pytest

from demo import story, tasks
from demo.corpus import ASSISTANT, CHAT_TEMPLATE, END, USER, documents, text
from demo.evaluate import false_claims
from demo.words import KINDS, NAMES, Kind

DRAWS = 300


def test_a_seed_gives_the_same_corpus_and_another_seed_another() -> None:
    first, again, other = (list(islice(documents(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("long", [False, True])
def test_every_document_ends_and_learns_only_what_the_model_is_to_say(long: bool) -> None:
    for document in islice(documents(3, long=long), DRAWS):
        assert document[-1].text.endswith(END)
        for part in document:
            assert part.learned == part.text.endswith(END)
            assert part.learned or part.text.endswith(ASSISTANT) or part.text.startswith("<|sys")


def test_the_corpus_holds_multi_byte_text_of_two_three_and_four_bytes() -> None:
    whole = "".join(text(document) for document in islice(documents(4), DRAWS))
    assert {len(char.encode()) for char in whole} == {1, 2, 3, 4}


def test_the_longest_documents_come_near_a_context_of_a_thousand_tokens() -> None:
    lengths = [len(text(document)) for document in islice(documents(5, long=True), DRAWS)]
    assert 3000 < max(lengths) < 4000


@pytest.mark.parametrize("seed", range(60))
def test_a_story_never_contradicts_itself_about_who_holds_what(seed: int) -> None:
    assert false_claims(story.tell(Random(seed), 1 + seed % 10))[0] == 0


def test_some_stories_state_who_holds_what() -> None:
    assert sum(false_claims(story.tell(Random(seed), 5))[1] for seed in range(20)) > 10


def test_a_false_claim_is_noticed() -> None:
    told = (
        "Once there was a fox named Mira. Mira had a red kite and loved it very much. "
        "Mira gave the red kite to Otto. In the end Mira had the red kite."
    )
    assert false_claims(told) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_story_about_an_animal_begins_with_it(kind: Kind) -> None:
    for seed in range(10):
        assert kind.word in story.tell(Random(seed), 2, kind).split("\n")[0]


def test_every_character_is_introduced_before_it_acts() -> None:
    names = {name.word for name in NAMES}
    for seed in range(60):
        seen: set[str] = set()
        told = story.tell(Random(seed), 6)
        for match in re.finditer(r"(named |name was |met )?(\w+)", told):
            if match[2] in names and match[2] not in seen:
                assert match[1], told[: match.end()]
                seen.add(match[2])


def operands(pattern: str, task: tasks.Task) -> list[int]:
    found = re.search(pattern, task.result)
    assert found, task
    return [int(number) for number in found.groups()]


def test_sums_and_every_step_towards_them_are_right() -> None:
    rng = Random(6)
    for kind in ("add", "subtract"):
        for _ in range(DRAWS):
            task = tasks.draw(rng, kind)
            for left, right in re.findall(r"([\d +-]+) = (\d+)", task.answer):
                numbers = [int(n) for n in re.findall(r"[+-]?\d+", left.replace(" ", ""))]
                assert sum(numbers) == int(right), task
            a, b, _ = operands(r"So (\d+) [+-] (\d+) = (\d+)\.", task)
            assert str(a) in task.question and str(b) in task.question


def test_counting_goes_from_the_first_number_to_the_last_in_equal_steps() -> None:
    rng = Random(7)
    for _ in range(DRAWS):
        task = tasks.draw(rng, "count")
        terms = [int(term) for term in re.findall(r"\d+", task.answer)]
        first, last = re.findall(r"from (\d+) to (\d+)", task.question)[0]
        assert (terms[0], terms[-1]) == (int(first), int(last))
        assert len({b - a for a, b in pairwise(terms)}) == 1


def test_reversals_and_sorted_lists_are_right() -> None:
    rng = Random(8)
    for _ in range(DRAWS):
        letters = tasks.draw(rng, "reverse_letters")
        asked = re.findall(r"\b[a-z]\b", letters.question)
        assert letters.answer == " ".join(reversed(asked)) + "."
        word = tasks.draw(rng, "reverse_word")
        backwards = word.result.removeprefix("Backwards that is ").rstrip(".").replace(" ", "")
        assert backwards[::-1] in word.question
        numbers = [int(n) for n in re.findall(r"\d+", tasks.draw(rng, "sort_numbers").answer)]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("kind", [k for k in tasks.KINDS_OF_TASK if k != "reverse_word"])
def test_a_held_out_question_never_enters_the_corpus(kind: str) -> None:
    rng = Random(9)
    held_out = {tasks.draw(rng, kind, held_out=True).question for _ in range(40)}
    assert held_out.isdisjoint(tasks.draw(rng, kind).question for _ in range(2000))


def test_the_chat_template_writes_conversations_as_the_corpus_does() -> None:
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "What is 1 + 1?"},
    ]
    rendered = template.render(messages=messages, add_generation_prompt=True)
    assert rendered == f"{USER}Hello!{ASSISTANT}Hi.{END}{USER}What is 1 + 1?{ASSISTANT}"


def test_the_chat_template_takes_the_result_of_a_tool_as_given_text() -> None:
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}
    messages = [call, {"role": "tool", "tool_call_id": "a", "content": "42"}]
    rendered = template.render(messages=messages, add_generation_prompt=True)
    assert rendered == f"{ASSISTANT}{END}{USER}42{ASSISTANT}"
